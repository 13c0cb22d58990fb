"""Extensions of Keras models that are created inside `IPUStrategy.scope()`; layers and optimizers for any model."""

from typing import Any

from openipu._unavailable import unavailable
from openipu.engine.core.options import MetricReduction as ReplicatedMetricReductionMethod

from . import layers, optimizers
from .pipeline_stage import PipelineStage
from .pipeline_stage_assignment import (
    FunctionalLayerPipelineStageAssignment,
    FunctionalNestedModelPipelineStageAssignment,
    ModelLayerPipelineStageAssignment,
    NestedModelPipelineStageAssignment,
    SequentialLayerPipelineStageAssignment,
    SequentialNestedModelPipelineStageAssignment,
)

__all__ = [
    "FunctionalLayerPipelineStageAssignment",
    "FunctionalNestedModelPipelineStageAssignment",
    "ModelLayerPipelineStageAssignment",
    "NestedModelPipelineStageAssignment",
    "PipelineStage",
    "ReplicatedMetricReductionMethod",
    "SequentialLayerPipelineStageAssignment",
    "SequentialNestedModelPipelineStageAssignment",
    "layers",
    "optimizers",
]


def __getattr__(name: str) -> Any:
    return unavailable("keras", name)
