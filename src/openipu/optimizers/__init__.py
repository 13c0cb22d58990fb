"""Optimizers that wrap others: they decide how gradients are combined before the inner optimizer applies them.

Pass them to `model.compile`. They can wrap any Keras optimizer, and each other.
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
