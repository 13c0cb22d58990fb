"""Gradient descent with chosen precisions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from openipu import _validate as validate
from openipu.engine.types import Array
from openipu.keras._registered import registered

import keras
from jax.typing import DTypeLike
from keras import ops

from .base import IpuOptimizerBase, Rate, slot_dtype


@registered
class SGDIpuOptimizer(IpuOptimizerBase):
    """Gradient descent with momentum, as `keras.optimizers.SGD`.

    >>> optimizer = ipu.keras.optimizers.SGDIpuOptimizer(0.01, momentum=0.9, momentum_accum_dtype="float16")
    >>> model.compile(optimizer, "mse", steps_per_execution=2)

    Args:
        learning_rate: A number or a schedule.
        momentum: How much of the previous update is added to each update.
        nesterov: Whether gradients count as if taken after the momentum.
        name: The name of the optimizer.
        momentum_accum_dtype: The dtype of previous updates; None for the dtype of each weight.
        **kwargs: Arguments of `IpuOptimizerBase`, and of every Keras optimizer.
    """

    def __init__(
        self,
        learning_rate: Rate = 0.01,
        momentum: float = 0.0,
        nesterov: bool = False,
        name: str = "SGD",
        momentum_accum_dtype: DTypeLike | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(learning_rate, name, **kwargs)
        self.momentum = validate.number("momentum", momentum, least=0.0, most=1.0)
        self.nesterov = validate.flag("nesterov", nesterov)
        self.momentum_accum_dtype = slot_dtype("momentum_accum_dtype", momentum_accum_dtype)

    def build(self, variables: Sequence[keras.Variable]) -> None:
        """Make the slots."""
        if self.built:
            return
        super().build(variables)
        self._updates = self.add_slots(variables, "momentum", self.momentum_accum_dtype) if self.momentum else []

    def update_step(self, gradient: Array, variable: keras.Variable, learning_rate: Array) -> None:
        """Update a weight and its slot."""
        (dtype,) = self.optimizer_compute_precisions
        step = -ops.cast(learning_rate, dtype) * ops.cast(gradient, dtype)
        if self.momentum:
            slot = self.slot(self._updates, variable)
            update = self.momentum * ops.cast(slot, dtype) + step
            self.assign(slot, ops.cast(update, slot.dtype))
            step = self.momentum * update + step if self.nesterov else update
        self.assign_add(variable, ops.cast(step, variable.dtype))

    def get_config(self) -> dict[str, Any]:
        """Everything needed to make an equal optimizer."""
        own = ("momentum", "nesterov", "momentum_accum_dtype")
        return {**super().get_config(), **{name: getattr(self, name) for name in own}}
