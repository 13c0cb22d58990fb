"""The marks that a `PipelineStage` leaves: layers created, and calls made, inside one remember its stage."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

from openipu.engine.keras_compat import api as keras_api
from openipu.engine.keras_compat.patches import NODES, OPERATIONS

import keras

KerasNode = Any
"""A node of the graph that Keras records. Its class is not public."""
_STAGE, _OPENS = "_openipu_stage", "_openipu_opens_stages"
_marks = threading.local()
_marked = False


def stage_of(made: object) -> int | None:
    """The stage of the `PipelineStage` in which a layer or a node of a graph was created."""
    stage: int | None = vars(made).get(_STAGE)
    return stage


def any_stages() -> bool:
    """Whether anything in this process can have a stage."""
    return _marked


def current_stage() -> int | None:
    """The stage of the `PipelineStage` that is open in this thread."""
    stage: int | None = getattr(_marks, "stage", None)
    return stage


def marking(stage: int) -> contextlib.AbstractContextManager[None]:
    """While active, layers that this thread creates, and symbolic calls that it makes, are marked with `stage`."""
    global _marked
    _marked, model = True, keras_api.called_layer()
    if model is not None:
        vars(model)[_OPENS] = True
    return _marking(stage=stage)


def was_opened_by(model: keras.Model) -> bool:
    """Whether a `PipelineStage` was ever entered during a call of the model."""
    return _OPENS in vars(model)


def in_own_call() -> bool:
    """Whether a model created in a strategy's scope is being called, or anything is being traced."""
    tracing, model = keras_api.in_stateless_scope(), keras_api.called_layer()
    return tracing or (model is not None and "_ipu_session" in vars(model))


def recorded_nodes(nodes: list[KerasNode]) -> contextlib.AbstractContextManager[None]:
    """While active, nodes that this thread creates outside any layer's call are appended to `nodes`."""
    return _marking(nodes=nodes)


@contextlib.contextmanager
def _marking(**marks: Any) -> Iterator[None]:
    """While active, this thread has these marks."""
    before = dict(vars(_marks))
    with NODES.using(_mark_node, once=True), OPERATIONS.using(_mark_operation, once=True):
        vars(_marks).update(marks)
        try:
            yield
        finally:
            vars(_marks).clear()
            vars(_marks).update(before)


def _mark_node(init: Callable[..., None], node: KerasNode, *args: Any, **kwargs: Any) -> None:
    init(node, *args, **kwargs)
    _mark(node)
    if hasattr(_marks, "nodes") and not keras_api.in_layer_call():
        _marks.nodes.append(node)


def _mark_operation(init: Callable[..., None], operation: keras.Operation, *args: Any, **kwargs: Any) -> None:
    init(operation, *args, **kwargs)
    _mark(operation)


def _mark(made: object) -> None:
    if current_stage() is not None:
        vars(made)[_STAGE] = current_stage()
