"""LAMB with chosen precisions."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from openipu import _validate as validate
from openipu.engine.keras_compat.api import decays
from openipu.engine.types import Array
from openipu.keras._registered import registered

import keras
from jax.typing import DTypeLike
from keras import ops

from .base import Rate
from .moments import MomentOptimizer


@registered
class LAMBIpuOptimizer(MomentOptimizer):
    """LAMB: Adam whose update of each weight has a size in proportion to the weight's norm.

    >>> optimizer = ipu.keras.optimizers.LAMBIpuOptimizer(0.01, weight_decay_rate=0.01)
    >>> model.compile(optimizer, "mse", steps_per_execution=2)

    Args:
        learning_rate: A number or a schedule.
        beta_1: How much of the mean of gradients is kept in each update.
        beta_2: How much of the mean of squared gradients is kept in each update.
        epsilon: Added to the root of the mean of squares.
        weight_decay_rate: This much of each weight is added to its update.
        exclude_from_weight_decay: Regular expressions. Weights whose path contains one of them do not decay.
        exclude_from_layer_adaptation: The same for the proportion to the norm; None means those that do not decay.
        name: The name of the optimizer.
        debiasing: Whether the first updates are corrected for means that start at zero.
        m_dtype: The dtype of the means; None for the dtype of each weight.
        v_dtype: The dtype of the means of squares.
        weight_norm_clip: The largest norm that a weight counts with; None for no limit.
        optimizer_compute_precisions: The dtype of means and updates, and the dtype of norms.
        **kwargs: Arguments of `IpuOptimizerBase`, and of every Keras optimizer.
    """

    precision_count = 2

    def __init__(
        self,
        learning_rate: Rate = 0.001,
        beta_1: float = 0.9,
        beta_2: float = 0.999,
        epsilon: float = 1e-6,
        weight_decay_rate: float = 0.0,
        exclude_from_weight_decay: Sequence[str] | None = None,
        exclude_from_layer_adaptation: Sequence[str] | None = None,
        name: str = "LAMB",
        debiasing: bool = True,
        m_dtype: DTypeLike | None = None,
        v_dtype: DTypeLike | None = None,
        weight_norm_clip: float | None = None,
        optimizer_compute_precisions: Sequence[DTypeLike] = ("float32", "float32"),
        **kwargs: Any,
    ) -> None:
        super().__init__(learning_rate, name, optimizer_compute_precisions, **kwargs)
        self.set_moments(beta_1, beta_2, epsilon, debiasing, m_dtype, v_dtype)
        self.weight_decay_rate = validate.number("weight_decay_rate", weight_decay_rate, least=0.0)
        steady = validate.sequence("exclude_from_weight_decay", exclude_from_weight_decay, optional=True)
        unadapted = validate.sequence("exclude_from_layer_adaptation", exclude_from_layer_adaptation, optional=True)
        self.without_decay = list(steady)
        self.without_adaptation = self.without_decay if exclude_from_layer_adaptation is None else list(unadapted)
        self.weight_norm_clip = validate.number("weight_norm_clip", weight_norm_clip, optional=True, above=0.0)

    def update_step(self, gradient: Array, variable: keras.Variable, learning_rate: Array) -> None:
        """Update a weight and its slots."""
        dtype = self.optimizer_compute_precisions[0]
        gradient, weight = ops.cast(gradient, dtype), ops.cast(variable, dtype)
        m, v = self.moments(gradient, variable)
        if self.debiasing:
            m, v = m / self.bias(self.beta_1, dtype), v / self.bias(self.beta_2, dtype)
        update = m / (ops.sqrt(v) + self.epsilon)
        if self.weight_decay_rate and decays(self, variable) and not _named(variable, self.without_decay):
            update = update + self.weight_decay_rate * weight
        rate = ops.cast(learning_rate, dtype)
        if not _named(variable, self.without_adaptation):
            rate = rate * ops.cast(self._proportion(weight, update), dtype)
        self.assign_sub(variable, ops.cast(rate * update, variable.dtype))

    def _proportion(self, weight: Array, update: Array) -> Array:
        """The norm of the weight divided by that of its update; one if either is zero."""
        of_weight, of_update = (ops.norm(ops.cast(a, self.optimizer_compute_precisions[1])) for a in (weight, update))
        if self.weight_norm_clip is not None:
            of_weight = ops.minimum(of_weight, self.weight_norm_clip)
        both = ops.logical_and(of_weight > 0, of_update > 0)
        proportion: Array = ops.where(both, of_weight / ops.where(both, of_update, 1), 1)
        return proportion

    def get_config(self) -> dict[str, Any]:
        """Everything needed to make an equal optimizer."""
        return {
            **super().get_config(),
            "weight_decay_rate": self.weight_decay_rate,
            "weight_norm_clip": self.weight_norm_clip,
            "exclude_from_weight_decay": list(self.without_decay),
            "exclude_from_layer_adaptation": list(self.without_adaptation),
        }


def _named(variable: keras.Variable, patterns: Sequence[str]) -> bool:
    """Whether the path of a weight, such as "model/dense/kernel", contains one of the patterns."""
    return any(re.search(pattern, variable.path) for pattern in patterns)
