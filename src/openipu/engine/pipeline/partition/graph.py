"""A Keras model as a flat graph: which calls it makes, in an order in which they can run.

Who does what: recorded_calls.py asks Keras what a model records (Functional, Sequential), traced_call.py traces its
`call` (subclassed models). Here, nested models are replaced by what they contain, so that a stage may begin or end
inside one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from openipu.engine.keras_compat import api as keras_api

import keras

from .recorded_calls import (
    LayerCall,
    Recording,
    can_be_inlined,
    can_be_traced,
    converted,
    default_training,
    has_graph,
    is_symbolic,
    recorded,
    replaces_call,
    standardized,
)
from .stage_marks import stage_of
from .traced_call import noted_inputs, traced

Tensor = Any
"""A `keras.KerasTensor`: stands for a value while nothing is computed."""


Training = bool | Literal["as run"] | None


class NestedCall(NamedTuple):
    """Call number `call` (from 0) of a nested model."""

    model: Any
    call: int


@dataclass(frozen=True, slots=True, eq=False)
class Node:
    """One call of a layer or of an operation of `keras.ops`."""

    operation: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: tuple[Tensor, ...]
    index: int
    """Which call of its operation this is, counted over the graph."""
    within: tuple[NestedCall, ...]
    """The nested models that it is part of, the outermost first."""
    stage: int | None
    """The stage that a `PipelineStage` gave it."""
    training: Training
    """The `training` argument that it is told: that of the run, or one that the model's own `call` decided."""

    @property
    def is_layer(self) -> bool:
        """Whether it is a layer, which has to be in some stage. Other nodes go where their inputs are."""
        return isinstance(self.operation, keras.Layer)

    @property
    def key(self) -> tuple[int, int]:
        """The same for the same call in another graph of the model."""
        return id(self.operation), self.index

    @property
    def inputs(self) -> list[Tensor]:
        """The tensors that it uses."""
        return [leaf for leaf in keras.tree.flatten((self.args, self.kwargs)) if is_symbolic(leaf)]

    @property
    def variables(self) -> list[Any]:
        """The variables that it uses: those of its layer, and those among its arguments."""
        leaves = keras.tree.flatten((self.args, self.kwargs))
        own = self.operation.variables if self.is_layer else []
        return [*own, *(leaf for leaf in leaves if isinstance(leaf, keras.Variable))]

    def __str__(self) -> str:
        name = "/".join([*(nested.model.name for nested in self.within), self.operation.name])
        return f"{name} (call {self.index})" if self.index else name


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Graph:
    """The calls of a model. A tensor is known by its identity; each is the output of one node, or an input."""

    model: Any
    nodes: tuple[Node, ...]
    inputs: tuple[Tensor, ...]
    outputs: Any
    """Tensors in the structure of the model's outputs."""
    traced: bool
    """Whether it comes from tracing `call`, so that it holds only for the shapes and the mode of the trace."""
    training: bool
    """The mode of the trace."""

    def sources(self) -> dict[int, list[Any]]:
        """For each node, by identity: the layers, or inputs, that it uses directly or through operations."""
        made: dict[int, list[Any]] = {id(tensor): [tensor] for tensor in self.inputs}
        found: dict[int, list[Any]] = {}
        for node in self.nodes:
            used = {id(source): source for tensor in node.inputs for source in made[id(tensor)]}
            found[id(node)] = list(used.values())
            made.update((id(t), [node.operation] if node.is_layer else found[id(node)]) for t in node.outputs)
        return found


@dataclass(frozen=True, slots=True)
class Entry:
    """Where a nested model takes its inputs in: they get the structure, dtype and rank that it wants."""

    model: Any

    @property
    def name(self) -> str:
        """For messages."""
        return f"{self.model.name}:inputs"

    def __call__(self, inputs: Any, mask: Any = None) -> list[Any]:
        """The flat inputs of the nested model's graph."""
        if not has_graph(self.model):
            return converted(self.model, inputs)
        values = standardized(self.model, inputs)
        for value, given in zip(values, [] if mask is None else keras.tree.flatten(mask), strict=False):
            if given is not None:
                keras_api.set_keras_mask(value, given)
        return values


