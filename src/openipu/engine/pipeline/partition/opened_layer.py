"""Looks into a layer that is made of other layers: traces its `call`, so that a stage may begin or end inside it.

Around `call`, Keras converts the inputs, fills in masks, and gives the outputs their masks. A `LayerEntry` and a
`LayerExit` do that for a layer that is run in parts. What its `call` does must be calls of layers and operations of
`keras.ops`, as in a subclassed model. `graph.py` also checks that the parts compute what the layer computes
(same_program.py); otherwise the layer stays in one piece.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from openipu.engine.keras_compat import api as keras_api
from openipu.engine.keras_compat import graph_api
from openipu.engine.types import Tree

import keras

from .nodes import Tensor
from .recorded_calls import LayerCall, Recording, converted, is_symbolic
from .run_nodes import Value
from .traced_call import traced


class CannotOpenError(Exception):
    """A layer has to stay in one piece. The message says why."""


class OpenedLayer(NamedTuple):
    """What happens inside one call of a layer."""

    record: Recording
    """Its inputs are the tensors of `given`, then the masks of those in `masked`."""
    given: list[Tensor]
    """The tensors of the graph that the call uses."""
    masked: tuple[int, ...]
    """The numbers of the given tensors that have a mask."""
    exit: tuple[Tree, Tree] | None
    """The mask and, if the layer computes masks itself, the inputs that the masks of the outputs come from."""


def has_parts(operation: keras.Operation) -> bool:
    """Whether an operation is a layer that calls other layers."""
    return isinstance(operation, keras.Layer) and bool(keras_api.all_layers(operation, itself=False))


def opened(call: LayerCall, training: bool | None, values: Mapping[int, Value]) -> OpenedLayer:
    """What happens inside the call of a layer. Raise `CannotOpenError` if it cannot be told.

    Args:
        call: A call with tensors of the graph.
        training: The mode in which the layer is called.
        values: The shapes of the graph's tensors, and of their masks, by identity.
    """
    layer = call.operation
    _check(layer)
    given = list({id(t): t for t in keras.tree.flatten((call.args, call.kwargs)) if is_symbolic(t)}.values())
    symbols = {id(tensor): _symbol(layer, values[id(tensor)]) for tensor in given}
    masked = tuple(i for i, tensor in enumerate(given) if values[id(tensor)].mask is not None)
    args, kwargs = _converted((call.args, call.kwargs), layer, symbols)
    kwargs.pop("training", None)
    if graph_api.takes_training(layer) and training is not None:
        kwargs["training"] = training
    found = graph_api.with_masks(layer, args, kwargs)
    with _unchanged(layer):
        record = _traced(layer, found)
    inputs = [symbols[id(tensor)] for tensor in given]
    inputs += [keras_api.get_keras_mask(inputs[i]) for i in masked]
    record = record._replace(inputs=inputs)
    _check_record(record)
    return OpenedLayer(record, given, masked, _exit(layer, found))


def _check(layer: keras.Layer) -> None:
    if not has_parts(layer):
        raise CannotOpenError("it has no layers inside")
    if not graph_api.can_be_replayed(layer):
        raise CannotOpenError("it is quantized, recomputed or takes its inputs unconverted")
    if layer.activity_regularizer is not None:
        raise CannotOpenError("it has an activity regularizer")


def _symbol(layer: keras.Layer, value: Value) -> Tensor:
    """A symbol for an input as the layer's `call` sees it."""
    if value.value is None:
        raise CannotOpenError("one of its inputs is None")
    [symbol] = converted(layer, [keras.KerasTensor(value.value.shape, str(value.value.dtype))])
    fresh = keras.KerasTensor(symbol.shape, symbol.dtype)
    if value.mask is not None:
        keras_api.set_keras_mask(fresh, keras.KerasTensor(value.mask.shape, str(value.mask.dtype)))
    return fresh


def _converted(tree: Tree, layer: keras.Layer, symbols: dict[int, Tensor]) -> Any:
    def convert(leaf: Any) -> Any:
        if is_symbolic(leaf):
            return symbols[id(leaf)]
        return leaf if isinstance(leaf, keras.Variable) else converted(layer, [leaf])[0]

    return keras.tree.map_structure(convert, tree)


def _traced(layer: keras.Layer, found: graph_api.CallArguments) -> Recording:
    try:
        return traced(layer, found.args, found.kwargs)
    except (ValueError, RuntimeError) as error:
        reason = error.__cause__ or error
        first = (str(reason).strip().splitlines() or [type(reason).__name__])[0]
        raise CannotOpenError(f"its `call` cannot be traced ({first.split('. ')[0].rstrip('.')})") from error


class _unchanged:  # noqa: N801 - used like a function
    """Raise `CannotOpenError` when the block ends if it has changed attributes of the layer, which are set back."""

    def __init__(self, layer: keras.Layer) -> None:
        self._layer, self._before = layer, dict(vars(layer))
        self._contents = {name: _contents(value) for name, value in self._before.items()}

    def __enter__(self) -> None:
        pass

    def __exit__(self, *error: object) -> None:
        own = vars(self._layer)
        changed = [name for name, value in own.items() if value is not self._before.get(name, own)]
        changed += [name for name, before in self._contents.items() if _contents(self._before[name]) != before]
        own.clear()
        own.update(self._before)
        if changed:
            raise CannotOpenError(f"its `call` sets the attribute {changed[0]!r}")


def _contents(value: object) -> list[int] | None:
    """What a list or dictionary holds, by identity."""
    if isinstance(value, dict):
        return [*map(id, value.keys()), *map(id, value.values())]
    return list(map(id, value)) if isinstance(value, list | set) else None


def _check_record(record: Recording) -> None:
    known = set(map(id, record.inputs))
    for call in record.calls:
        if any(id(tensor) not in known for tensor in _symbols((call.args, call.kwargs))):
            raise CannotOpenError(f"{call.operation.name!r} inside it uses a mask, or a value from another call")
        known.update(map(id, call.outputs))
    if any(id(tensor) not in known for tensor in _symbols(record.outputs)):
        raise CannotOpenError("it returns a mask, or a value from another call")
    if sum(isinstance(call.operation, keras.Layer) for call in record.calls) < 1:
        raise CannotOpenError("its `call` calls no layer")


def _symbols(tree: Tree) -> Iterator[Tensor]:
    return (leaf for leaf in keras.tree.flatten(tree) if is_symbolic(leaf))


def _exit(layer: keras.Layer, found: graph_api.CallArguments) -> tuple[Tree, Tree] | None:
    """The arguments of a `LayerExit`, or None if the outputs get no masks from outside."""
    if not layer.supports_masking:
        return None
    own = graph_api.computes_masks(layer)
    if not own and all(mask is None for mask in keras.tree.flatten(found.previous_mask)):
        return None
    return found.previous_mask, found.first if own else None
