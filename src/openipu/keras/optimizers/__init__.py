"""Optimizers of the original for Keras models: Adam, LAMB and SGD with chosen precisions, and wrappers.

They work in any Keras model, under a strategy or not, and are saved with it. `openipu.optimizers` has the wrappers.
"""

from .accumulating import GradientAccumulationOptimizer
from .adam import AdamIpuOptimizer
from .als import ALSGradientAccumulationOptimizer, ALSOptimizer
from .als_optimizers import ALSOptimizerAdam, ALSOptimizerRMSProp, ALSOptimizerSGD
from .base import IpuOptimizerBase
from .lamb import LAMBIpuOptimizer
from .sgd import SGDIpuOptimizer

__all__ = [
    "ALSGradientAccumulationOptimizer",
    "ALSOptimizer",
    "ALSOptimizerAdam",
    "ALSOptimizerRMSProp",
    "ALSOptimizerSGD",
    "AdamIpuOptimizer",
    "GradientAccumulationOptimizer",
    "IpuOptimizerBase",
    "LAMBIpuOptimizer",
    "SGDIpuOptimizer",
]
