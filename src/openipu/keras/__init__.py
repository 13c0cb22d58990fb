"""What a Keras model can do in addition when it was made inside `IPUStrategy.scope()`."""

from openipu.engine.options import MetricReduction as ReplicatedMetricReductionMethod

__all__ = ["ReplicatedMetricReductionMethod"]
