"""Adam with chosen precisions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from openipu import _validate as validate
from openipu.engine.types import Array
from openipu.keras._registered import registered

import keras
from jax.typing import DTypeLike
from keras import ops

from .base import Rate, slot_dtype
from .moments import MomentOptimizer


@registered
class AdamIpuOptimizer(MomentOptimizer):
    """Adam, as `keras.optimizers.Adam`.

    >>> optimizer = ipu.keras.optimizers.AdamIpuOptimizer(0.001, m_dtype="float16")  # half the memory for the means
    >>> model.compile(optimizer, "mse", steps_per_execution=2)

    Args:
        learning_rate: A number or a schedule.
        beta_1: How much of the mean of gradients is kept in each update.
        beta_2: How much of the mean of squared gradients is kept in each update.
        epsilon: Added to the root of the mean of squares.
        amsgrad: Whether the largest mean of squares so far is used.
        name: The name of the optimizer.
        m_dtype: The dtype of the means; None for the dtype of each weight.
        v_dtype: The dtype of the means of squares.
        vhat_dtype: The dtype of the largest means of squares.
        debiasing: Whether the first updates are corrected for means that start at zero.
        **kwargs: Arguments of `IpuOptimizerBase`, and of every Keras optimizer.
    """

    def __init__(
        self,
        learning_rate: Rate = 0.001,
        beta_1: float = 0.9,
        beta_2: float = 0.999,
        epsilon: float = 1e-7,
        amsgrad: bool = False,
        name: str = "Adam",
        m_dtype: DTypeLike | None = None,
        v_dtype: DTypeLike | None = None,
        vhat_dtype: DTypeLike | None = None,
        debiasing: bool = True,
        **kwargs: Any,
    ) -> None:
        super().__init__(learning_rate, name, **kwargs)
        self.set_moments(beta_1, beta_2, epsilon, debiasing, m_dtype, v_dtype)
        self.amsgrad = validate.flag("amsgrad", amsgrad)
        self.vhat_dtype = slot_dtype("vhat_dtype", vhat_dtype)

    def build(self, variables: Sequence[keras.Variable]) -> None:
        """Make the slots."""
        if self.built:
            return
        super().build(variables)
        self._largest = self.add_slots(variables, "velocity_hat", self.vhat_dtype) if self.amsgrad else []

    def update_step(self, gradient: Array, variable: keras.Variable, learning_rate: Array) -> None:
        """Update a weight and its slots."""
        (dtype,) = self.optimizer_compute_precisions
        gradient, rate = ops.cast(gradient, dtype), ops.cast(learning_rate, dtype)
        m, v = self.moments(gradient, variable)
        if self.amsgrad:
            largest = self.slot(self._largest, variable)
            v = ops.maximum(ops.cast(largest, dtype), v)
            self.assign(largest, ops.cast(v, largest.dtype))
        if self.debiasing:
            rate = rate * ops.sqrt(self.bias(self.beta_2, dtype)) / self.bias(self.beta_1, dtype)
        self.assign_sub(variable, ops.cast(rate * m / (ops.sqrt(v) + self.epsilon), variable.dtype))

    def get_config(self) -> dict[str, Any]:
        """Everything needed to make an equal optimizer."""
        return {**super().get_config(), "amsgrad": self.amsgrad, "vhat_dtype": self.vhat_dtype}
