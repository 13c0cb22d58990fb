"""Runs the nodes of a graph, on values or only on their shapes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from openipu.engine.keras_compat import api as keras_api
from openipu.engine.types import Array, Tree

import jax
import keras

from .nodes import Graph, Node
from .recorded_calls import is_symbolic


def run_node(node: Node, values: dict[int, Any], training: bool) -> None:
    """Compute one node from `values`, which maps the identities of tensors to values, and add its outputs there."""
    args, kwargs = with_values(node.args, values), with_values(node.kwargs, values)
    told = training if node.training == "as run" else node.training
    # A layer casts its variables itself; operations use the dtype of the models around them.
    with _autocast([] if node.is_layer else [nested.model for nested in node.within]):
        outputs = keras_api.run_operation(node.operation, told, args, kwargs)
    values.update(zip(map(id, node.outputs), keras.tree.flatten(outputs), strict=False))


@contextlib.contextmanager
def _autocast(layers: Sequence[keras.Layer]) -> Iterator[None]:
    """While active, variables are cast as inside nested calls of these layers, the outermost first."""
    with contextlib.ExitStack() as stack:
        for layer in layers:
            current = keras_api.get_autocast_scope()
            wanted = layer.compute_dtype if layer.autocast and "float" in layer.compute_dtype else None
            if current is None and layer.compute_dtype == layer.variable_dtype:
                continue
            stack.enter_context(keras_api.AutocastScope(wanted))
        yield


def with_values(tree: Tree, values: dict[int, Any]) -> Tree:
    """The structure with its tensors replaced by their values."""
    return keras.tree.map_structure(lambda leaf: values[id(leaf)] if is_symbolic(leaf) else leaf, tree)


class Value(NamedTuple):
    """Shape and dtype of a tensor's value, and of its mask. Each may be None."""

    value: Any
    mask: Any


def abstract_values(
    graph: Graph, inputs: Sequence[Any], training: bool, visit: Callable[[Node], object] = lambda _: None
) -> dict[int, Value]:
    """The shape of every tensor of the graph, by identity, for inputs of these shapes. `visit` sees each node."""
    tensors = [*graph.inputs, *(tensor for node in graph.nodes for tensor in node.outputs)]
    variables = graph.model.variables

    def run(weights: list[Any], flat: list[Any]) -> list[Value]:
        values = dict(zip(map(id, graph.inputs), flat, strict=True))
        with keras.StatelessScope(list(zip(variables, weights, strict=True))):
            for node in graph.nodes:
                run_node(node, values, training)
                visit(node)
        found = [values.get(id(tensor)) for tensor in tensors]
        return [Value(value, keras_api.get_keras_mask(value)) for value in found]

    found = jax.eval_shape(run, [spec_of(v) for v in variables], [spec_of(value) for value in inputs])
    return dict(zip(map(id, tensors), found, strict=True))


def spec_of(value: keras.Variable | keras.KerasTensor | Array | None) -> jax.ShapeDtypeStruct | None:
    """Shape and dtype of a variable, tensor or array. None stays None: an optional input that is not given."""
    if value is None:
        return None
    return jax.ShapeDtypeStruct(tuple(value.shape), keras.backend.standardize_dtype(value.dtype))
