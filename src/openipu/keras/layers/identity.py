"""Layers that return their inputs."""

from __future__ import annotations

from typing import Any

from openipu import _validate as validate
from openipu.engine.types import Tree
from openipu.keras._registered import registered
from openipu.ops.cross_replica_ops import assume_equal_across_replicas
from openipu.ops.pipelining_ops import recomputation_checkpoint

import keras


@registered
class RecomputationCheckpoint(keras.Layer):
    """Returns its inputs, marked to be kept: the backward pass recomputes from them, not from the model's inputs.

    This matters if `IPUConfig.allow_recompute` is on. The values between two such layers then need memory only while
    that part of the model is computed again. In a pipeline, the recomputation mode must be
    `RecomputeAndBackpropagateInterleaved`, which is what `Auto` means for the schedule Sequential.

    >>> with strategy.scope():
    ...     model = keras.Sequential([
    ...         keras.layers.Dense(64, "relu"), ipu.keras.layers.RecomputationCheckpoint(), keras.layers.Dense(1)
    ...     ])

    Args:
        **kwargs: Arguments of every Keras layer.
    """

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(autocast=False, **kwargs)
        self.supports_masking = True

    def call(self, inputs: Tree) -> Tree:
        """Mark the inputs."""
        return recomputation_checkpoint(inputs)

    def compute_output_spec(self, inputs: Tree) -> Tree:
        """The same as for the inputs."""
        return keras.tree.map_structure(lambda t: keras.KerasTensor(t.shape, t.dtype), inputs)


@registered
class AssumeEqualAcrossReplicas(keras.Layer):
    """Returns its inputs. The original needs to be told that values are equal on all replicas; programs here do not.

    >>> print(ipu.keras.layers.AssumeEqualAcrossReplicas()(np.ones(2)))
    [1. 1.]

    Args:
        inplace: Whether the inputs are not copied. Either way, nothing is copied here.
        **kwargs: Arguments of every Keras layer.
    """

    def __init__(self, inplace: bool = False, **kwargs: Any) -> None:
        super().__init__(autocast=False, **kwargs)
        self.supports_masking = True
        self.inplace = validate.flag("inplace", inplace)

    def call(self, inputs: Tree) -> Tree:
        """The inputs."""
        return assume_equal_across_replicas(inputs, self.inplace)

    def compute_output_spec(self, inputs: Tree) -> Tree:
        """The same as for the inputs."""
        return keras.tree.map_structure(lambda t: keras.KerasTensor(t.shape, t.dtype), inputs)

    def get_config(self) -> dict[str, Any]:
        """Everything needed to make an equal layer."""
        return {**super().get_config(), "inplace": self.inplace}
