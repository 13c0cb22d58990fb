"""A Keras model as a flat graph: the calls it makes, in an order in which they can run.

Who does what: nodes.py has the values that a graph is made of. recorded_calls.py reads the graph that Keras records
(Functional and Sequential models), and traced_call.py traces `call` (subclassed models). This file replaces nested
models by what they contain, so that a stage may begin or end inside one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from openipu.engine.keras_compat import api as keras_api
from openipu.engine.types import Tree

import jax
import keras

from .nodes import Entry, Graph, NestedCall, Node, Tensor, Training
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
)
from .stage_marks import stage_of
from .traced_call import noted_inputs, traced


def graph_of(model: keras.Model, input_spec: Tree = None, training: bool = False) -> Graph:
    """The graph of a built model.

    Args:
        model: A Functional, Sequential or subclassed Keras model.
        input_spec: Used if the model's `call` has to be traced: the inputs, or anything in their structure with `shape`
            and `dtype`. The graph is valid for these shapes. The default is the inputs of the model's first call.
        training: The mode in which `call` is traced.
    """
    if replaces_call(model):
        raise RuntimeError(
            f"Model {model.name!r} has both a graph of layers and a `call` of its own, but a pipelined model can only "
            "have one of them. Remove `call`, or write the whole model as a subclass of `keras.Model`."
        )
    known = has_graph(model)
    record = recorded(model) if known else _trace(model, input_spec, training)
    build = _Build(training)
    inputs = tuple(map(_named, record.inputs) if known else map(_fresh, record.inputs))
    tensors = {id(tensor): new for tensor, new in zip(record.inputs, inputs, strict=True)}
    build.add(record, tensors, _Enclosing("as run" if known else None, known))
    traced = not known or build.traced
    return Graph(model, tuple(build.nodes), inputs, _replaced(record.outputs, tensors), traced, training)


def _trace(model: keras.Model, spec: Tree, training: bool) -> Recording:
    spec = spec if spec is not None else _noted(model)
    leaves = keras.tree.flatten(spec)
    names = sorted(spec) if isinstance(spec, dict) and len(spec) == len(leaves) else _numbered(len(leaves))
    flat = [keras.KerasTensor(a.shape, _dtype(a), name=name) for a, name in zip(leaves, names, strict=True)]
    symbols = keras.tree.pack_sequence_as(spec, flat)
    return traced(model, (symbols,), {"training": training} if keras_api.takes_training(model) else {})


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
    nodes: list[Node] = field(default_factory=list)
    counts: Counter[int] = field(default_factory=Counter)
    traced: bool = False

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
        nested = self._nested(call, told, context)
        if nested is not None:
            return self._inline(call, nested, index, enclosing)
        outputs = tuple(_fresh(tensor) for tensor in call.outputs)
        stage = _first(enclosing.called_in, call.stage, _made_in(call.operation), enclosing.made_in)
        self.nodes.append(Node(call.operation, call.args, call.kwargs, outputs, index, enclosing.within, stage, told))
        return list(outputs)

    def _nested(self, call: LayerCall, told: Training, context: list[Training]) -> _Nested | None:
        """What happens inside a call, or None if it does not call a model that can be looked into."""
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
            # The model can be run but not looked into, so it stays a single layer.
            return None
        if any(_has_unknown_sizes(inside) for inside in record.calls):
            return None
        self.traced = True
        return _Nested(record, (list(_symbols((call.args, kwargs))),), enclosing)

    def _inline(self, call: LayerCall, nested: _Nested, index: int, enclosing: _Enclosing) -> list[Tensor]:
        """Add the calls inside a nested model in place of the call of the model. Returns its outputs."""
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
    fresh.name = keras_api.input_name(tensor)
    return fresh


def _symbols(tree: Tree) -> Iterator[Tensor]:
    return (leaf for leaf in keras.tree.flatten(tree) if is_symbolic(leaf))


def _replaced(tree: Tree, tensors: dict[int, Tensor]) -> Any:
    return keras.tree.map_structure(lambda leaf: tensors[id(leaf)] if is_symbolic(leaf) else leaf, tree)
