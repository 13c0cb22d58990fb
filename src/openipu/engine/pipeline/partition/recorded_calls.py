"""The calls that Keras records for Functional and Sequential models."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any, NamedTuple

from openipu.engine.keras_compat import api as keras_api
from openipu.engine.keras_compat import graph_api
from openipu.engine.types import Tree

import keras

from .stage_marks import KerasNode, stage_of


class LayerCall(NamedTuple):
    """One call of a layer or operation with symbolic tensors, and the stage that a `PipelineStage` gave it."""

    operation: keras.Operation
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: list[keras.KerasTensor]
    stage: int | None


class Recording(NamedTuple):
    """What a model does to symbolic inputs: its calls, in the order in which they run."""

    inputs: list[keras.KerasTensor]
    outputs: Tree
    calls: list[LayerCall]


def is_symbolic(value: object) -> bool:
    """Whether the value stands for a tensor of a graph."""
    return isinstance(value, keras.KerasTensor)


def has_graph(model: keras.Model) -> bool:
    """Whether Keras knows the graph of the model, so that `recorded` can read it."""
    return functional_of(model) is not None


def replaces_call(model: keras.Model) -> bool:
    """Whether a Functional or Sequential model has a `call` of its own, which its graph does not describe."""
    kind = next((kind for kind in (keras_api.Functional, keras.Sequential) if isinstance(model, kind)), None)
    return kind is not None and type(model).call is not kind.call


def can_be_inlined(operation: keras.Operation) -> bool:
    """Whether calling the operation does nothing but run the graph it contains."""
    return isinstance(operation, keras.Model) and has_graph(operation) and not operation.supports_masking


def can_be_traced(operation: keras.Operation) -> bool:
    """Whether calling the operation does nothing but run a user's `call` on converted inputs."""
    return (
        isinstance(operation, keras.Model)
        and not has_graph(operation)
        and not replaces_call(operation)
        and not operation.supports_masking
        and operation.activity_regularizer is None
        and not any("mask" in name for name in inspect.signature(operation.call).parameters)
    )


def default_training(layer: keras.Layer) -> bool | None:
    """The default of the `training` argument of `call`, or None if it has none."""
    if not isinstance(layer, keras.Layer):
        return None
    parameter = inspect.signature(layer.call).parameters.get("training")
    return None if parameter is None or parameter.default is parameter.empty else parameter.default


def functional_of(model: keras.Model) -> keras_api.Functional | None:
    """The Functional model whose graph describes all that the model does, or None."""
    return None if replaces_call(model) else graph_api.functional_of(model)


def recorded(model: keras.Model) -> Recording:
    """The graph of a Functional model, or of a Sequential model that knows the shape of its input."""
    functional = functional_of(model)
    assert functional is not None
    calls = [call_of(node) for node in graph_api.nodes_of(functional) if graph_api.is_call(node)]
    return Recording(list(functional.inputs), graph_api.outputs_of(functional), calls)


def call_of(node: KerasNode) -> LayerCall:
    """The call that a node of Keras' graph records."""
    return LayerCall(*graph_api.call_of(node), stage_of(node))


def converted(layer: keras.Layer, values: Sequence[Any]) -> list[Any]:
    """Tensors as the layer sees them when it is called: floats in its own dtype."""
    found = [layer.dtype_policy.convert_input(value, layer.autocast, layer.input_dtype) for value in values]
    for value, new in zip(values, found, strict=True):
        mask = keras_api.get_keras_mask(value)
        if mask is not None:
            keras_api.set_keras_mask(new, mask)
    return found


def standardized(model: keras.Model, inputs: Tree) -> list[Any]:
    """The flat inputs of the model's graph, converted as the model itself does it (structure, dtype, last axis)."""
    functional = functional_of(model)
    if functional is None:
        return list(keras.tree.flatten(inputs))
    return graph_api.standardized(functional, inputs)
