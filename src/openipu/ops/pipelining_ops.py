"""Pipelines: schedules by name, what the backward pass computes again, and options of stages."""

from __future__ import annotations

from typing import Any

from openipu.engine.core.pipelining import PipelineSchedule, RecomputationMode
from openipu.engine.keras_compat.api import get_keras_mask, set_keras_mask
from openipu.engine.pipeline.build.optimizer_output import OptimizerFunctionOutput
from openipu.engine.pipeline.build.stage_options import PipelineStageOptions
from openipu.engine.pipeline.runtime.stage_function import CHECKPOINT
from openipu.engine.types import Tree

import keras
from jax.ad_checkpoint import checkpoint_name
from jax.typing import ArrayLike

from ._pipeline import pipeline

__all__ = [
    "CHECKPOINT",
    "OptimizerFunctionOutput",
    "PipelineSchedule",
    "PipelineStageOptions",
    "RecomputationCheckpoint",
    "RecomputationMode",
    "pipeline",
    "recomputation_checkpoint",
]


def recomputation_checkpoint(tensors: Tree, name: str | None = None) -> Tree:
    """The same tensors, marked to be kept: the backward pass computes from them instead of from the stage's inputs.

    It matters where `IPUConfig.allow_recompute` is on and the mode is `RecomputeAndBackpropagateInterleaved`; elsewhere
    it changes nothing.

    Args:
        tensors: A tensor or a structure of them, symbolic ones too.
        name: A name for the operation.
    """
    return RecomputationCheckpoint(name=name)(tensors)


@keras.saving.register_keras_serializable("openipu")
class RecomputationCheckpoint(keras.Operation):
    """The operation behind `recomputation_checkpoint`, so that it can be part of a Functional model."""

    def call(self, tensors: Tree) -> Tree:
        """Mark values."""
        return keras.tree.map_structure(_marked, tensors)

    def compute_output_spec(self, tensors: Tree) -> Tree:
        """As the tensors themselves."""
        return keras.tree.map_structure(lambda t: keras.KerasTensor(t.shape, t.dtype, sparse=t.sparse), tensors)


def _marked(tensor: ArrayLike) -> Any:
    marked = checkpoint_name(keras.ops.convert_to_tensor(tensor), CHECKPOINT)
    mask = get_keras_mask(tensor)
    if mask is not None:
        set_keras_mask(marked, mask)
    return marked