def graph_of(model: Any, input_spec: Any = None, training: bool = False) -> Graph:
    """The graph of a built model.

    Args:
        model: A Functional, Sequential or subclassed Keras model.
        input_spec: Needed where the model's `call` has to be traced: the inputs, or anything in their structure with
            `shape` and `dtype`. Such a graph holds for these shapes. By default those of the model's first call.
        training: The mode in which `call` is traced.
    """
    if replaces_call(model):
        raise RuntimeError(
            f"Model {model.name!r} has a graph of layers and also a `call` of its own. A pipelined model has one of "
            "them: remove `call`, or write the whole model as a subclass of `keras.Model`."
        )
    known = has_graph(model)
    record = recorded(model) if known else _trace(model, input_spec, training)
    build = _Build(training)
    inputs = tuple(_fresh(tensor) for tensor in record.inputs)
    tensors = {id(tensor): new for tensor, new in zip(record.inputs, inputs, strict=True)}
    build.add(record, tensors, _Enclosing("as run" if known else None, known))
    traced = not known or build.traced
    return Graph(model, tuple(build.nodes), inputs, _replaced(record.outputs, tensors), traced, training)


def _trace(model: Any, spec: Any, training: bool) -> Recording:
    spec = spec if spec is not None else _noted(model)
    leaves = keras.tree.flatten(spec)
    names = sorted(spec) if isinstance(spec, dict) and len(spec) == len(leaves) else _numbered(len(leaves))
    flat = [keras.KerasTensor(a.shape, _dtype(a), name=name) for a, name in zip(leaves, names, strict=True)]
    symbols = keras.tree.pack_sequence_as(spec, flat)
    return traced(model, (symbols,), {"training": training} if keras_api.takes_training(model) else {})


def _numbered(count: int) -> list[str]:
    return ["inputs"] if count == 1 else [f"inputs_{i}" for i in range(count)]


def _noted(model: Any) -> Any:
    inputs = noted_inputs(model)
    if inputs is None:
        raise RuntimeError(
            f"The stages of model {model.name!r} are not known before it is built. Call the model on a batch, or train "
            "it without stages first."
        )
    return inputs


def _dtype(leaf: Any) -> str:
    return str(keras.backend.standardize_dtype(leaf.dtype))


class _Enclosing(NamedTuple):
    """What the calls inside a model take over from the call of that model."""

    training: Training
    """What a Functional model tells all its calls, even if they say something else. None leaves it to them."""
    recorded: bool
    """Whether these are the calls of a Functional model, which is more than those that can be computed."""
    within: tuple[NestedCall, ...] = ()
    called_in: int | None = None
    made_in: int | None = None
    context: list[Training] | None = None
    """What the call last made said about the mode: Keras hands it to the next one. None at the top, where each call
    begins anew."""


