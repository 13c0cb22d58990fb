"""A model's variables as a `State`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from openipu.engine.keras_compat.api import has_value
from openipu.engine.types import Array, Tree

import numpy as np

from .state import Mode, State

if TYPE_CHECKING:
    import keras


@dataclass(frozen=True, slots=True)
class Carried:
    """What the `train_step` of a model changes besides the parts that Keras knows, carried from step to step."""

    optimizers: tuple[keras.optimizers.Optimizer, ...] = ()
    """Optimizers besides the one that was given to `compile`, such as those of the two halves of a GAN."""
    seeds: keras.random.SeedGenerator | None = None
    """Where the step draws random numbers from."""

    @property
    def variables(self) -> list[keras.Variable]:
        """All variables."""
        slots = [v for optimizer in self.optimizers for v in optimizer.variables]
        return slots if self.seeds is None else [*slots, self.seeds.state]


def carried_by(model: keras.Model) -> Carried:
    """What is carried for a model's own `train_step`."""
    found: Carried = vars(model).get("_ipu_carried", Carried())
    return found


def carry(model: keras.Model, carried: Carried) -> None:
    """Carry this from step to step from now on."""
    vars(model)["_ipu_carried"] = carried  # not `setattr`: Keras tracks what is assigned to its objects


def prepare_step(model: keras.Model, first_batch: Callable[[], Tree]) -> None:
    """Let the model's own `train_step` say what has to be carried, if it knows how."""
    prepare = getattr(type(model).train_step, "prepare", None)
    if prepare is not None:
        prepare(model, first_batch)


def variables_of(model: keras.Model, mode: Mode) -> State:
    """The Keras variables behind each part of the state that `mode` uses."""
    return State(
        list(model.trainable_variables),
        list(model.non_trainable_variables),
        _optimizer_variables(model) if mode == "train" else [],
        list(model.metrics_variables) if mode != "predict" else [],
    )


def _optimizer_variables(model: keras.Model) -> list[keras.Variable]:
    optimizer = getattr(model, "optimizer", None)
    return [*([] if optimizer is None else optimizer.variables), *carried_by(model).variables]


def values_of(owners: State) -> State:
    """The current values of the variables."""
    return State(*([v.value for v in part] for part in owners))


def assign(owners: State, state: State) -> None:
    """Write a state into the variables. Metrics of several replicas are added up."""
    for part, values in zip(owners, state, strict=True):
        for v, value in zip(part, values, strict=True):
            v.assign(value if value.ndim == len(v.shape) else np.asarray(value).sum(0))


def unshared(state: State, model: keras.Model) -> State:
    """The same state, with copies of those arrays that are in it twice or that an optimizer has too.

    An execution uses up the arrays that it is given. Variables share an array when one was assigned to another, as an
    optimizer does with averaged weights when training ends.
    """
    others = [] if state.optimizer else filter(has_value, _optimizer_variables(model))
    seen = {id(v.value) for v in others}

    def own(array: Array) -> Array:
        copied = array.copy() if id(array) in seen else array
        seen.add(id(array))
        return copied

    return State(*([own(array) for array in part] for part in state))
