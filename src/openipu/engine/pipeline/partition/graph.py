"""A Keras model as a flat graph: the calls it makes, in an order in which they can run.

Who does what: nodes.py has the values that a graph is made of. recorded_calls.py reads the graph that Keras records
(Functional and Sequential models), and traced_call.py traces `call` (subclassed models). This file replaces nested
models by what they contain, so that a stage may begin or end inside one.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from openipu.engine.core.options import CLOSED, Opening
from openipu.engine.keras_compat import api as keras_api
from openipu.engine.keras_compat import graph_api
from openipu.engine.types import Tree

import jax
import keras

from .nodes import Entry, Graph, LayerEntry, LayerExit, NestedCall, Node, Tensor, Training
from .opened_layer import CannotOpenError, OpenedLayer, opened
from .recorded_calls import (
    LayerCall,
    Recording,
    can_be_inlined,
    can_be_traced,
    default_training,
    has_graph,
    is_symbolic,
    recorded,
    replaces_call,
    standardized,
)
from .run_nodes import Value, program_of, spec_of
from .same_program import same_program
from .stage_marks import stage_of
from .traced_call import noted_inputs, traced


def graph_of(model: keras.Model, input_spec: Tree = None, training: bool = False, opening: Opening = CLOSED) -> Graph:
    """The graph of a built model.

    Args:
        model: A Functional, Sequential or subclassed Keras model.
        input_spec: Used if the model's `call` has to be traced: the inputs, or anything in their structure with `shape`
            and `dtype`. The graph is valid for these shapes. The default is the inputs of the model's first call.
        training: The mode in which `call` is traced.
        opening: The layers to look into.
    """
    if replaces_call(model):
        raise RuntimeError(
            f"Model {model.name!r} has both a graph of layers and a `call` of its own, but a pipelined model can only "
            "have one of them. Remove `call`, or write the whole model as a subclass of `keras.Model`."
        )
    known = has_graph(model)
    record = recorded(model) if known else _trace(model, input_spec, training)
    inputs = tuple(map(_named, record.inputs) if known else map(_fresh, record.inputs))
    layers = keras_api.all_layers(model) if opening.layers else []
    build = _Build(training, frozenset(id(layers[i]) for i in opening.layers if i < len(layers)))
    if opening.layers:
        inputs = build.give(inputs, _input_values(model, input_spec, opening) if known else inputs)
    tensors = {id(tensor): new for tensor, new in zip(record.inputs, inputs, strict=True)}
    build.add(record, tensors, _Enclosing("as run" if known else None, known))
    traced = not known or build.traced
    outputs = _replaced(record.outputs, tensors)
    refused = tuple(build.refused.values())
    return Graph(model, tuple(build.nodes), inputs, outputs, traced, training, opening, refused)


def _input_values(model: keras.Model, spec: Tree, opening: Opening) -> list[Any]:
    """The shapes of the inputs of a model with a graph: those of `spec`, or those for which layers were opened."""
    if spec is None:
        return [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in opening.shapes]
    given = keras.tree.map_structure(spec_of, spec)
    return list(jax.eval_shape(lambda x: standardized(model, x), given))


def _trace(model: keras.Model, spec: Tree, training: bool) -> Recording:
    spec = spec if spec is not None else _noted(model)
    leaves = keras.tree.flatten(spec)
    names = sorted(spec) if isinstance(spec, dict) and len(spec) == len(leaves) else _numbered(len(leaves))
    flat = [keras.KerasTensor(a.shape, _dtype(a), name=name) for a, name in zip(leaves, names, strict=True)]
    symbols = keras.tree.pack_sequence_as(spec, flat)
    return traced(model, (symbols,), {"training": training} if graph_api.takes_training(model) else {})


def _numbered(count: int) -> list[str]:
    return ["inputs"] if count == 1 else [f"inputs_{i}" for i in range(count)]


def _noted(model: keras.Model) -> Tree:
    inputs = noted_inputs(model)
    if inputs is None:
        raise RuntimeError(
            f"The stages of model {model.name!r} are not known before it is built. Call the model on a batch, or train "
            "it without stages first."
        )
    return inputs


def _dtype(leaf: jax.Array | jax.ShapeDtypeStruct) -> str:
    return str(keras.backend.standardize_dtype(leaf.dtype))


class _Enclosing(NamedTuple):
    """What the calls inside a model inherit from the call of that model."""

    training: Training
    """The mode that a Functional model imposes on all its calls. None leaves it to the calls."""
    recorded: bool
    """Whether the calls come from a Functional model's graph, which may contain calls that cannot be computed."""
    within: tuple[NestedCall, ...] = ()
    called_in: int | None = None
    """The `PipelineStage` in which the model was called."""
    made_in: int | None = None
    """The `PipelineStage` in which the model was created."""
    context: list[Training] | None = None
    """The mode of the most recent call, which Keras passes on to the next one. None at the top level, where every call
    starts afresh."""


