"""A model's variables as a `State`."""

from __future__ import annotations

from typing import TYPE_CHECKING

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
