"""The operations of `tf.nn` and `tf.random`, and those that look at values, in terms of JAX. See native.py."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from openipu import _validate as validate
from openipu.engine.program.random_numbers import program_seeds
from openipu.engine.types import Tree

import jax
import jax.numpy as jnp
import keras
import numpy as np
from jax import nn

from .elementwise import Tensor, alike, leaky_relu
from .native import Axis, DType, Shape, dims, native, short
from .values import where


@native("softmax")
def _softmax(logits: Tensor, axis: int | None = None) -> Tensor:
    return nn.softmax(logits, -1 if axis is None else axis)


@native("log_softmax")
def _log_softmax(logits: Tensor, axis: int | None = None) -> Tensor:
    return nn.log_softmax(logits, -1 if axis is None else axis)


@native("leaky_relu")
def _leaky_relu(features: Tensor, alpha: float = 0.2) -> Tensor:
    return leaky_relu(features, alpha)


@native("gelu")
def _gelu(features: Tensor, approximate: bool = False) -> Tensor:
    return nn.gelu(features, approximate)


@native("silu", "swish")
def _silu(features: Tensor, beta: float = 1.0) -> Tensor:
    return features * nn.sigmoid(beta * features)


@native("bias_add")
def _bias_add(value: Tensor, bias: Tensor, data_format: str | None = None) -> Tensor:
    channels_first = (data_format or "N..C").startswith("NC")
    shape = (-1, *(1,) * (np.ndim(value) - 2)) if channels_first else (-1,)
    return value + jnp.reshape(bias, shape)


@native("l2_loss")
def _l2_loss(t: Tensor) -> Tensor:
    return jnp.sum(jnp.square(t)) / 2


@native("l2_normalize")
def _l2_normalize(x: Tensor, axis: Axis = None, epsilon: float = 1e-12) -> Tensor:
    square = jnp.sum(jnp.square(x), axis=tuple(axis) if isinstance(axis, list) else axis, keepdims=True)
    return x * jax.lax.rsqrt(jnp.maximum(square, epsilon))


@native("moments")
def _moments(x: Tensor, axes: Axis, shift: None = None, keepdims: bool = False) -> tuple[Tensor, Tensor]:
    del shift
    axes = tuple(axes) if isinstance(axes, list) else axes
    return jnp.mean(x, axes, keepdims=keepdims), jnp.var(x, axes, keepdims=keepdims)


@native("softmax_cross_entropy_with_logits")
def cross_entropy(labels: Tensor, logits: Tensor, axis: int = -1) -> Tensor:
    """The cross entropy of each row, for labels that are chances."""
    labels, logits = alike(labels, logits)
    return -jnp.sum(labels * nn.log_softmax(logits, axis), axis)


@native("sparse_softmax_cross_entropy_with_logits")
def sparse_cross_entropy(labels: Tensor, logits: Tensor) -> Tensor:
    """The cross entropy of each row, for labels that are classes."""
    chances = nn.log_softmax(jnp.asarray(logits), -1)
    return -jnp.squeeze(jnp.take_along_axis(chances, jnp.expand_dims(jnp.asarray(labels), -1), -1), -1)


@native("sigmoid_cross_entropy_with_logits")
def _sigmoid_cross_entropy(labels: Tensor, logits: Tensor) -> Tensor:
    labels, logits = alike(labels, logits)
    return nn.softplus(logits) - logits * labels


@native("conv2d")
def _conv2d(
    input: Tensor,
    filters: Tensor,
    strides: int | Sequence[int],
    padding: str | Sequence[Sequence[int]],
    data_format: str = "NHWC",
    dilations: int | Sequence[int] | None = None,
) -> Tensor:
    widths = padding if isinstance(padding, str) else _spatial(np.asarray(padding).tolist(), data_format)
    return jax.lax.conv_general_dilated(
        jnp.asarray(input), jnp.asarray(filters), _spatial(strides, data_format), widths,
        rhs_dilation=_spatial(1 if dilations is None else dilations, data_format),
        dimension_numbers=(data_format, "HWIO", data_format),
    )  # fmt: skip


@native("max_pool", "max_pool2d")
def _max_pool(
    input: Tensor,
    ksize: int | Sequence[int],
    strides: int | Sequence[int],
    padding: str,
    data_format: str = "NHWC",
) -> Tensor:
    return _pooled(keras.ops.max_pool, input, ksize, strides, padding, data_format)


@native("avg_pool", "avg_pool2d")
def _avg_pool(
    input: Tensor,
    ksize: int | Sequence[int],
    strides: int | Sequence[int],
    padding: str,
    data_format: str = "NHWC",
) -> Tensor:
    return _pooled(keras.ops.average_pool, input, ksize, strides, padding, data_format)


def _pooled(
    pool: Callable[..., Tensor],
    input: Tensor,
    ksize: int | Sequence[int],
    strides: int | Sequence[int],
    padding: str,
    data_format: str,
) -> Tensor:
    layout = "channels_first" if data_format == "NCHW" else "channels_last"
    return pool(input, _spatial(ksize, data_format), _spatial(strides, data_format), padding.lower(), layout)


def _spatial(sizes: Any, data_format: str) -> tuple[Any, Any]:
    """Height and width of a window, or its paddings, that may be given with entries for batch and channels."""
    if isinstance(sizes, int):
        return sizes, sizes
    if len(sizes) == 4:
        return (sizes[2], sizes[3]) if data_format == "NCHW" else (sizes[1], sizes[2])
    return (sizes[0], sizes[0]) if len(sizes) == 1 else (sizes[0], sizes[1])


# --- random numbers --------------------------------------------------------------------------------------------------


def _seed() -> keras.random.SeedGenerator:
    seeds = program_seeds()
    if seeds is None:
        raise NotImplementedError(
            f"Random numbers of `tf.random` are drawn in a layer, a loss or a model's own step ({where()}), where they "
            "would be the same in every step. Make `self.seeds = keras.random.SeedGenerator()` in `__init__`, and use "
            "`keras.random.normal(shape, seed=self.seeds)` or one of its relatives."
        )
    return seeds


@native("random.normal", "random_normal")
def _normal(shape: Shape, mean: float = 0.0, stddev: float = 1.0, dtype: DType = "float32") -> Tensor:
    return keras.random.normal(dims(shape), mean, stddev, short(dtype), _seed())


@native("random.truncated_normal", "truncated_normal")
def _truncated_normal(shape: Shape, mean: float = 0.0, stddev: float = 1.0, dtype: DType = "float32") -> Tensor:
    return keras.random.truncated_normal(dims(shape), mean, stddev, short(dtype), _seed())


@native("random.uniform", "random_uniform")
def _uniform(shape: Shape, minval: float = 0, maxval: float | None = None, dtype: DType = "float32") -> Tensor:
    if np.issubdtype(np.dtype(dtype), np.integer):
        return keras.random.randint(dims(shape), minval, maxval, short(dtype), _seed())
    return keras.random.uniform(dims(shape), minval, 1.0 if maxval is None else maxval, short(dtype), _seed())


@native("random.shuffle", "random_shuffle")
def _shuffle(value: Tensor) -> Tensor:
    return keras.random.shuffle(value, seed=_seed())


@native("dropout")
def _dropout(x: Tensor, rate: float, noise_shape: Shape | None = None) -> Tensor:
    return keras.random.dropout(x, rate, None if noise_shape is None else dims(noise_shape), _seed())


# --- looking at values -----------------------------------------------------------------------------------------------


def print_values(*inputs: Tree, sep: str = " ", **options: object) -> None:
    """Print values when the program runs."""
    if options:
        validate.no_effect({f"{name} of tf.print": "programs print to the standard output" for name in options})
    parts = [value if isinstance(value, str) else "{}" for value in inputs]
    text = sep.join(part if part == "{}" else part.replace("{", "{{").replace("}", "}}") for part in parts)
    jax.debug.print(text, *(value for value in inputs if not isinstance(value, str)))


def unchecked(name: str) -> None:
    """Say once that a check of values is not made."""
    validate.notice(f"tf.{name} has no effect on values of a program: a compiled program cannot stop halfway.")
