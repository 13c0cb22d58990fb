"""How the gradients of the micro-batches of one update become one gradient."""

from openipu.engine.core.accumulation import Reduction as GradientAccumulationReductionMethod

__all__ = ["GradientAccumulationReductionMethod"]
