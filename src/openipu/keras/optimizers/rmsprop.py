"""RMSprop with slots in float32."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from openipu import _validate as validate
from openipu.engine.types import Array
from openipu.keras._registered import registered

import keras
from keras import ops

from .base import IpuOptimizerBase, Rate


@registered
class RMSpropFloat32(IpuOptimizerBase):
    """`keras.optimizers.RMSprop`, except that it computes and keeps everything in float32, whatever the weights are.

    Args:
        learning_rate: A number or a schedule.
        rho: How much of the mean of squared gradients is kept in each update.
        momentum: How much of the previous update is added to each update.
        epsilon: Added to the mean of squares.
        centered: Whether the mean of gradients is subtracted, as for a variance.
        name: The name of the optimizer.
        **kwargs: Arguments of every Keras optimizer.
    """

    def __init__(
        self,
        learning_rate: Rate = 0.001,
        rho: float = 0.9,
        momentum: float = 0.0,
        epsilon: float = 1e-7,
        centered: bool = False,
        name: str = "RMSprop",
        **kwargs: Any,
    ) -> None:
        super().__init__(learning_rate, name, **kwargs)
        self.rho = validate.number("rho", rho, least=0.0, most=1.0)
        self.momentum = validate.number("momentum", momentum, least=0.0, most=1.0)
        self.epsilon = validate.number("epsilon", epsilon, least=0.0)
        self.centered = validate.flag("centered", centered)

    def build(self, variables: Sequence[keras.Variable]) -> None:
        """Make the slots."""
        if self.built:
            return
        super().build(variables)
        self._squares = self.add_slots(variables, "velocity", "float32")
        self._means = self.add_slots(variables, "average_gradient", "float32") if self.centered else []
        self._updates = self.add_slots(variables, "momentum", "float32") if self.momentum else []

    def update_step(self, gradient: Array, variable: keras.Variable, learning_rate: Array) -> None:
        """Update a weight and its slots."""
        gradient = ops.cast(gradient, "float32")
        squares = self.averaged(self.slot(self._squares, variable), ops.square(gradient), self.rho)
        if self.centered:
            mean = self.averaged(self.slot(self._means, variable), gradient, self.rho)
            squares = squares - ops.square(mean)
        step = ops.cast(learning_rate, "float32") * gradient * ops.rsqrt(squares + self.epsilon)
        if self.momentum:
            slot = self.slot(self._updates, variable)
            step = self.momentum * ops.convert_to_tensor(slot) + step
            self.assign(slot, step)
        self.assign_sub(variable, ops.cast(step, variable.dtype))

    def get_config(self) -> dict[str, Any]:
        """Everything needed to make an equal optimizer."""
        own = ("rho", "momentum", "epsilon", "centered")
        return {**super().get_config(), **{name: getattr(self, name) for name in own}}
