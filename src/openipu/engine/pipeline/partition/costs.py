"""What the calls of a graph cost, estimated from their traces. Nothing is run."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from types import FunctionType
from typing import Any

from openipu.engine.core.operation_count import operations
from openipu.engine.shapes import specs_of
from openipu.engine.types import Tree

import jax
import keras
from jax.extend.core import ClosedJaxpr

from .nodes import Graph, Node
from .recorded_calls import is_symbolic, standardized
from .run_nodes import Value, program_of, spec_of

BYTE = 20.0
"""How many operations take as long as reading or writing one byte of memory: some tens on CPUs, GPUs and TPUs."""
ROWS = 32
"""Rows of the micro-batch that costs are estimated for, unless the model or the caller says otherwise."""


def input_shapes(graph: Graph, inputs: Tree) -> list[Any]:
    """Shape and dtype of each input of the graph: those of `inputs`, or `ROWS` rows of what the model declares."""
    if inputs is not None:
        given = keras.tree.map_structure(spec_of, inputs)
        return list(jax.eval_shape(lambda x: standardized(graph.model, x), given))
    found = []
    for tensor in graph.inputs:
        shape = (tensor.shape[0] or ROWS, *tensor.shape[1:])
        if None in shape:
            raise ValueError(
                f"Input {tensor.name!r} has the shape {tensor.shape}, so the costs of layers are unknown. Give "
                "`inputs`, a micro-batch as the model will see it."
            )
        found.append(jax.ShapeDtypeStruct(shape, tensor.dtype))
    return found


def bytes_of(values: Tree) -> int:
    """The size of all arrays in a structure."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(values))


def costs_of(graph: Graph, values: dict[int, Value]) -> Iterator[float]:
    """The cost of each node, in operations. Calls that cost the same are estimated once."""
    seen: dict[Hashable, float] = {}
    for node in graph.nodes:
        key = _signature(node, values)
        if key not in seen:
            seen[key] = _cost(node, values)
        yield seen[key]


def _signature(node: Node, values: dict[int, Value]) -> Hashable:
    """Equal for calls that cost the same: the same kind of operation, with the same settings, on the same shapes."""
    leaves = keras.tree.flatten((node.args, node.kwargs))
    shapes = [values[id(leaf)] if is_symbolic(leaf) else _setting(leaf, set()) for leaf in leaves]
    variables = [(v.shape, v.dtype) for v in node.variables]
    return type(node.operation), _settings(node.operation, set()), repr(shapes), repr(variables)


_NAMES = ("name", "_path", "_parent_path", "_inbound_nodes", "_outbound_nodes", "_called")
"""Attributes in which equal layers differ."""


def _settings(operation: object, seen: set[int]) -> Hashable:
    """The attributes of a layer or operation, as far as they can be compared.

    `get_config` is not used: a layer that takes an array or a function need not have one.
    """
    if id(operation) in seen:
        return None
    seen.add(id(operation))
    own = vars(operation) if hasattr(operation, "__dict__") else {}
    return tuple((name, _setting(value, seen)) for name, value in own.items() if name not in _NAMES)


def _setting(value: Any, seen: set[int]) -> Hashable:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple):
        return tuple(_setting(part, seen) for part in value)
    if isinstance(value, dict):
        return tuple((str(name), _setting(part, seen)) for name, part in value.items())
    if isinstance(value, FunctionType):
        return id(value.__code__)
    if isinstance(value, keras.Layer):
        return type(value), _settings(value, seen)
    shape = getattr(value, "shape", None)
    if shape is None or callable(shape):  # preprocessing layers keep Keras' backend, where `shape` is a function
        return type(value), None
    return type(value), (tuple(shape), str(value.dtype))


def _cost(node: Node, values: dict[int, Value]) -> float:
    """The operations of a forward pass, plus its memory traffic expressed as operations."""
    variables, tensors = node.variables, node.inputs
    program = program_of([node], tensors, node.outputs, variables, values, training=True)
    given = [spec_of(v) for v in variables], [values[id(tensor)] for tensor in tensors]
    moved = bytes_of(given) + bytes_of([values[id(tensor)] for tensor in node.outputs])
    return operations(program.jaxpr) + BYTE * moved


def cost_of(closed: ClosedJaxpr) -> float:
    """The cost of a traced program, estimated like that of a layer."""
    moved = bytes_of(specs_of([*closed.in_avals, *closed.out_avals]))
    return operations(closed) + BYTE * moved