@dataclass(slots=True)
class _Build:
    """A graph under construction."""

    training: bool
    opening: frozenset[int] = frozenset()
    """The identities of the layers to look into."""
    nodes: list[Node] = field(default_factory=list)
    counts: Counter[int] = field(default_factory=Counter)
    traced: bool = False
    values: dict[int, Value] = field(default_factory=dict)
    """The shapes of all tensors by identity, if there are layers to look into."""
    refused: dict[int, tuple[keras.Layer, str]] = field(default_factory=dict)
    """By identity: layers that cannot be looked into, and why."""

    def give(self, inputs: Sequence[Tensor], specs: Sequence[Any]) -> tuple[Tensor, ...]:
        """The inputs of the graph, with the sizes of `specs`."""
        found = []
        for tensor, spec in zip(inputs, map(spec_of, specs), strict=True):
            sized = tensor if spec is None else keras.KerasTensor(spec.shape, str(spec.dtype), name=tensor.name)
            self.values[id(sized)] = Value(spec, None)
            found.append(sized)
        return tuple(found)

    def _append(self, node: Node) -> None:
        self.nodes.append(node)
        if self.opening:
            program = program_of([node], node.inputs, node.outputs, node.variables, self.values, self.training)
            self.values.update(zip(map(id, node.outputs), program.outputs, strict=True))

    def add(self, record: Recording, tensors: dict[int, Tensor], enclosing: _Enclosing) -> None:
        """Append the calls of a recording. `tensors` maps its tensors, by identity, to those of the graph."""
        for call in record.calls:
            # Keras also skips calls that it cannot compute.
            if enclosing.recorded and any(id(tensor) not in tensors for tensor in _symbols((call.args, call.kwargs))):
                continue
            args, kwargs = _replaced((call.args, call.kwargs), tensors)
            call = call._replace(args=args, kwargs=kwargs)  # noqa: PLW2901
            outputs = self._outputs(call, enclosing)
            tensors.update((id(old), new) for old, new in zip(call.outputs, outputs, strict=True))

    def _outputs(self, call: LayerCall, enclosing: _Enclosing) -> list[Tensor]:
        """Add one call, or everything inside it, to the graph. Returns its outputs."""
        index = self.counts[id(call.operation)]
        self.counts[id(call.operation)] += 1
        context: list[Training] = enclosing.context if enclosing.context is not None else [None]
        told = context[0] = _told(call, enclosing.training, context[0])
        if id(call.operation) in self.opening:
            outputs = self._opened(call, told, index, enclosing, context)
            if outputs is not None:
                return outputs
        nested = self._nested(call, told, context)
        if nested is not None:
            return self._inline(call, nested, index, enclosing)
        node = _leaf(call, index, enclosing, told)
        self._append(node)
        return list(node.outputs)

    def _opened(
        self, call: LayerCall, told: Training, index: int, enclosing: _Enclosing, context: list[Training]
    ) -> list[Tensor] | None:
        """Add everything inside the call of a layer to the graph. Returns its outputs, or None if it cannot be done."""
        layer = call.operation
        inner = _inside(call, index, enclosing, _Enclosing(None, False, context=list(context)))
        before, counts = len(self.nodes), self.counts.copy()
        try:
            found = opened(call, self.training if told == "as run" else told, self.values)
            with _as_reason():
                outputs = self._add_opened(layer, found, index, inner, enclosing)
                self._check_opened(_leaf(call, index, enclosing, told), found, outputs, self.nodes[before:])
        except CannotOpenError as error:
            self.refused[id(layer)] = layer, str(error)
            del self.nodes[before:]
            self.counts = counts
            return None
        assert inner.context is not None
        context[:] = inner.context
        self.traced = True
        return outputs

    def _add_opened(
        self, layer: keras.Layer, found: OpenedLayer, index: int, inner: _Enclosing, outer: _Enclosing
    ) -> list[Tensor]:
        inputs = tuple(_fresh(tensor) for tensor in found.record.inputs)
        entry = LayerEntry(layer, found.masked)
        self._append(Node(entry, (found.given,), {}, inputs, index, inner.within, inner.called_in, None))
        tensors = {id(old): new for old, new in zip(found.record.inputs, inputs, strict=True)}
        self.add(found.record, tensors, inner)
        outputs = [tensors[id(tensor)] for tensor in keras.tree.flatten(found.record.outputs)]
        if found.exit is None:
            return outputs
        masks, first = _replaced(found.exit, tensors)
        masked = tuple(map(_fresh, outputs))
        self._append(Node(LayerExit(layer), (outputs, masks, first), {}, masked, index, outer.within, None, None))
        return list(masked)

    def _check_opened(self, whole: Node, found: OpenedLayer, outputs: Sequence[Tensor], parts: Sequence[Node]) -> None:
        """Raise `CannotOpenError` unless the parts of a layer compute what the layer computes."""
        if len(outputs) != len(whole.outputs):
            raise CannotOpenError(f"its `call` returns {len(outputs)} tensors, but {len(whole.outputs)} were recorded")
        mode = whole.training, self.training, found.masked
        if mode in _checked.setdefault(whole.operation, set()):
            return
        in_one_piece, in_parts = (
            program_of(nodes, found.given, results, whole.variables, self.values, self.training).jaxpr
            for nodes, results in (([whole], whole.outputs), (parts, outputs))
        )
        if not same_program(in_one_piece, in_parts):
            raise CannotOpenError("it computes something else when it is run in parts")
        _checked[whole.operation].add(mode)

    def _nested(self, call: LayerCall, told: Training, context: list[Training]) -> _Nested | None:
        """What happens inside a call, or None if it does not call a model that can be looked into."""
        if can_be_inlined(call.operation):
            return _recorded(call, _Enclosing(told, True, context=context))
        if can_be_traced(call.operation):
            return self._traced(call, told, _Enclosing(None, False, context=context))
        return None

    def _traced(self, call: LayerCall, told: Training, enclosing: _Enclosing) -> _Nested | None:
        model, kwargs = call.operation, dict(call.kwargs)
        if graph_api.takes_training(model) and told is not None:
            kwargs["training"] = self.training if told == "as run" else told
        try:
            record = traced(model, call.args, kwargs)
        except (ValueError, RuntimeError):
            # The model can be run but not looked into, so it stays a single layer.
            return None
        if any(_has_unknown_sizes(inside) for inside in record.calls):
            return None
        self.traced = True
        return _Nested(record, (list(_symbols((call.args, kwargs))),), enclosing)

    def _inline(self, call: LayerCall, nested: _Nested, index: int, enclosing: _Enclosing) -> list[Tensor]:
        """Add the calls inside a nested model in place of the call of the model. Returns its outputs."""
        record = nested.record
        inner = _inside(call, index, enclosing, nested.enclosing)
        inputs = tuple(_fresh(tensor) for tensor in record.inputs)
        entry = Node(Entry(call.operation), nested.args, {}, inputs, index, inner.within, inner.called_in, None)
        self._append(entry)
        tensors = {id(old): new for old, new in zip(record.inputs, inputs, strict=True)}
        self.add(record, tensors, inner)
        return [tensors[id(tensor)] for tensor in keras.tree.flatten(record.outputs)]


