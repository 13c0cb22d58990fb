"""Optimizers around optimizers: they say how gradients become the one gradient that the inner optimizer applies.

Give them to `model.compile`, around any Keras optimizer and around each other.
"""

from openipu.gradient_accumulation import GradientAccumulationReductionMethod

from .base import IpuOptimizer
from .plan import OptimizerPlan, describe, map_gradients, unwrapped, update
from .wrappers import (
    CrossReplicaGradientAccumulationOptimizerV2,
    CrossReplicaOptimizer,
    GradientAccumulationOptimizerV2,
    MapGradientOptimizer,
)

__all__ = [
    "CrossReplicaGradientAccumulationOptimizerV2",
    "CrossReplicaOptimizer",
    "GradientAccumulationOptimizerV2",
    "GradientAccumulationReductionMethod",
    "IpuOptimizer",
    "MapGradientOptimizer",
    "OptimizerPlan",
    "describe",
    "map_gradients",
    "unwrapped",
    "update",
]
