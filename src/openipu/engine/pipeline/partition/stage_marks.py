"""What a `PipelineStage` leaves behind: layers and calls that were made inside one know its stage."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

from openipu.engine.keras_compat import api as keras_api
from openipu.engine.keras_compat.patches import NODES, OPERATIONS

_STAGE, _OPENS = "_openipu_stage", "_openipu_opens_stages"
_marks = threading.local()
_marked = False


def stage_of(made: Any) -> int | None:
    """The stage in whose `PipelineStage` a layer, or a node of a graph, was made."""
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
    """Until it is left, layers that this thread makes, and symbolic calls, get `stage`."""
    global _marked
    _marked, model = True, keras_api.called_layer()
    if model is not None:
        vars(model)[_OPENS] = True
    return _marking(stage=stage)


def was_opened_by(model: Any) -> bool:
    """Whether a `PipelineStage` was entered while the model was called."""
    return _OPENS in vars(model)


def in_own_call() -> bool:
    """Whether a model that was made in a strategy's scope is being called, or anything is being traced."""
    tracing, model = keras_api.in_stateless_scope(), keras_api.called_layer()
    return tracing or (model is not None and "_ipu_session" in vars(model))


def recorded_nodes(nodes: list[Any]) -> contextlib.AbstractContextManager[None]:
    """Until it is left, nodes that this thread makes outside of any layer's call are appended to `nodes`."""
    return _marking(nodes=nodes)


@contextlib.contextmanager
def _marking(**marks: Any) -> Iterator[None]:
    """Set marks of this thread."""
    before = dict(vars(_marks))
    with NODES.using(_mark_node, once=True), OPERATIONS.using(_mark_operation, once=True):
        vars(_marks).update(marks)
        try:
            yield
        finally:
            vars(_marks).clear()
            vars(_marks).update(before)


def _mark_node(init: Callable[..., None], node: Any, *args: Any, **kwargs: Any) -> None:
    init(node, *args, **kwargs)
    _mark(node)
    if hasattr(_marks, "nodes") and not keras_api.in_layer_call():
        _marks.nodes.append(node)


def _mark_operation(init: Callable[..., None], operation: Any, *args: Any, **kwargs: Any) -> None:
    init(operation, *args, **kwargs)
    _mark(operation)


def _mark(made: Any) -> None:
    if current_stage() is not None:
        vars(made)[_STAGE] = current_stage()
