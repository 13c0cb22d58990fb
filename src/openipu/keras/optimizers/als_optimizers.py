"""Automatic loss scaling around optimizers whose means of gradients stay exact in half precision.

The original keeps these means in the units of scaled gradients, and converts them when the factor changes. Here,
gradients are unscaled in float32, and the means are float32, which gives the same numbers without the conversion.
"""

from __future__ import annotations

from typing import Any, Final

from openipu.engine.types import Array
from openipu.keras._registered import registered

from keras import ops

from .adam import AdamIpuOptimizer
from .als import ALSOptimizer
from .base import Rate
from .rmsprop import RMSpropFloat32
from .sgd import SGDIpuOptimizer

_FLOAT32: Final = "float32"


class _Scaled(ALSOptimizer):
    """An `ALSOptimizer` that makes the optimizer inside it. `settings` are those of both that are saved."""

    settings: tuple[str, ...] = ()

    def unscaled(self, gradient: Array, factor: Array) -> Array:
        """A gradient without the factor, in float32, where small ones do not become zero."""
        found: Array = ops.cast(gradient, _FLOAT32) / factor
        return found

    def get_config(self) -> dict[str, Any]:
        """Everything needed to make an equal optimizer."""
        inner = self.inner_optimizer.get_config()
        outer = {name: value for name, value in super().get_config().items() if name != "opt"}
        return {**outer, **{name: inner[name] for name in ("learning_rate", *self.settings)}}


@registered
class ALSOptimizerSGD(_Scaled):
    """`ALSOptimizer` around gradient descent.

    >>> optimizer = ipu.keras.optimizers.ALSOptimizerSGD(0.01, momentum=0.9, update_frequency=4)
    >>> model.compile(optimizer, "mse", steps_per_execution=2)

    Args:
        learning_rate: A number or a schedule.
        momentum: How much of the previous update is added to each update.
        *args: Arguments of `ALSOptimizer` after `opt`.
        name: The name of the optimizer.
        **kwargs: Arguments of `ALSOptimizer` after `opt`.
    """

    settings = ("momentum",)

    def __init__(
        self,
        learning_rate: Rate = 0.01,
        momentum: float = 0.0,
        *args: Any,
        name: str = "ALSOptimizerSGD",
        **kwargs: Any,
    ) -> None:
        inner = SGDIpuOptimizer(learning_rate, momentum, momentum_accum_dtype=_FLOAT32)
        super().__init__(inner, *args, **{"name": name, **kwargs})


@registered
class ALSOptimizerAdam(_Scaled):
    """`ALSOptimizer` around Adam.

    >>> model.compile(ipu.keras.optimizers.ALSOptimizerAdam(0.001), "mse", steps_per_execution=2)

    Args:
        learning_rate: A number or a schedule.
        beta_1: How much of the mean of gradients is kept in each update.
        beta_2: How much of the mean of squared gradients is kept in each update.
        epsilon: Added to the root of the mean of squares.
        amsgrad: Whether the largest mean of squares so far is used.
        *args: Arguments of `ALSOptimizer` after `opt`.
        name: The name of the optimizer.
        **kwargs: Arguments of `ALSOptimizer` after `opt`.
    """

    settings = ("beta_1", "beta_2", "epsilon", "amsgrad")

    def __init__(
        self,
        learning_rate: Rate = 0.001,
        beta_1: float = 0.9,
        beta_2: float = 0.999,
        epsilon: float = 1e-7,
        amsgrad: bool = False,
        *args: Any,
        name: str = "ALSOptimizerAdam",
        **kwargs: Any,
    ) -> None:
        inner = AdamIpuOptimizer(
            learning_rate, beta_1, beta_2, epsilon, amsgrad, m_dtype=_FLOAT32, v_dtype=_FLOAT32, vhat_dtype=_FLOAT32
        )
        super().__init__(inner, *args, **{"name": name, **kwargs})


@registered
class ALSOptimizerRMSProp(_Scaled):
    """`ALSOptimizer` around RMSprop.

    >>> model.compile(ipu.keras.optimizers.ALSOptimizerRMSProp(0.001), "mse", steps_per_execution=2)

    Args:
        learning_rate: A number or a schedule.
        rho: How much of the mean of squared gradients is kept in each update.
        momentum: How much of the previous update is added to each update.
        epsilon: Added to the mean of squares.
        centered: Whether the mean of gradients is subtracted, as for a variance.
        *args: Arguments of `ALSOptimizer` after `opt`.
        name: The name of the optimizer.
        **kwargs: Arguments of `ALSOptimizer` after `opt`.
    """

    settings = ("rho", "momentum", "epsilon", "centered")

    def __init__(
        self,
        learning_rate: Rate = 0.001,
        rho: float = 0.9,
        momentum: float = 0.0,
        epsilon: float = 1e-7,
        centered: bool = False,
        *args: Any,
        name: str = "ALSOptimizerRMSProp",
        **kwargs: Any,
    ) -> None:
        inner = RMSpropFloat32(learning_rate, rho, momentum, epsilon, centered)
        super().__init__(inner, *args, **{"name": name, **kwargs})
