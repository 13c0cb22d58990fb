"""Automatic loss scaling: a factor that follows the sizes of half-precision gradients."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from openipu import _validate as validate
from openipu.engine.core.wrapped_optimizer import IpuOptimizer
from openipu.engine.types import Array
from openipu.keras._registered import registered
from openipu.optimizers import GradientAccumulationOptimizerV2
from openipu.optimizers.wrappers import OptimizerLike

import keras
from keras import ops


@registered
class ALSOptimizer(IpuOptimizer):
    """Scales the loss by a factor that grows until too many float16 gradients are large, and then shrinks.

    Each update counts the elements of float16 gradients in two bins: up to `histogram_bin_edge`, and above. Then it
    divides the gradients by the factor and applies them. When the factor is due, it is divided by `increase_factor` if
    the share of the upper bin is above `ratio_threshold`, and multiplied otherwise. It stays as it is if it would
    become less than 1, or `max_loss_scaling_factor` or more. As in the original, it is due at each update that follows
    `update_frequency` others, or at every update if `update_frequency` is 1.

    The counts concern all gradients, so it cannot train a model in stages whose gradients are float16.

    >>> optimizer = ipu.keras.optimizers.ALSOptimizer("sgd", initial_loss_scaling_factor=1024)
    >>> model.compile(optimizer, "mse", steps_per_execution=2)

    Args:
        opt: Any Keras optimizer: an instance, a name, or a config.
        initial_loss_scaling_factor: The first factor, a power of two.
        update_frequency: See above.
        increase_factor: What the factor is multiplied by, a power of two.
        max_loss_scaling_factor: The factor stays below this power of two.
        accumulate_statistics_over_update_period: Whether all updates count, or only the one at which the factor is due.
        ratio_threshold: The largest share of the upper bin, between 0 and 1.
        captured_grads_only: False: there are no layers that capture gradients.
        lpf_alpha: How much of the previous counts is kept when new ones come in, from 0 up to but not including 1.
        histogram_bin_edge: The boundary between the bins.
        name: The name of this wrapper.
    """

    def __init__(
        self,
        opt: OptimizerLike,
        initial_loss_scaling_factor: float = 1,
        update_frequency: int = 8,
        increase_factor: float = 2,
        max_loss_scaling_factor: float = 32768,
        accumulate_statistics_over_update_period: bool = True,
        ratio_threshold: float = 10e-6,
        captured_grads_only: bool = False,
        lpf_alpha: float = 0.0,
        histogram_bin_edge: float = 2**13,
        name: str = "ALSOptimizer",
    ) -> None:
        self._check_powers(initial_loss_scaling_factor, increase_factor, max_loss_scaling_factor)
        if validate.flag("captured_grads_only", captured_grads_only):
            raise ValueError(
                "`captured_grads_only` is True, but there are no layers that capture gradients. Leave it out."
            )
        super().__init__(opt, name)
        self.initial_loss_scaling_factor = float(initial_loss_scaling_factor)
        self.update_frequency = validate.count("update_frequency", update_frequency)
        self.increase_factor = float(increase_factor)
        self.max_loss_scaling_factor = float(max_loss_scaling_factor)
        self.accumulate_statistics_over_update_period = validate.flag(
            "accumulate_statistics_over_update_period", accumulate_statistics_over_update_period
        )
        self.ratio_threshold = validate.number("ratio_threshold", ratio_threshold, above=0.0, below=1.0)
        self.lpf_alpha = validate.number("lpf_alpha", lpf_alpha, least=0.0, below=1.0)
        self.histogram_bin_edge = validate.number("histogram_bin_edge", histogram_bin_edge, above=0.0)

    @staticmethod
    def _check_powers(initial: float, increase: float, most: float) -> None:
        powers = {
            "initial_loss_scaling_factor": (initial, 1),
            "increase_factor": (increase, 2),
            "max_loss_scaling_factor": (most, 2),
        }
        for name, (value, least) in powers.items():
            if not math.log2(validate.number(name, value, least=least)).is_integer():
                raise ValueError(f"`{name}` is {value}. Give a power of two.")
        if initial * increase >= most:
            raise ValueError(
                f"`initial_loss_scaling_factor` is {initial} and would become {initial * increase}, but "
                f"`max_loss_scaling_factor` is {most}. Give a larger one."
            )

    @property
    def loss_scale_factor(self) -> None:
        """None: the loss is scaled by `scale_loss`. A `LossScaleOptimizer` sets this and is refused."""

    @loss_scale_factor.setter
    def loss_scale_factor(self, _: object) -> None:
        if "inner_optimizer" in vars(self):
            raise ValueError(
                f"{self.name!r} scales the loss itself, so no `LossScaleOptimizer` can be around it. Keras adds one "
                "under mixed precision: call `compile` with `auto_scale_loss=False`."
            )

    # --- state

    def build(self, variables: Iterable[keras.Variable]) -> None:
        """Make the inner optimizer's variables, the counts and the factor."""
        super().build(variables)
        self.histogram = self.add_variable((2,), name="als_histogram")
        self.update_counter = self.add_variable((), dtype="int32", name="als_counter")
        first = keras.initializers.Constant(self.initial_loss_scaling_factor)
        self.loss_scaling_factor = self.add_variable((), first, name="als_factor")
        self.previous_loss_scaling_factor = self.add_variable((), first, name="als_previous_factor")

    @property
    def decrease_factor(self) -> float:
        """What the factor is multiplied by if gradients are too large."""
        return 1 / self.increase_factor

    @property
    def normalized_histogram(self) -> Array:
        """The shares of both bins."""
        shares: Array = self.histogram / ops.maximum(ops.sum(self.histogram), 1)
        return shares

    def reset(self) -> None:
        """Begin again: no counts, and the first factor."""
        self.histogram.assign(ops.zeros(2))
        self.update_counter.assign(0)
        for factor in (self.loss_scaling_factor, self.previous_loss_scaling_factor):
            factor.assign(self.initial_loss_scaling_factor)

    # --- updates

    def scale_loss(self, loss: Array | float) -> Any:
        """The loss times the factor, scaled as the inner optimizer wants it."""
        factor = self.loss_scaling_factor if self.built else self.initial_loss_scaling_factor
        return self.inner_optimizer.scale_loss(loss) * factor

    def apply(self, grads: Sequence[Array], trainable_variables: Iterable[keras.Variable] | None = None) -> None:
        """Update the weights, the counts and perhaps the factor."""
        trainable_variables = None if trainable_variables is None else list(trainable_variables)
        if not self.built and trainable_variables:
            self.build(trainable_variables)
        factor = ops.convert_to_tensor(self.loss_scaling_factor)
        counted = self._counted([g for g in grads if g is not None and g.dtype == "float16"])
        super().apply([None if g is None else self.unscaled(g, factor) for g in grads], trainable_variables)
        n = ops.convert_to_tensor(self.update_counter)
        due = ops.logical_or(ops.logical_and(n > 0, n % self.update_frequency == 0), self.update_frequency == 1)
        ratio = counted[1] / ops.maximum(ops.sum(counted), 1)
        new = ops.where(ratio > self.ratio_threshold, factor * self.decrease_factor, factor * self.increase_factor)
        possible = ops.logical_and(new >= 1, new < self.max_loss_scaling_factor)
        self.previous_loss_scaling_factor.assign(factor)
        self.loss_scaling_factor.assign(ops.where(ops.logical_and(due, possible), new, factor))
        self.histogram.assign(ops.where(due, ops.zeros(2), counted))
        self.update_counter.assign(ops.where(due, 0, n + 1))

    def unscaled(self, gradient: Array, factor: Array) -> Array:
        """A gradient without the factor."""
        found: Array = gradient / ops.cast(factor, gradient.dtype)
        return found

    def _counted(self, gradients: Sequence[Array]) -> Array:
        """The counts with those of new gradients."""
        old = ops.convert_to_tensor(self.histogram)
        above = sum(
            (ops.sum(ops.cast(ops.abs(g) > self.histogram_bin_edge, "float32")) for g in gradients), ops.zeros(())
        )
        new = ops.stack([sum(math.prod(g.shape) for g in gradients) - above, above])
        new = old + new if self.accumulate_statistics_over_update_period else new
        counts: Array = self.lpf_alpha * old + (1 - self.lpf_alpha) * new
        return counts

    def get_config(self) -> dict[str, Any]:
        """Everything needed to make an equal optimizer."""
        own = (
            "initial_loss_scaling_factor", "update_frequency", "increase_factor", "max_loss_scaling_factor",
            "accumulate_statistics_over_update_period", "ratio_threshold", "lpf_alpha", "histogram_bin_edge",
        )  # fmt: skip
        return {**super().get_config(), **{name: getattr(self, name) for name in own}}


@registered
class ALSGradientAccumulationOptimizer(GradientAccumulationOptimizerV2):
    """Accumulates the gradients of several micro-batches for an `ALSOptimizer`, which counts once per update.

    The arguments are those of `ipu.optimizers.GradientAccumulationOptimizerV2`.

    >>> scaled = ipu.keras.optimizers.ALSOptimizer("sgd")
    >>> optimizer = ipu.keras.optimizers.ALSGradientAccumulationOptimizer(scaled, num_mini_batches=2)
    >>> model.compile(optimizer, "mse", steps_per_execution=2)
    """

    def __init__(self, opt: ALSOptimizer, num_mini_batches: int, *args: Any, **kwargs: Any) -> None:
        opt = keras.optimizers.get(opt)
        validate.instance("opt", opt, ALSOptimizer, error=ValueError)
        super().__init__(opt, num_mini_batches, *args, **{"name": "ALSGradientAccumulationOptimizer", **kwargs})
