"""How the gradients of the micro-batches of an update are combined into one."""

from openipu.engine.core.accumulation import Reduction as GradientAccumulationReductionMethod

__all__ = ["GradientAccumulationReductionMethod"]
