"""Optimizers around optimizers: they say how gradients become the one gradient that the inner optimizer applies.

Give them to `model.compile`, around any Keras optimizer and around each other.
"""

from openipu.gradient_accumulation import GradientAccumulationReductionMethod

from .base import IpuOptimizer
from .plan import OptimizerPlan, describe, map_gradients, unwrapped, update
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
    "OptimizerPlan",
    "ShardedOptimizer",
    "describe",
    "map_gradients",
    "unwrapped",
    "update",
]
