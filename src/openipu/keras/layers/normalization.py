"""Normalization of each sample by itself, over groups of channels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

from openipu import _validate as validate
from openipu.engine.types import Array
from openipu.keras._registered import registered

import jax.numpy as jnp
import keras
from keras import ops

Initializer: TypeAlias = str | keras.initializers.Initializer | None


@registered
class GroupNormalization(keras.Layer):
    """Gives the channels of each group zero mean and unit variance in each sample, then scales and shifts each channel.

    By default, groups are strided: channel c is in group `c % groups`. With `strided_channel_grouping=False`, a group
    is a run of neighbouring channels, as in Keras. Weights trained with one kind do not fit the other.

    >>> layer = ipu.keras.layers.GroupNormalization(groups=2)
    >>> print(layer(np.array([[1.0, 10.0, 3.0, 30.0]])).round(2))  # channels 0 and 2 are a group, and 1 and 3
    [[-1. -1.  1.  1.]]

    Args:
        groups: How many groups there are. It divides the number of channels.
        channels_axis: The axis of the channels; not the first one.
        center: Whether channels are shifted by a trained `beta`.
        scale: Whether channels are scaled by a trained `gamma`.
        epsilon: Added to the variance.
        beta_initializer: Makes `beta`; None for zeros.
        gamma_initializer: Makes `gamma`; None for ones.
        strided_channel_grouping: See above.
        trainable: Whether `beta` and `gamma` are trained.
        **kwargs: Arguments of every Keras layer.
    """

    def __init__(
        self,
        groups: int = 2,
        channels_axis: int = -1,
        center: bool = True,
        scale: bool = True,
        epsilon: float = 1e-3,
        beta_initializer: Initializer = None,
        gamma_initializer: Initializer = None,
        strided_channel_grouping: bool = True,
        trainable: bool = True,
        **kwargs: Any,
    ) -> None:
        super().__init__(trainable=trainable, autocast=False, **kwargs)
        self.supports_masking = True
        self.groups: int | None = validate.count("groups", groups)
        """None for a group for each channel."""
        self.channels_axis = validate.count("channels_axis", channels_axis, least=None)
        self.center, self.scale = validate.flag("center", center), validate.flag("scale", scale)
        self.epsilon = validate.number("epsilon", epsilon, least=0.0)
        self.beta_initializer = keras.initializers.get("zeros" if beta_initializer is None else beta_initializer)
        self.gamma_initializer = keras.initializers.get("ones" if gamma_initializer is None else gamma_initializer)
        self.strided_channel_grouping = validate.flag("strided_channel_grouping", strided_channel_grouping)

    def build(self, input_shape: Sequence[int | None]) -> None:
        """Make `gamma` and `beta`."""
        axis = self._axis(len(input_shape))
        channels = input_shape[axis]
        if channels is None:
            raise ValueError(
                f"{self.name!r} got inputs of shape {tuple(input_shape)}, whose channels are not known. Give inputs "
                "whose number of channels is known."
            )
        if self.groups and channels % self.groups:
            raise ValueError(
                f"{self.name!r} has {self.groups} groups, which do not divide {channels} channels evenly. Give a "
                "number of groups that does."
            )
        self.gamma = self.beta = None
        if self.scale:
            self.gamma = self.add_weight((channels,), self.gamma_initializer, name="gamma", autocast=False)
        if self.center:
            self.beta = self.add_weight((channels,), self.beta_initializer, name="beta", autocast=False)
        self.input_spec = keras.InputSpec(ndim=len(input_shape), axes={axis: channels})
        self.built = True

    def call(self, inputs: Array) -> Array:
        """The normalized inputs. Statistics are computed in float32 or better."""
        dtype = keras.backend.result_type(inputs.dtype, "float32")
        axis = self._axis(inputs.ndim)
        channels = inputs.shape[axis]
        groups = self.groups or channels
        parts = (channels // groups, groups) if self.strided_channel_grouping else (groups, channels // groups)
        shape = (*inputs.shape[:axis], *parts, *inputs.shape[axis + 1 :])
        split = ops.reshape(ops.cast(inputs, dtype), shape)
        of_groups = axis + 1 if self.strided_channel_grouping else axis
        mean, variance = ops.moments(split, [i for i in range(1, len(shape)) if i != of_groups], keepdims=True)
        result = ops.reshape((split - mean) * ops.rsqrt(variance + self.epsilon), inputs.shape)
        per_channel = [channels if i == axis else 1 for i in range(inputs.ndim)]
        if self.gamma is not None:
            result = result * ops.cast(ops.reshape(self.gamma, per_channel), dtype)
        if self.beta is not None:
            result = result + ops.cast(ops.reshape(self.beta, per_channel), dtype)
        return jnp.asarray(result, self.compute_dtype)

    def _axis(self, rank: int) -> int:
        axis = self.channels_axis + rank if self.channels_axis < 0 else self.channels_axis
        if not 0 < axis < rank:
            raise ValueError(
                f"`channels_axis` of {self.name!r} is {self.channels_axis}, but its inputs have {rank} axes, and the "
                "first one counts samples. Give one of the others."
            )
        return axis

    def compute_output_spec(self, inputs: keras.KerasTensor) -> keras.KerasTensor:
        """The shape of the inputs."""
        return keras.KerasTensor(inputs.shape, self.compute_dtype)

    def get_config(self) -> dict[str, Any]:
        """Everything needed to make an equal layer."""
        return {
            **super().get_config(),
            "groups": self.groups,
            "channels_axis": self.channels_axis,
            "center": self.center,
            "scale": self.scale,
            "epsilon": self.epsilon,
            "beta_initializer": keras.initializers.serialize(self.beta_initializer),
            "gamma_initializer": keras.initializers.serialize(self.gamma_initializer),
            "strided_channel_grouping": self.strided_channel_grouping,
        }


@registered
class InstanceNormalization(GroupNormalization):
    """Gives each channel of each sample zero mean and unit variance, then scales and shifts it.

    >>> ipu.keras.layers.InstanceNormalization()(np.ones((2, 8, 8, 3))).shape
    (2, 8, 8, 3)

    Args:
        channels_axis: The axis of the channels; not the first one.
        center: Whether channels are shifted by a trained `beta`.
        scale: Whether channels are scaled by a trained `gamma`.
        epsilon: Added to the variance.
        beta_initializer: Makes `beta`; None for zeros.
        gamma_initializer: Makes `gamma`; None for ones.
        **kwargs: Arguments of every Keras layer.
    """

    def __init__(
        self,
        channels_axis: int = -1,
        center: bool = True,
        scale: bool = True,
        epsilon: float = 1e-3,
        beta_initializer: Initializer = None,
        gamma_initializer: Initializer = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(1, channels_axis, center, scale, epsilon, beta_initializer, gamma_initializer, **kwargs)
        self.groups = None

    def get_config(self) -> dict[str, Any]:
        """Everything needed to make an equal layer."""
        config = super().get_config()
        return {name: v for name, v in config.items() if name not in ("groups", "strided_channel_grouping")}


@registered
class LayerNormalization(keras.layers.LayerNormalization):
    """`keras.layers.LayerNormalization`. The lengths of the axes that it normalizes must be known.

    >>> print(ipu.keras.layers.LayerNormalization()(np.array([[1.0, 2.0, 3.0]])).round(2))
    [[-1.22  0.    1.22]]

    Args:
        axis: The axis or axes to normalize over.
        epsilon: Added to the variance.
        center: Whether there is a trained `beta` to add.
        scale: Whether there is a trained `gamma` to multiply by.
        **kwargs: Arguments of `keras.layers.LayerNormalization`.
    """

    def __init__(
        self,
        axis: int | Sequence[int] = -1,
        epsilon: float = 1e-3,
        center: bool = True,
        scale: bool = True,
        **kwargs: Any,
    ) -> None:
        super().__init__(axis, epsilon, center, scale, **kwargs)

    def build(self, input_shape: Sequence[int | None]) -> None:
        """Make `gamma` and `beta`."""
        axes = self.axis if isinstance(self.axis, list) else [self.axis]
        if any(input_shape[axis] is None for axis in axes):
            raise ValueError(
                f"{self.name!r} got inputs of shape {tuple(input_shape)}, but normalizes over axis {self.axis}. Give "
                "inputs whose length along it is known."
            )
        super().build(input_shape)
