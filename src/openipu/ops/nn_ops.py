"""Operations of neural networks: activations, connectionist temporal classification (CTC), and sampled losses."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar, overload

from openipu import _validate as validate
from openipu.engine.types import Array

import jax
import jax.numpy as jnp
import keras
from jax.typing import ArrayLike, DTypeLike

from . import _sampled_losses as sampled
from ._operation import array, operation
from .rand_ops import random_key

__all__ = [
    "ctc_beam_search_decoder",
    "ctc_beam_search_decoder_with_log_probs",
    "ctc_loss_v2",
    "ctc_loss_with_log_probs",
    "gelu",
    "hard_sigmoid",
    "multi_conv",
    "nce_loss",
    "sampled_softmax_loss",
    "softmax",
    "swish",
]
F = TypeVar("F", bound=Callable[..., Any])


# --- activations -----------------------------------------------------------------------------------------------------


@operation
def gelu(x: ArrayLike, approximate: bool = True, name: str | None = None) -> Array:  # noqa: ARG001 - see `operation`
    """The Gaussian error linear unit.

    >>> print(ipu.nn_ops.gelu(np.array([-1.0, 0.0, 1.0])).round(2))
    [-0.16  0.    0.84]

    Args:
        x: An array.
        approximate: Whether it is computed with tanh, or exactly.
        name: A name for the operation in profiles.
    """
    result: Array = keras.ops.gelu(array(x), validate.flag("approximate", approximate))
    return result


@operation
def hard_sigmoid(x: ArrayLike, name: str | None = None) -> Array:  # noqa: ARG001
    """`0.2 * x + 0.5`, at least 0 and at most 1. The slope of `keras.ops.hard_sigmoid` is 1/6.

    >>> print(ipu.nn_ops.hard_sigmoid(np.array([-3.0, 0.0, 1.0])).round(2))
    [0.  0.5 0.7]

    Args:
        x: An array.
        name: A name for the operation in profiles.
    """
    values = array(x)
    whole = jnp.issubdtype(values.dtype, jnp.integer)
    return jnp.clip(values * 0.2 + 0.5, 0, 1).astype("float32" if whole else values.dtype)


@operation
def swish(x: ArrayLike, name: str | None = None) -> Array:  # noqa: ARG001
    """`x * sigmoid(x)`.

    >>> print(ipu.nn_ops.swish(np.array([0.0, 20.0])))
    [ 0. 20.]

    Args:
        x: An array.
        name: A name for the operation in profiles.
    """
    result: Array = keras.ops.silu(array(x))
    return result


@operation
def softmax(x: ArrayLike, stable: bool = False, name: str | None = None) -> Array:  # noqa: ARG001
    """Softmax over the last axis.

    >>> print(ipu.nn_ops.softmax(np.array([5.0, 5.0])))
    [0.5 0.5]

    Args:
        x: An array.
        stable: Whether large values must not overflow. They never do here.
        name: A name for the operation in profiles.
    """
    validate.flag("stable", stable)
    result: Array = keras.ops.softmax(array(x))
    return result


@overload
def multi_conv(func: F, options: Mapping[str, str] | None = ...) -> F: ...
@overload
def multi_conv(func: None = ..., options: Mapping[str, str] | None = ...) -> Callable[[F], F]: ...
def multi_conv(func: F | None = None, options: Mapping[str, str] | None = None) -> F | Callable[[F], F]:
    """The function as it is: XLA itself finds convolutions that can run at the same time. Also a decorator.

    >>> @ipu.nn_ops.multi_conv
    ... def both(a, b):
    ...     return keras.ops.conv(a, np.ones((1, 1, 3, 8))), keras.ops.conv(b, np.ones((1, 1, 3, 8)))
    >>> left, right = both(np.ones((1, 6, 6, 3)), np.ones((1, 4, 4, 3)))
    >>> left.shape, right.shape
    ((1, 6, 6, 8), (1, 4, 4, 8))

    Args:
        func: A function with convolutions in it.
        options: Options of Poplar. They have no effect here.
    """
    if validate.mapping("options", options, optional=True):
        validate.no_effect({"multi_conv(options=)": "they are for the original compiler"})
    validate.function("func", func, optional=True)
    return func if func is not None else lambda function: function


# --- CTC -------------------------------------------------------------------------------------------------------------


@operation
def ctc_loss_v2(
    labels: ArrayLike,
    logits: ArrayLike,
    label_length: ArrayLike,
    logit_length: ArrayLike,
    blank_index: int,
    out_dtype: DTypeLike | None = None,
    name: str | None = None,  # noqa: ARG001
) -> Array:
    """The CTC loss of each sample.

    >>> logits = 5.0 * np.eye(3)[[1, 0, 2]][:, None]  # three time steps of one sample: label 1, blank, label 2
    >>> loss = ipu.nn_ops.ctc_loss_v2([[1, 2]], logits, [2], [3], blank_index=0)
    >>> print(loss.round(2))
    [0.03]

    Args:
        labels: Whole numbers of shape (batch, longest label).
        logits: Of shape (longest time, batch, classes).
        label_length: How many labels each sample has, of shape (batch,).
        logit_length: How many time steps each sample has, of shape (batch,).
        blank_index: The class that stands for no label. Negative ones count from the last class.
        out_dtype: The dtype of the loss; None for that of the logits.
        name: A name for the operation in profiles.
    """
    scores = array(logits)
    blank = _blank(blank_index, scores)
    lengths = array(label_length, "int32"), array(logit_length, "int32")
    loss = keras.ops.ctc_loss(array(labels, "int32"), jnp.swapaxes(scores, 0, 1), *lengths, mask_index=blank)
    result: Array = keras.ops.cast(loss, keras.backend.standardize_dtype(out_dtype or scores.dtype))
    return result


@operation
def ctc_loss_with_log_probs(
    labels: ArrayLike,
    data: ArrayLike,
    label_length: ArrayLike,
    data_length: ArrayLike,
    blank_index: int,
    out_dtype: DTypeLike | None = None,
    name: str | None = None,
) -> Array:
    """`ctc_loss_v2` of logarithms of probabilities, such as those of `keras.ops.log_softmax`.

    >>> log_probs = keras.ops.log_softmax(5.0 * np.eye(3)[[1, 0, 2]][:, None])
    >>> print(ipu.nn_ops.ctc_loss_with_log_probs([[1, 2]], log_probs, [2], [3], blank_index=0).round(2))
    [0.03]
    """
    return ctc_loss_v2(labels, data, label_length, data_length, blank_index, out_dtype, name)


@operation
def ctc_beam_search_decoder(
    logits: ArrayLike,
    logits_length: ArrayLike,
    beam_width: int = 100,
    top_paths: int = 1,
    blank_index: int = -1,
    name: str | None = None,  # noqa: ARG001
) -> tuple[Array, Array, Array]:
    """The most probable sequences of labels.

    >>> logits = 5.0 * np.eye(3)[[1, 0, 2]][:, None]  # three time steps of one sample: label 1, blank, label 2
    >>> scores, lengths, labels = ipu.nn_ops.ctc_beam_search_decoder(logits, [3], blank_index=0)
    >>> print(lengths, labels)
    [[2]] [[[1 2 0]]]

    Args:
        logits: Of shape (longest time, batch, classes).
        logits_length: How many time steps each sample has, of shape (batch,).
        beam_width: How many sequences are followed.
        top_paths: How many of them are returned, the most probable first.
        blank_index: The class that stands for no label. Negative ones count from the last class.
        name: A name for the operation in profiles.

    Returns:
        The negative logarithms of probabilities and the lengths, both of shape (batch, top_paths), and the labels of
        shape (batch, top_paths, longest time), followed by blanks.
    """
    scores = array(logits)
    beams = validate.count("beam_width", beam_width)
    paths, blank = validate.count("top_paths", top_paths, most=beams), _blank(blank_index, scores)
    labels, found = keras.ops.ctc_decode(
        jnp.swapaxes(scores, 0, 1), array(logits_length, "int32"), "beam_search", beams, paths, mask_index=blank
    )
    labels = jnp.swapaxes(labels, 0, 1)
    lengths = jnp.sum(labels >= 0, -1, dtype="int32")
    return -found, lengths, jnp.where(labels >= 0, labels, blank).astype("int32")


@operation
def ctc_beam_search_decoder_with_log_probs(
    log_probs: ArrayLike,
    input_length: ArrayLike,
    beam_width: int = 100,
    top_paths: int = 1,
    blank_index: int = -1,
    name: str | None = None,
) -> tuple[Array, Array, Array]:
    """`ctc_beam_search_decoder` of logarithms of probabilities, such as those of `keras.ops.log_softmax`.

    >>> log_probs = keras.ops.log_softmax(5.0 * np.eye(3)[[1, 0, 2]][:, None])
    >>> print(ipu.nn_ops.ctc_beam_search_decoder_with_log_probs(log_probs, [3], blank_index=0)[2])
    [[[1 2 0]]]
    """
    return ctc_beam_search_decoder(log_probs, input_length, beam_width, top_paths, blank_index, name)


def _blank(index: int, scores: Array) -> int:
    if scores.ndim != 3:
        raise ValueError(f"The scores have the shape {scores.shape}. Give them as (longest time, batch, classes).")
    classes = scores.shape[-1]
    return validate.count("blank_index", index, least=-classes, most=classes - 1) % classes


# --- losses over a sample of the classes -----------------------------------------------------------------------------

_GIVE_SAMPLE = "Give `sampled_values`."


@operation
def nce_loss(
    weights: ArrayLike,
    biases: ArrayLike,
    labels: ArrayLike,
    inputs: ArrayLike,
    num_sampled: int,
    num_classes: int,
    num_true: int = 1,
    sampled_values: tuple[ArrayLike, ArrayLike, ArrayLike] | None = None,
    remove_accidental_hits: bool = False,
    name: str | None = None,  # noqa: ARG001
) -> Array:
    """The loss of noise-contrastive estimation, one number for each input.

    It is the sum of binary cross-entropies of the labels and of classes that are drawn at random. Without
    `sampled_values`, it can be used in functions for `strategy.run`.

    >>> weights, biases, labels = np.zeros((100, 4), "float32"), np.zeros(100, "float32"), np.arange(32)[:, None]
    >>> loss = strategy.run(lambda: ipu.nn_ops.nce_loss(weights, biases, labels, x, num_sampled=8, num_classes=100))
    >>> loss.shape
    (32,)

    Args:
        weights: One row for each class.
        biases: One number for each class.
        labels: The classes of each input, in `num_true` columns. Give frequent classes small numbers.
        inputs: One row for each input, as long as a row of `weights`.
        num_sampled: How many classes are drawn for the whole batch, each at most once.
        num_classes: How many classes there are.
        num_true: How many classes each input has.
        sampled_values: Classes that were drawn elsewhere, and how often the labels and these classes are expected.
        remove_accidental_hits: Whether a drawn class does not count for inputs of that class.
        name: A name for the operation in profiles.
    """
    values = array(inputs)
    known = sampled.checked(labels, values, num_true, num_sampled, num_classes)
    sample = _sample("nce_loss", sampled_values, None, num_sampled, num_classes, known)
    own, others = sampled.logits(weights, biases, known, values, sample, remove_accidental_hits)
    # log(1 + exp(x)) - y * x, where the labels share one y
    return (jax.nn.softplus(own) - own / num_true).sum(1) + jax.nn.softplus(others).sum(1)


@operation
def sampled_softmax_loss(
    weights: ArrayLike,
    biases: ArrayLike,
    labels: ArrayLike,
    inputs: ArrayLike,
    num_sampled: int,
    num_classes: int,
    num_true: int = 1,
    sampled_values: tuple[ArrayLike, ArrayLike, ArrayLike] | None = None,
    remove_accidental_hits: bool = True,
    seed: ArrayLike | None = None,
    name: str | None = None,  # noqa: ARG001
) -> Array:
    """The cross-entropy of a softmax over the labels and over classes that are drawn at random, for each input.

    Train with it, and evaluate with the softmax over all classes. Without `sampled_values` or `seed`, it can be used in
    functions for `strategy.run`.

    >>> weights, biases, labels = np.zeros((100, 4), "float32"), np.zeros(100, "float32"), np.arange(32)[:, None]
    >>> loss = ipu.nn_ops.sampled_softmax_loss(weights, biases, labels, x, num_sampled=8, num_classes=100, seed=(1, 2))
    >>> loss.shape
    (32,)

    Args:
        weights: One row for each class.
        biases: One number for each class.
        labels: The classes of each input, in `num_true` columns. Give frequent classes small numbers.
        inputs: One row for each input, as long as a row of `weights`.
        num_sampled: How many classes are drawn for the whole batch, each at most once.
        num_classes: How many classes there are.
        num_true: How many classes each input has.
        sampled_values: Classes that were drawn elsewhere, and how often the labels and these classes are expected.
        remove_accidental_hits: Whether a drawn class does not count for inputs of that class.
        seed: Two whole numbers. The same ones draw the same classes.
        name: A name for the operation in profiles.
    """
    values = array(inputs)
    known = sampled.checked(labels, values, num_true, num_sampled, num_classes)
    sample = _sample("sampled_softmax_loss", sampled_values, seed, num_sampled, num_classes, known)
    own, others = sampled.logits(weights, biases, known, values, sample, remove_accidental_hits)
    logits = jnp.concatenate([own, others], 1)
    return jax.nn.logsumexp(logits, 1) - own.mean(1)


def _sample(
    what: str, given: tuple[ArrayLike, ArrayLike, ArrayLike] | None, seed: ArrayLike | None, *sizes: Any
) -> sampled.Sample:
    if given is not None:
        return sampled.Sample(*given)
    return sampled.drawn(random_key(what, seed, _GIVE_SAMPLE), *sizes)
