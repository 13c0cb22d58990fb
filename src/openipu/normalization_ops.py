"""Normalization as functions that make their own weights, for model functions and Functional models."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from openipu import _validate as validate
from openipu.engine.types import Array
from openipu.keras import layers

import keras

__all__ = ["group_norm", "instance_norm", "layer_norm"]

_SMALLEST_EPSILON: Final = 1.53e-5


def group_norm(
    inputs: Array,
    groups: int = 2,
    channels_axis: int = -1,
    center: bool = True,
    scale: bool = True,
    epsilon: float = _SMALLEST_EPSILON,
    param_initializers: Mapping[str, keras.initializers.Initializer] | None = None,
    reuse: None = None,
    variables_collections: None = None,
    training: bool = True,
    trainable: bool = True,
    scope: str | None = None,
    strided_channel_grouping: bool = True,
) -> Array:
    """The inputs, with zero mean and unit variance in each group of channels of each sample, scaled and shifted.

    Each call makes a `ipu.keras.layers.GroupNormalization`, so it has weights of its own. Call it where layers can be
    made: in the `model_fn` of an estimator, or when a Functional model is put together.

    >>> outputs = ipu.normalization_ops.group_norm(np.array([[1.0, 10.0, 3.0, 30.0]]), groups=2)
    >>> print(outputs.round(2))  # channels 0 and 2 are a group, and 1 and 3
    [[-1. -1.  1.  1.]]

    Args:
        inputs: An array or a symbolic tensor.
        groups: How many groups there are. It divides the number of channels.
        channels_axis: The axis of the channels; not the first one.
        center: Whether channels are shifted by a trained `beta`.
        scale: Whether channels are scaled by a trained `gamma`.
        epsilon: Added to the variance.
        param_initializers: Initializers by the names "beta" and "gamma".
        reuse: None: weights belong to layers.
        variables_collections: None: there are no collections.
        training: Statistics are those of each sample, in training and otherwise, so both give the same.
        trainable: Whether `beta` and `gamma` are trained.
        scope: The name of the layer.
        strided_channel_grouping: Whether channel c is in group `c % groups`; otherwise, groups are runs of channels.
    """
    validate.flag("training", training)
    initial = _initializers(param_initializers, reuse, variables_collections)
    layer = layers.GroupNormalization(
        groups, channels_axis, center, scale, _epsilon(epsilon), **initial,
        strided_channel_grouping=strided_channel_grouping, trainable=trainable, name=scope,
    )  # fmt: skip
    result: Array = layer(inputs)
    return result


def instance_norm(
    inputs: Array,
    channels_axis: int = -1,
    center: bool = True,
    scale: bool = True,
    epsilon: float = _SMALLEST_EPSILON,
    param_initializers: Mapping[str, keras.initializers.Initializer] | None = None,
    reuse: None = None,
    variables_collections: None = None,
    training: bool = True,
    trainable: bool = True,
    scope: str | None = None,
) -> Array:
    """The inputs, with zero mean and unit variance in each channel of each sample, scaled and shifted.

    The arguments are those of `group_norm`.

    >>> image = np.random.default_rng(0).random((1, 8, 8, 3))
    >>> outputs = ipu.normalization_ops.instance_norm(image)
    >>> print(abs(outputs.mean((1, 2))).round(3))
    [[0. 0. 0.]]
    """
    validate.flag("training", training)
    initial = _initializers(param_initializers, reuse, variables_collections)
    layer = layers.InstanceNormalization(
        channels_axis, center, scale, _epsilon(epsilon), **initial, trainable=trainable, name=scope
    )
    result: Array = layer(inputs)
    return result


def layer_norm(
    inputs: Array,
    channels_axis: int = -1,
    center: bool = True,
    scale: bool = True,
    epsilon: float = _SMALLEST_EPSILON,
    param_initializers: Mapping[str, keras.initializers.Initializer] | None = None,
    reuse: None = None,
    variables_collections: None = None,
    training: bool = True,
    trainable: bool = True,
    scope: str | None = None,
) -> Array:
    """The inputs, with zero mean and unit variance in each sample, and each channel scaled and shifted.

    The arguments are those of `group_norm`, of which it is the case of a single group.

    >>> print(ipu.normalization_ops.layer_norm(np.array([[1.0, 2.0, 3.0]])).round(2))
    [[-1.22  0.    1.22]]
    """
    options = (center, scale, epsilon, param_initializers, reuse, variables_collections, training, trainable, scope)
    return group_norm(inputs, 1, channels_axis, *options)


def _initializers(
    given: Mapping[str, keras.initializers.Initializer] | None, reuse: object, collections: object
) -> dict[str, Any]:
    for name, value in (("reuse", reuse), ("variables_collections", collections)):
        if value is not None:
            raise ValueError(
                f"`{name}` is {value!r}, but weights belong to layers. Leave it out; to use the same weights twice, "
                "make an `ipu.keras.layers.GroupNormalization` and call it twice."
            )
    found = validate.mapping("param_initializers", given, optional=True)
    for name in found:
        validate.choice("A key of `param_initializers`", name, ("beta", "gamma"))
    return {f"{name}_initializer": value for name, value in found.items()}


def _epsilon(value: float) -> float:
    if value < _SMALLEST_EPSILON:
        validate.notice(
            f"The epsilon of a normalization is {value}. In float16, one below {_SMALLEST_EPSILON} may be too small."
        )
    return value
