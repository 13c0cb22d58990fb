"""The stage of each layer call of a model, as a value that is saved with the model.

Stages come from one of two places: a table that `set_pipeline_stage_assignment` put into the model's options, or the
`PipelineStage` scopes in which layers were created or called. The table wins. An empty table means "not pipelined".
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from openipu.engine.core.options import CLOSED, Opening
from openipu.engine.keras_compat.api import all_layers
from openipu.engine.keras_compat.build_model import is_built
from openipu.engine.keras_compat.graph_api import nodes_of
from openipu.engine.types import Tree

import keras

from .graph import graph_of
from .nodes import Graph, NestedCall, Node
from .recorded_calls import can_be_inlined, functional_of, has_graph
from .split import Stage, split
from .stage_marks import any_stages, stage_of, was_opened_by

Stages = tuple[tuple[str, int], ...]
"""The name and the stage of each layer call, in the order of `layer_calls`."""


def graph_for_stages(model: keras.Model, input_spec: Tree = None, opening: Opening = CLOSED) -> Graph | None:
    """The graph whose layer calls get stages, or None for a Sequential model that is not built."""
    if isinstance(model, keras.Sequential) and not has_graph(model):
        return None
    return graph_of(model, input_spec, True, opening)


def layer_calls(model: keras.Model, graph: Graph | None) -> tuple[Node, ...]:
    """All layer calls in the order in which they run, including those inside nested models.

    The calls of a Sequential model are known before it has a graph; their nodes have no tensors.
    """
    if graph is None:
        return tuple(_chain(model, (), Counter()))
    return tuple(node for node in graph.nodes if node.is_layer)


def _chain(model: keras.Sequential, within: tuple[NestedCall, ...], counts: Counter[int]) -> Iterator[Node]:
    for layer in model.layers:
        index = counts[id(layer)]
        counts[id(layer)] += 1
        inside = (*within, NestedCall(layer, index))
        if isinstance(layer, keras.Sequential) and not has_graph(layer):
            yield from _chain(layer, inside, counts)
        elif can_be_inlined(layer):
            for node in layer_calls(layer, graph_for_stages(layer)):
                number = counts[id(node.operation)]
                counts[id(node.operation)] += 1
                yield _bare(node.operation, number, (*inside, *node.within), node.stage)
        else:
            yield _bare(layer, index, within, stage_of(layer))


def _bare(layer: keras.Layer, index: int, within: tuple[NestedCall, ...], stage: int | None) -> Node:
    return Node(layer, (), {}, (), index, within, stage, None)


def is_pipelined(model: keras.Model, stages: Stages | None) -> bool:
    """Whether the model has stages. `stages` is the table in its options."""
    if stages is not None:
        return bool(stages)
    return _has_marks(model) or _opens_stages(model)


def _has_marks(model: keras.Model) -> bool:
    """Whether a layer of the model was created, or a call of its graph recorded, inside a `PipelineStage`."""
    if not any_stages():
        return False
    layers = all_layers(model, itself=False)
    graphs = [functional_of(part) for part in (model, *layers) if isinstance(part, keras.Model)]
    nodes = [node for graph in graphs if graph is not None for node in nodes_of(graph)]
    return any(stage_of(made) is not None for made in (*layers, *nodes))


def _opens_stages(model: keras.Model) -> bool:
    """Whether the `call` of a subclassed model enters a `PipelineStage`; a guess if it has not been called yet."""
    if was_opened_by(model) or has_graph(model):
        return was_opened_by(model)
    return not is_built(model) and any(_names_stages(type(layer).call) for layer in all_layers(model))


def _names_stages(function: Callable[..., Any]) -> bool:
    """Whether a function mentions `PipelineStage`, under whatever name it was imported."""
    names = getattr(getattr(function, "__code__", None), "co_names", ())
    known = (getattr(function.__globals__.get(name), "__name__", name) for name in names)
    return "PipelineStage" in known


def current_stages(calls: Sequence[Node], stages: Stages | None, model: keras.Model) -> list[int | None]:
    """The stage of each layer call, or None for a call that has no stage yet."""
    if not stages:
        return [None if stages is not None else node.stage for node in calls]
    check_table(calls, stages, model)
    return [stage for _, stage in stages]


def check_table(calls: Sequence[Node], stages: Stages, model: keras.Model) -> None:
    """Raise if the model has changed since the table was made."""
    names, known = [node.operation.name for node in calls], [name for name, _ in stages]
    # The layers of a subclassed model may get other names when the model is created again.
    has_names = isinstance(model, keras.Sequential) or has_graph(model)
    if len(names) != len(known) or (has_names and names != known):
        raise RuntimeError(
            f"The stages of model {model.name!r} are no longer valid: they were set for the {len(known)} layer calls "
            f"{', '.join(known)}, but it has {len(names)}: {', '.join(names)}. Set them again with "
            "`set_pipeline_stage_assignment`, or call `reset_pipeline_stage_assignment`."
        )


def stages_of_nodes(graph: Graph, stages: Stages | None, input_spec: Tree = None) -> list[int | None]:
    """The stage of each node of a graph, or None for operations, which follow their inputs."""
    model = graph.model
    if stages is None:
        return [node.stage for node in graph.nodes]
    same = graph.training or not (graph.traced or graph.opening.layers)
    calls = layer_calls(model, graph if same else graph_for_stages(model, input_spec, graph.opening))
    found = zip(calls, current_stages(calls, stages, model), strict=True)
    known = {node.key: stage for node, stage in found}
    return [known.get(node.key, node.stage) for node in graph.nodes]


def stages_of_model(
    model: keras.Model,
    stages: Stages | None,
    input_spec: Tree = None,
    training: bool = False,
    opening: Opening = CLOSED,
) -> tuple[Stage, ...]:
    """The model cut into stages, ready to run.

    Args:
        model: A built model.
        stages: The table in its options.
        input_spec: The inputs of one micro-batch, or anything in their structure with `shape` and `dtype`.
        training: The mode in which the `call` of a subclassed model is traced.
        opening: The layers that the table looks into.
    """
    graph = graph_of(model, input_spec, training, opening)
    return split(graph, stages_of_nodes(graph, stages, input_spec))
