"""The private parts of Keras that concern graphs and calls of layers, under plain names. See api.py."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from openipu.engine.types import Tree

import keras
from keras.src.backend.common.masking import get_keras_mask
from keras.src.layers.layer import CallSpec
from keras.src.models.functional import Functional, operation_fn, unpack_singleton
from keras.src.ops.node import Node
from keras.src.utils.python_utils import is_default


class CallArguments(NamedTuple):
    """What Keras passes to the `call` of a layer, and what it looks at for the mask of the outputs."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    first: Tree
    previous_mask: Tree


def functional_of(model: keras.Model) -> Functional | None:
    """The model itself if it is Functional, the Functional model inside a Sequential one with known inputs, or None."""
    return model if isinstance(model, Functional) else getattr(model, "_functional", None)


def nodes_of(functional: Functional) -> list[Node]:
    """The nodes of a graph, one per call of a layer or operation, in the order in which they run."""
    by_depth = functional._nodes_by_depth
    return [node for depth in sorted(by_depth, reverse=True) for node in by_depth[depth]]


def is_call(node: Node) -> bool:
    """Whether a node computes something. Others are inputs."""
    return bool(node.operation) and not node.is_input


def call_of(node: Node) -> tuple[keras.Operation, tuple[Any, ...], dict[str, Any], list[keras.KerasTensor]]:
    """The operation of a node, its arguments, keyword arguments and outputs."""
    return node.operation, node.arguments.args, node.arguments.kwargs, list(node.outputs)


def input_name(tensor: keras.KerasTensor) -> str:
    """The name of the layer that stands for an input of a graph. The tensor itself may have a made-up name."""
    return str(tensor._keras_history.operation.name)


def outputs_of(functional: Functional) -> Tree:
    """The symbolic outputs of a graph, in the structure that the model returns."""
    return unpack_singleton(functional._outputs_struct)


def standardized(functional: Functional, inputs: Tree) -> list[Any]:
    """The flat inputs of a graph, converted as the model itself converts them (structure, dtype, last axis)."""
    return list(functional._standardize_inputs(inputs))


def run_operation(
    operation: keras.Operation, training: bool | None, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    """Call an operation as a Functional model does: with `training` if it takes that and was not given it."""
    return operation_fn(operation, training=training)(*args, **kwargs)


def takes_training(layer: keras.Layer) -> bool:
    """Whether the layer's `call` has an argument `training`."""
    return bool(layer._call_has_training_arg)


def shapes_built_with(model: keras.Model) -> Any:
    """The input shapes that a model was built with, or None."""
    return next(iter((model._build_shapes_dict or {}).values()), None)


def can_be_replayed(layer: keras.Layer) -> bool:
    """Whether calling the layer does nothing special around its `call`: no quantization, no recomputation."""
    return bool(layer._convert_input_args) and layer.quantization_mode is None and layer._remat_mode is None


def with_masks(layer: keras.Layer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CallArguments:
    """The arguments that Keras passes to the layer's `call`: with masks for the parameters named after tensors."""
    spec = CallSpec(layer._call_signature, layer._call_context_args, args, kwargs)
    tensors, given = spec.tensor_arguments_dict, spec.arguments_dict
    names = {name: f"{name}_mask" for name in tensors} if len(tensors) > 1 else dict.fromkeys(tensors, "mask")
    for name, mask in names.items():
        if mask in spec.argument_names and given[mask] is None:
            kwargs[mask] = keras.tree.map_structure(get_keras_mask, tensors[name])
    previous = kwargs.get("mask")
    if previous is None:
        previous = keras.tree.map_structure(get_keras_mask, spec.first_arg)
    return CallArguments(args, kwargs, spec.first_arg, previous)


def computes_masks(layer: keras.Layer) -> bool:
    """Whether the layer has a `compute_mask` of its own. By default, outputs have the mask of the inputs."""
    return not is_default(layer.compute_mask)


def set_output_masks(layer: keras.Layer, inputs: Tree, outputs: list[Any], previous: Tree) -> None:
    """Give the outputs of a layer that supports masking their masks, as Keras does after its `call`."""
    layer._set_mask_metadata(inputs, outputs, previous)


def clear_losses(layer: keras.Layer) -> None:
    """Drop the losses that a layer has added in the scope, as Keras does when it calls a layer again."""
    layer._clear_losses()
