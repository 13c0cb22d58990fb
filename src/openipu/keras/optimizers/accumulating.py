"""Gradient accumulation around Keras optimizers, under the name that Keras scripts use."""

from __future__ import annotations

from typing import Any

from openipu import _validate as validate
from openipu.keras._registered import registered
from openipu.optimizers import GradientAccumulationOptimizerV2
from openipu.optimizers.wrappers import OptimizerLike

import keras


@registered
class GradientAccumulationOptimizer(GradientAccumulationOptimizerV2):
    """`ipu.optimizers.GradientAccumulationOptimizerV2`. For a single micro-batch, it is the inner optimizer itself.

    >>> optimizer = ipu.keras.optimizers.GradientAccumulationOptimizer("sgd", num_mini_batches=2)
    >>> model.compile(optimizer, "mse", steps_per_execution=2)
    """

    def __new__(cls, opt: OptimizerLike, num_mini_batches: int, *_args: Any, **_kwargs: Any) -> Any:
        """The inner optimizer itself if there is nothing to accumulate."""
        if validate.count("num_mini_batches", num_mini_batches) == 1:
            return keras.optimizers.get(opt)
        return super().__new__(cls)