@contextlib.contextmanager
def _as_reason() -> Iterator[None]:
    """Turn any error into a reason not to look into a layer."""
    try:
        yield
    except CannotOpenError:
        raise
    except Exception as error:
        raise CannotOpenError(f"its parts cannot be run one by one ({type(error).__name__})") from error


_checked: WeakKeyDictionary[keras.Layer, set[Any]] = WeakKeyDictionary()
"""The modes in which the parts of a layer are known to compute what the layer computes."""


def _leaf(call: LayerCall, index: int, enclosing: _Enclosing, told: Training) -> Node:
    """A call as one node."""
    outputs = tuple(_fresh(tensor) for tensor in call.outputs)
    stage = _first(enclosing.called_in, call.stage, _made_in(call.operation), enclosing.made_in)
    return Node(call.operation, call.args, call.kwargs, outputs, index, enclosing.within, stage, told)


def _inside(call: LayerCall, index: int, outer: _Enclosing, inner: _Enclosing) -> _Enclosing:
    """What the calls inside a call inherit, besides what `inner` says."""
    return inner._replace(
        within=(*outer.within, NestedCall(call.operation, index)),
        called_in=_first(outer.called_in, call.stage),
        made_in=_first(_made_in(call.operation), outer.made_in),
    )


class _Nested(NamedTuple):
    """What happens inside the call of a nested model."""

    record: Recording
    args: tuple[Any, ...]
    """The arguments of its `Entry`."""
    enclosing: _Enclosing