@dataclass(slots=True)
class _Build:
    training: bool
    nodes: list[Node] = field(default_factory=list)
    counts: Counter[int] = field(default_factory=Counter)
    traced: bool = False

    def add(self, record: Recording, tensors: dict[int, Tensor], enclosing: _Enclosing) -> None:
        """Append the calls of a recording. `tensors` maps what it calls its tensors to those of the graph."""
        for call in record.calls:
            # Keras leaves out what it cannot compute, too.
            if enclosing.recorded and any(id(tensor) not in tensors for tensor in _symbols((call.args, call.kwargs))):
                continue
            args, kwargs = _replaced((call.args, call.kwargs), tensors)
            call = call._replace(args=args, kwargs=kwargs)  # noqa: PLW2901
            outputs = self._outputs(call, enclosing)
            tensors.update((id(old), new) for old, new in zip(call.outputs, outputs, strict=True))

    def _outputs(self, call: LayerCall, enclosing: _Enclosing) -> list[Tensor]:
        index = self.counts[id(call.operation)]
        self.counts[id(call.operation)] += 1
        context: list[Training] = enclosing.context if enclosing.context is not None else [None]
        told = context[0] = _told(call, enclosing.training, context[0])
        nested = self._nested(call, told, context)
        if nested is not None:
            return self._inline(call, nested, index, enclosing)
        outputs = tuple(_fresh(tensor) for tensor in call.outputs)
        stage = _first(enclosing.called_in, call.stage, _made_in(call.operation), enclosing.made_in)
        self.nodes.append(Node(call.operation, call.args, call.kwargs, outputs, index, enclosing.within, stage, told))
        return list(outputs)

    def _nested(self, call: LayerCall, told: Training, context: list[Training]) -> _Nested | None:
        """What happens inside a call, if it is the call of a model that can be looked into."""
        if can_be_inlined(call.operation):
            return _recorded(call, _Enclosing(told, True, context=context))
        if can_be_traced(call.operation):
            return self._traced(call, told, _Enclosing(None, False, context=context))
        return None

    def _traced(self, call: LayerCall, told: Training, enclosing: _Enclosing) -> _Nested | None:
        model, kwargs = call.operation, dict(call.kwargs)
        if keras_api.takes_training(model) and told is not None:
            kwargs["training"] = self.training if told == "as run" else told
        try:
            record = traced(model, call.args, kwargs)
        except (ValueError, RuntimeError):
            # It can be run, but not looked into: it stays one layer.
            return None
        if any(_has_unknown_sizes(inside) for inside in record.calls):
            return None
        self.traced = True
        return _Nested(record, (list(_symbols((call.args, kwargs))),), enclosing)

    def _inline(self, call: LayerCall, nested: _Nested, index: int, enclosing: _Enclosing) -> list[Tensor]:
        """The calls inside a nested model in place of its own; gives its outputs."""
        record = nested.record
        inner = nested.enclosing._replace(
            within=(*enclosing.within, NestedCall(call.operation, index)),
            called_in=_first(enclosing.called_in, call.stage),
            made_in=_first(_made_in(call.operation), enclosing.made_in),
        )
        inputs = tuple(_fresh(tensor) for tensor in record.inputs)
        entry = Node(Entry(call.operation), nested.args, {}, inputs, index, inner.within, inner.called_in, None)
        self.nodes.append(entry)
        tensors = {id(old): new for old, new in zip(record.inputs, inputs, strict=True)}
        self.add(record, tensors, inner)
        return [tensors[id(tensor)] for tensor in keras.tree.flatten(record.outputs)]


class _Nested(NamedTuple):
    """The inside of a nested model's call."""

    record: Recording
    args: tuple[Any, ...]
    """What its `Entry` is called with."""
    enclosing: _Enclosing


def _recorded(call: LayerCall, enclosing: _Enclosing) -> _Nested | None:
    def plain(inputs: Any, training: Any = None, mask: Any = None) -> _Nested:  # noqa: ARG001 - it is in `enclosing`
        return _Nested(recorded(call.operation), (inputs, mask), enclosing)

    try:
        return plain(*call.args, **call.kwargs)
    except TypeError:
        return None


def _told(call: LayerCall, by_model: Training, before: Training) -> Training:
    """The mode of a call: what its model tells it, what it says itself, what the call before said, its default."""
    if not isinstance(call.operation, keras.Layer):
        return before
    if by_model is not None:
        return by_model
    if "training" in call.kwargs:
        said: Training = call.kwargs["training"]
        return said
    return default_training(call.operation) if before is None else before


def _has_unknown_sizes(call: LayerCall) -> bool:
    """Whether an operation was told a shape of which it was not known how many rows there will be."""
    if isinstance(call.operation, keras.Layer):
        return False
    return any(isinstance(value, tuple | list) and None in value for value in vars(call.operation).values())


def _made_in(operation: Any) -> int | None:
    return stage_of(operation) if isinstance(operation, keras.Layer) else None


def _first(*stages: int | None) -> int | None:
    return next((stage for stage in stages if stage is not None), None)


def _fresh(tensor: Tensor) -> Tensor:
    return keras.KerasTensor(tensor.shape, tensor.dtype, sparse=tensor.sparse, name=tensor.name)


def _symbols(tree: Any) -> Iterator[Tensor]:
    return (leaf for leaf in keras.tree.flatten(tree) if is_symbolic(leaf))


def _replaced(tree: Any, tensors: dict[int, Tensor]) -> Any:
    return keras.tree.map_structure(lambda leaf: tensors[id(leaf)] if is_symbolic(leaf) else leaf, tree)
