"""Optimizers around optimizers: they say how gradients become the one gradient that the inner optimizer applies.

Give them to `model.compile`, around any Keras optimizer and around each other.
"""

from openipu.engine.core.wrapped_optimizer import IpuOptimizer
from openipu.gradient_accumulation import GradientAccumulationReductionMethod

from .wrappers import (
    CrossReplicaGradientAccumulationOptimizer,
    CrossReplicaGradientAccumulationOptimizerV2,
    CrossReplicaOptimizer,
    GradientAccumulationOptimizer,
    GradientAccumulationOptimizerV2,
    MapGradientOptimizer,
    ShardedOptimizer,
)

__all__ = [
    "CrossReplicaGradientAccumulationOptimizer",
    "CrossReplicaGradientAccumulationOptimizerV2",
    "CrossReplicaOptimizer",
    "GradientAccumulationOptimizer",
    "GradientAccumulationOptimizerV2",
    "GradientAccumulationReductionMethod",
    "IpuOptimizer",
    "MapGradientOptimizer",
    "ShardedOptimizer",
]