def _recorded(call: LayerCall, enclosing: _Enclosing) -> _Nested | None:
    """The inside of a model with a graph, or None if the call has arguments that such models do not take."""

    # `training` is already in `enclosing`.
    def plain(inputs: Tree, training: object = None, mask: Tree = None) -> _Nested:  # noqa: ARG001
        return _Nested(recorded(call.operation), (inputs, mask), enclosing)

    try:
        return plain(*call.args, **call.kwargs)
    except TypeError:
        return None


def _told(call: LayerCall, by_model: Training, before: Training) -> Training:
    """The mode of a call: its model's, else its own argument, else that of the call before, else its default."""
    if not isinstance(call.operation, keras.Layer):
        return before
    if by_model is not None:
        return by_model
    if "training" in call.kwargs:
        said: Training = call.kwargs["training"]
        return said
    return default_training(call.operation) if before is None else before


def _has_unknown_sizes(call: LayerCall) -> bool:
    """Whether an operation has a shape among its settings whose number of rows is unknown."""
    if isinstance(call.operation, keras.Layer):
        return False
    return any(isinstance(value, tuple | list) and None in value for value in vars(call.operation).values())


def _made_in(operation: keras.Operation) -> int | None:
    return stage_of(operation) if isinstance(operation, keras.Layer) else None


def _first(*stages: int | None) -> int | None:
    return next((stage for stage in stages if stage is not None), None)


def _fresh(tensor: Tensor) -> Tensor:
    return keras.KerasTensor(tensor.shape, tensor.dtype, sparse=tensor.sparse, name=tensor.name)


def _named(tensor: Tensor) -> Tensor:
    """A model's input under the name of its input layer, which users know from `model.summary()`."""
    fresh = _fresh(tensor)
    fresh.name = graph_api.input_name(tensor)
    return fresh


def _symbols(tree: Tree) -> Iterator[Tensor]:
    return (leaf for leaf in keras.tree.flatten(tree) if is_symbolic(leaf))


def _replaced(tree: Tree, tensors: dict[int, Tensor]) -> Any:
    return keras.tree.map_structure(lambda leaf: tensors[id(leaf)] if is_symbolic(leaf) else leaf, tree)
