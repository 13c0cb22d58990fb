"""Compares integer labels with the classes that the model has, before it trains or evaluates.

Sparse categorical crossentropy turns a label into a row of a one-hot matrix. On JAX, a label that is negative or too
large gives a row of zeros, so the loss of that sample is silently 0. Numbers that do not fit in 32 bits are cut off
before, and become any other class.

Only labels that are NumPy arrays are checked. Which of them meet which output is not guessed: Keras' own loss is traced
with them (`_uses`). Where something else might become of them (a loss or step of the user's own, a mask), nothing is
checked.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from openipu.engine.core.enqueued import ignored
from openipu.engine.core.model_state import variables_of
from openipu.engine.core.state import Mode
from openipu.engine.keras_compat import api as keras_api
from openipu.engine.keras_compat import graph_api
from openipu.engine.keras_compat.patches import LOSS_CALLS, tracing
from openipu.engine.types import Array, Tree

import jax
import keras
import numpy as np

log = logging.getLogger("openipu")

BLOCK = 1 << 20
"""The number of labels that are compared at a time, which bounds the memory for it."""


@dataclass(frozen=True, slots=True)
class _Use:
    """How a loss uses an array of labels."""

    label: int
    """The position of the array among those of the labels."""
    weight: int | None
    """The position of its sample weights among those of the sample weights."""
    classes: int
    ignored: int | None
    """The label of samples that the loss ignores."""


class LabelCheck:
    """Checks the labels of one model. What its losses use is found out once."""

    def __init__(self, model: keras.Model) -> None:
        self._model = model
        self._known: tuple[Any, Any, list[_Use]] | None = None

    def check(self, mode: Mode, data: Tree, batch_size: int | None) -> None:
        """Raise an error if a label in `data`, which are arrays in host memory, is not one of the model's classes."""
        losses = keras_api.sparse_losses(self._model)
        if not losses or keras_api.overrides(self._model, f"{mode}_step"):
            return
        _, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
        labels, weights = jax.tree.leaves(y), jax.tree.leaves(sample_weight)
        limits = [_limits(a) for a in labels]
        if all(limit is None or _surely_classes(self._model, losses, *limit) for limit in limits):
            return
        names = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(y)]
        for use in self._uses(data, batch_size or 1):
            limit = limits[use.label]
            if limit is not None and not 0 <= limit[0] <= limit[1] < use.classes:
                weight = None if use.weight is None else weights[use.weight]
                _check_array(names[use.label], labels[use.label], weight, use, mode)

    def _uses(self, data: Tree, batch_size: int) -> list[_Use]:
        """How the model's losses use the labels. Traced once for each compiled loss and shape of data."""
        batch = _one_batch(data, batch_size)
        loss, shapes = keras_api.compiled_loss(self._model), jax.tree.map(lambda a: (a.shape, a.dtype), batch)
        if self._known is None or self._known[0] is not loss or self._known[1] != shapes:
            self._known = loss, shapes, _trace_uses(self._model, batch)
        return self._known[2]


def _limits(labels: object) -> tuple[int, int] | None:
    """The smallest and the largest label, or None if these are not integers in a NumPy array."""
    if not isinstance(labels, np.ndarray) or labels.dtype.kind not in "iu" or not labels.size:
        return None
    return int(labels.min()), int(labels.max())


def _surely_classes(model: keras.Model, losses: list[keras.losses.Loss], least: int, most: int) -> bool:
    """Whether labels between `least` and `most` are classes of all outputs, which a model's graph may tell at once."""
    graph = graph_api.functional_of(model)
    if graph is None or any(keras_api.sparse_settings(loss)[0] != -1 for loss in losses):
        return False
    widths = [output.shape[-1] for output in jax.tree.leaves(graph_api.outputs_of(graph)) if output.shape]
    return least >= 0 and all(width is not None and most < width for width in widths)


def _one_batch(data: Tree, batch_size: int) -> Tree:
    """The shapes of one batch of the data."""

    def spec(a: Any) -> jax.ShapeDtypeStruct:
        rows = min(batch_size, a.shape[0])
        return jax.ShapeDtypeStruct((rows, *a.shape[1:]), jax.dtypes.canonicalize_dtype(np.dtype(a.dtype)))

    return jax.tree.map(spec, data)


