"""Pipelines: schedules, recomputation, options of stages, and `pipeline` itself."""

from __future__ import annotations

from typing import Any

from openipu.engine.core.pipelining import PipelineSchedule, RecomputationMode
from openipu.engine.core.recomputation import CHECKPOINT
from openipu.engine.keras_compat.api import get_keras_mask, set_keras_mask
from openipu.engine.pipeline.build.optimizer_output import OptimizerFunctionOutput
from openipu.engine.pipeline.build.stage_options import PipelineStageOptions
from openipu.engine.types import Tree

import keras
from jax.ad_checkpoint import checkpoint_name
from jax.typing import ArrayLike

from ._pipeline import pipeline

__all__ = [
    "OptimizerFunctionOutput",
    "PipelineSchedule",
    "PipelineStageOptions",
    "RecomputationCheckpoint",
    "RecomputationMode",
    "pipeline",
    "recomputation_checkpoint",
]


def recomputation_checkpoint(tensors: Tree, name: str | None = None) -> Tree:
    """The same tensors, marked to be kept: the backward pass recomputes from them, not from the model's inputs.

    This matters only if `IPUConfig.allow_recompute` is on; in a pipeline, only if the mode is
    `RecomputeAndBackpropagateInterleaved`.

    >>> inputs = keras.Input((4,))
    >>> kept = ipu.pipelining_ops.recomputation_checkpoint(keras.layers.Dense(8)(inputs))
    >>> keras.Model(inputs, keras.layers.Dense(1)(kept)).output_shape
    (None, 1)

    Args:
        tensors: A tensor or a structure of tensors; they can be symbolic.
        name: A name for the operation.
    """
    return RecomputationCheckpoint(name=name)(tensors)


@keras.saving.register_keras_serializable("openipu")
class RecomputationCheckpoint(keras.Operation):
    """The operation behind `recomputation_checkpoint`, for use in Functional models.

    >>> inputs = keras.Input((4,))
    >>> kept = ipu.pipelining_ops.RecomputationCheckpoint()(keras.layers.Dense(8)(inputs))
    >>> kept.shape
    (None, 8)
    """

    def call(self, tensors: Tree) -> Tree:
        """Mark the tensors."""
        return keras.tree.map_structure(_marked, tensors)

    def compute_output_spec(self, tensors: Tree) -> Tree:
        """The same as for the tensors themselves."""
        return keras.tree.map_structure(lambda t: keras.KerasTensor(t.shape, t.dtype, sparse=t.sparse), tensors)


def _marked(tensor: ArrayLike) -> Any:
    marked = checkpoint_name(keras.ops.convert_to_tensor(tensor), CHECKPOINT)
    mask = get_keras_mask(tensor)
    if mask is not None:
        set_keras_mask(marked, mask)
    return marked
