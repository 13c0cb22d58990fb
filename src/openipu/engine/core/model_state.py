"""A model's variables as a `State`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from openipu.engine.keras_compat.api import has_value
from openipu.engine.types import Array

import numpy as np

from .state import Mode, State

if TYPE_CHECKING:
    import keras


def variables_of(model: keras.Model, mode: Mode) -> State:
    """The Keras variables behind each part of the state that `mode` uses."""
    return State(
        list(model.trainable_variables),
        list(model.non_trainable_variables),
        list(model.optimizer.variables) if mode == "train" and model.optimizer is not None else [],
        list(model.metrics_variables) if mode != "predict" else [],
    )


def values_of(owners: State) -> State:
    """The current values of the variables."""
    return State(*([v.value for v in part] for part in owners))


def assign(owners: State, state: State) -> None:
    """Write a state into the variables. Metrics of several replicas are added up."""
    for part, values in zip(owners, state, strict=True):
        for v, value in zip(part, values, strict=True):
            v.assign(value if value.ndim == len(v.shape) else np.asarray(value).sum(0))


def unshared(state: State, model: keras.Model) -> State:
    """The same state, with copies of those arrays that are in it twice or that the optimizer has too.

    An execution uses up the arrays that it is given. Variables share an array when one was assigned to another, as an
    optimizer does with averaged weights when training ends.
    """
    optimizer = getattr(model, "optimizer", None)
    others = [] if state.optimizer or optimizer is None else filter(has_value, optimizer.variables)
    seen = {id(v.value) for v in others}

    def own(array: Array) -> Array:
        copied = array.copy() if id(array) in seen else array
        seen.add(id(array))
        return copied

    return State(*([own(array) for array in part] for part in state))
