"""Runs the nodes of a graph, on values or only on their shapes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from openipu.engine.core.enqueued import ignored
from openipu.engine.keras_compat import api as keras_api
from openipu.engine.keras_compat import graph_api
from openipu.engine.types import Array, Tree

import jax
import keras
from jax.extend.core import ClosedJaxpr

from .nodes import Entry, Graph, Node, Tensor
from .recorded_calls import is_symbolic


def run_node(node: Node, values: dict[int, Any], training: bool) -> None:
    """Compute one node from `values`, which maps the identities of tensors to values, and add its outputs there."""
    args, kwargs = with_values(node.args, values), with_values(node.kwargs, values)
    told = training if node.training == "as run" else node.training
    # A layer casts its variables itself; operations use the dtype of the models around them.
    with _autocast([] if node.is_layer else [nested.model for nested in node.within]), _call_from(node):
        outputs = graph_api.run_operation(node.operation, told, args, kwargs)
    values.update(zip(map(id, node.outputs), keras.tree.flatten(outputs), strict=False))


def _call_from(node: Node) -> contextlib.AbstractContextManager[None]:
    """While active, a call inside a nested model keeps the losses of its sisters. The model's own call drops old ones.

    [Note: losses of calls] Keras drops the losses of a layer, and of all layers inside, when the layer is called from
    outside any other.
    """
    if not node.within:
        return contextlib.nullcontext()
    if isinstance(node.operation, Entry) and len(node.within) == 1:
        graph_api.clear_losses(node.within[0].model)
    return keras_api.inside_call(node.within[0].model)


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
        with keras.StatelessScope(list(zip(variables, weights, strict=True))), ignored():
            for node in graph.nodes:
                run_node(node, values, training)
                visit(node)
        found = [values.get(id(tensor)) for tensor in tensors]
        return [Value(value, keras_api.get_keras_mask(value)) for value in found]

    found = jax.eval_shape(run, [spec_of(v) for v in variables], [spec_of(value) for value in inputs])
    return dict(zip(map(id, tensors), found, strict=True))


class NodeProgram(NamedTuple):
    """The traced program of some nodes."""

    jaxpr: ClosedJaxpr
    outputs: list[Value]


def program_of(
    nodes: Sequence[Node],
    given: Sequence[Tensor],
    outputs: Sequence[Tensor],
    variables: Sequence[keras.Variable],
    values: Mapping[int, Value],
    training: bool,
) -> NodeProgram:
    """The program that computes `outputs`, the new values of `variables` and all added losses.

    Args:
        nodes: What to run.
        given: The tensors that the nodes start from.
        outputs: The tensors that the program returns.
        variables: The variables that the nodes use.
        values: The shapes of the given tensors, by identity.
        training: The mode.
    """

    def run(weights: list[Any], given_values: list[Value]) -> Any:
        env: dict[int, Any] = {}
        for tensor, (value, mask) in zip(given, given_values, strict=True):
            if mask is not None:
                keras_api.set_keras_mask(value, mask)
            env[id(tensor)] = value
        with ignored(), keras.StatelessScope(list(zip(variables, weights, strict=True)), collect_losses=True) as scope:
            for node in nodes:
                run_node(node, env, training)
        found = [env.get(id(tensor)) for tensor in outputs]
        masked = [Value(value, keras_api.get_keras_mask(value)) for value in found]
        return masked, [scope.get_current_value(v) for v in variables], scope.losses

    specs = [spec_of(v) for v in variables], [values[id(tensor)] for tensor in given]
    jaxpr, (found, _, _) = jax.make_jaxpr(run, return_shape=True)(*specs)
    return NodeProgram(jaxpr, found)


def spec_of(value: keras.Variable | keras.KerasTensor | Array | None) -> jax.ShapeDtypeStruct | None:
    """Shape and dtype of a variable, tensor or array. None stays None: an optional input that is not given."""
    if value is None:
        return None
    return jax.ShapeDtypeStruct(tuple(value.shape), keras.backend.standardize_dtype(value.dtype))