def _trace_uses(model: keras.Model, batch: Tree) -> list[_Use]:
    """Run the model and its losses on shapes, and note which labels reach which sparse loss."""
    uses: list[_Use] = []
    owners = variables_of(model, "test")
    state = [
        [jax.ShapeDtypeStruct(v.shape, keras_api.stored_dtype(v)) for v in part]
        for part in (owners.trainable, owners.non_trainable, owners.metrics)
    ]

    def traced(state: list[Any], batch: Tree) -> None:
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(batch)
        with LOSS_CALLS.using(_noting(uses, jax.tree.leaves(y), jax.tree.leaves(sample_weight))):
            model.compute_loss_and_updates(*state, x, y, sample_weight, training=False)

    try:
        with tracing(), ignored():
            jax.eval_shape(traced, state, batch)
    except Exception as error:  # the program itself is traced with more around it, and will say what is wrong
        log.debug("%s: labels are not checked: %r", model.name, error)
        return []
    return uses


def _noting(uses: list[_Use], labels: list[Array], weights: list[Array]) -> Callable[..., Any]:
    """A handler of calls of losses that notes the sparse ones that get one of the `labels` as it is."""

    def call(
        original: Callable[..., Any], loss: keras.losses.Loss, y_true: Any, y_pred: Any, weight: Any = None
    ) -> Any:
        label = _position(y_true, labels)
        masked = keras_api.get_keras_mask(y_pred) is not None
        if label is not None and keras_api.is_sparse(loss) and not masked:
            axis, ignored = keras_api.sparse_settings(loss)
            position = None if weight is None else _position(weight, weights)
            if (weight is None) == (position is None):
                uses.append(_Use(label, position, y_pred.shape[axis], ignored))
        return original(loss, y_true, y_pred, weight)

    return call


def _position(array: object, arrays: list[Array]) -> int | None:
    return next((i for i, one in enumerate(arrays) if one is array), None)


def _check_array(name: str, labels: np.ndarray, weight: Any, use: _Use, mode: Mode) -> None:
    """Raise an error that names the first label that is not a class, unless it has no weight or is to be ignored."""
    for start, block in _blocks(labels):
        bad = (block < 0) | (block >= use.classes)
        if use.ignored is not None:
            bad &= block != use.ignored
        if weight is not None:
            counts = _counted(np.asarray(weight[start : start + len(block)]), block.shape)
            if counts is None:
                return
            bad &= counts
        if bad.any():
            inside = tuple(int(i) for i in np.argwhere(bad)[0])
            row = start + inside[0]
            place = f"row {row}" if bad[0].size == 1 else f"row {row} (at {[row, *inside[1:]]})"
            raise _error(name, place, block[inside], use, mode)


def _blocks(labels: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
    """The labels in blocks of rows, and the number of the first row of each."""
    rows = max(1, BLOCK // max(1, math.prod(labels.shape[1:])))
    for start in range(0, len(labels), rows):
        yield start, labels[start : start + rows]


def _counted(weight: np.ndarray, shape: tuple[int, ...]) -> np.ndarray | None:
    """Which labels of this shape have a weight that is not zero; None if the shapes do not go together."""
    while weight.ndim > len(shape) and weight.shape[-1] == 1:
        weight = weight[..., 0]
    weight = weight.reshape(*weight.shape, *[1] * (len(shape) - weight.ndim))
    try:
        return np.broadcast_to(weight != 0, shape)
    except ValueError:
        return None


def _error(name: str, place: str, value: np.integer, use: _Use, mode: Mode) -> ValueError:
    which = f" {name}" if name else ""
    whose = "" if mode == "train" else " of the data to evaluate"
    return ValueError(
        f"The label in {place}{whose} is {value}, but the output that the labels{which} belong to has {use.classes} "
        f"classes: labels must be 0 to {use.classes - 1}. Correct the labels or the last layer; if the label marks "
        "samples to ignore, give it to the loss as `ignore_class`. `model.set_label_check(False)` switches this "
        "check off."
    )
