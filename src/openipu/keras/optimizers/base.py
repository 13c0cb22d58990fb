"""What the optimizers with chosen precisions share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from openipu import _validate as validate
from openipu.engine.core.accumulation import floating
from openipu.engine.types import Array

import keras
from jax.typing import DTypeLike
from keras import ops

Rate: TypeAlias = float | keras.optimizers.schedules.LearningRateSchedule


class IpuOptimizerBase(keras.optimizers.Optimizer):
    """An optimizer whose slots have dtypes of their own, and which computes in a chosen precision.

    A subclass makes its slots in `build` with `add_slots`, and computes updates in `update_step`.

    >>> class Signs(ipu.keras.optimizers.IpuOptimizerBase):
    ...     def update_step(self, gradient, variable, learning_rate):
    ...         variable.assign_sub(learning_rate * keras.ops.sign(gradient))
    >>> model.compile(Signs(0.01), "mse", steps_per_execution=2)

    Args:
        learning_rate: A number or a schedule.
        name: The name of the optimizer.
        optimizer_compute_precisions: The dtypes to compute in; each optimizer says how many it takes.
        outline_apply_gradients: Whether an IPU reuses code for similar updates. It has no effect here.
        outline_apply_gradients_kwargs: Options for that. They have no effect here.
        **kwargs: Arguments of every Keras optimizer, such as `clipnorm` and `use_ema`.
    """

    precision_count = 1

    def __init__(
        self,
        learning_rate: Rate,
        name: str | None = None,
        optimizer_compute_precisions: Sequence[DTypeLike] = ("float32",),
        outline_apply_gradients: bool = False,
        outline_apply_gradients_kwargs: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        precisions = validate.sequence("optimizer_compute_precisions", optimizer_compute_precisions)
        if len(precisions) != self.precision_count:
            raise ValueError(
                f"`optimizer_compute_precisions` has {len(precisions)} dtypes. Give {self.precision_count}, as a tuple."
            )
        if kwargs.pop("gradient_transformers", None):
            raise ValueError(
                "`gradient_transformers` are not called in Keras 3. Change gradients in the `apply` of a subclass of "
                "`ipu.optimizers.IpuOptimizer`, or with `ipu.optimizers.MapGradientOptimizer`."
            )
        super().__init__(learning_rate, name=name, **kwargs)
        self.optimizer_compute_precisions = tuple(
            floating(d, "`optimizer_compute_precisions`", "updates are computed") for d in precisions
        )
        self.outline_apply_gradients = validate.flag("outline_apply_gradients", outline_apply_gradients)
        self.outline_apply_gradients_kwargs = validate.mapping(
            "outline_apply_gradients_kwargs", outline_apply_gradients_kwargs, optional=True
        )
        if self.outline_apply_gradients:
            validate.no_effect({"outline_apply_gradients": "XLA decides what code it reuses"})

    def add_slots(self, variables: Sequence[keras.Variable], name: str, dtype: str | None) -> list[keras.Variable]:
        """One variable of zeros for each weight, in this dtype or in the weight's."""
        return [
            self.add_variable(v.shape, dtype=dtype or v.dtype, name=f"{v.path.replace('/', '_')}_{name}")
            for v in variables
        ]

    def slot(self, slots: Sequence[keras.Variable], variable: keras.Variable) -> keras.Variable:
        """The slot of a weight."""
        return slots[self._get_variable_index(variable)]

    def averaged(self, slot: keras.Variable, new: Array, rate: float) -> Array:
        """Let a slot follow new values: `rate` times the old plus the rest of the new. Returns it in `new`'s dtype."""
        value: Array = rate * ops.cast(slot, new.dtype) + (1 - rate) * new
        self.assign(slot, ops.cast(value, slot.dtype))
        return value

    def bias(self, rate: float, dtype: str) -> Array:
        """How much of an average with this rate there is so far: it starts at zero and approaches one."""
        left: Array = ops.power(ops.cast(rate, dtype), ops.cast(self.iterations + 1, dtype))
        return 1 - left

    def get_config(self) -> dict[str, Any]:
        """Everything needed to make an equal optimizer."""
        return {
            **super().get_config(),
            "optimizer_compute_precisions": list(self.optimizer_compute_precisions),
            "outline_apply_gradients": self.outline_apply_gradients,
            "outline_apply_gradients_kwargs": self.outline_apply_gradients_kwargs,
        }


def slot_dtype(name: str, value: DTypeLike | None) -> str | None:
    """The dtype of slots that a user gave; None for the dtype of each weight."""
    return None if value is None else floating(value, f"`{name}`", "the optimizer's variables are kept")
