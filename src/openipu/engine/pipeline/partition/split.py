"""A graph and a stage for each node -> stages that run one after another.

Tensors that skip stages travel through all boundaries in between. The model's inputs do not travel: every stage reads
them from the micro-batch. A variable belongs to the first stage that uses it; later stages borrow it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from openipu.engine.keras_compat import api as keras_api
from openipu.engine.keras_compat import graph_api
from openipu.engine.keras_compat.patches import BATCH_MOMENTS, RANDOM_FUNCTIONS
from openipu.engine.types import Array, Tree

import keras

from .graph import graph_of
from .nodes import Entry, Graph, Node, Tensor
from .recorded_calls import standardized
from .run_nodes import run_node, with_values
from .shared_seeds import own_seeds

Boundary = tuple[tuple[Array, Array | None], ...]
"""The values that go from one stage to the next, each with its mask or None, in the order of `Stage.sends`."""


@dataclass(frozen=True, slots=True, eq=False)
class Stage:
    """One slice of a model."""

    index: int
    last: bool
    graph: Graph
    nodes: tuple[Node, ...]
    receives: tuple[Tensor, ...]
    """What comes from the stage before: all earlier tensors that this or a later stage needs."""
    sends: tuple[Tensor, ...]
    """What goes to the next stage. Empty in the last stage, which returns the model's outputs."""
    layers: tuple[keras.Layer, ...]
    """Layers that are called here and in no earlier stage."""
    variables: tuple[keras.Variable, ...]
    """Variables that live here. Those that no stage uses live in the last stage, where the loss may use them."""
    borrows: tuple[keras.Variable, ...]
    """Variables of earlier stages that are used here (tied weights)."""
    later: tuple[keras.Layer, ...]
    """Layers and nested models whose calls begin in later stages."""
    seeds: tuple[keras.Variable, ...]
    """Non-trainable variables that other stages use too. Seeds of shared random layers are among them."""
    cut: tuple[int, ...]
    """The stage of each node of the graph."""


def run_stage(
    stage: Stage, boundary: Boundary, inputs: Tree, training: bool, apart: Sequence[keras.Variable] = ()
) -> Tree:
    """Run one stage. Returns the boundary to the next stage or, from the last stage, the model's outputs.

    It reads and writes variables through the `keras.StatelessScope` around it. Random layers that several stages share
    draw the same numbers as on one device.

    Args:
        stage: What to run.
        boundary: What the stage before returned; empty in the first stage.
        inputs: The inputs of the model for this micro-batch.
        training: The mode.
        apart: Variables that stages on other devices use, too. Seeds may be among them; if the stage changes another
            one, an error is raised, because each device has its own copy.
    """
    flat = standardized(stage.graph.model, inputs)
    stage = _for_shapes(stage, inputs, flat)
    graph = stage.graph
    values = dict(zip(map(id, graph.inputs), flat, strict=True))
    for tensor, (value, mask) in zip(stage.receives, boundary, strict=True):
        if mask is not None:
            keras_api.set_keras_mask(value, mask)
        values[id(tensor)] = value
    before = [_current(v) for v in apart]
    with own_seeds(graph, stage.cut, stage.index, stage.seeds, flat, training) as seeds:
        for node in stage.nodes:
            run_node(node, values, training)
    for variable, value in zip(apart, before, strict=True):
        if id(variable) not in seeds and _current(variable) is not value:
            raise ValueError(
                f"Stage {stage.index} changes {variable.path!r}, which a stage on another device uses, too. Put both "
                "stages on one device with `device_mapping`, or use a separate layer in each stage."
            )
    # Keras would drop these losses when it makes the later calls, if the model ran in one piece. See [Note: losses of
    # calls].
    for layer in stage.later:
        graph_api.clear_losses(layer)
    if stage.last:
        return with_values(graph.outputs, values)
    sent = (values[id(tensor)] for tensor in stage.sends)
    return tuple((value, keras_api.get_keras_mask(value)) for value in sent)


def _current(variable: keras.Variable) -> Array:
    """The value of a variable in the scope that is open."""
    scope = keras_api.stateless_scope()
    assert scope is not None
    value: Array = scope.get_current_value(variable)
    return value


_variants: WeakKeyDictionary[Graph, dict[Any, tuple[Stage, ...]]] = WeakKeyDictionary()


def _for_shapes(stage: Stage, inputs: Tree, flat: Sequence[Array]) -> Stage:
    """The same stage, traced again if its trace is for inputs of other shapes (a last, smaller batch)."""
    graph = stage.graph
    if not graph.traced or all(_fits(tensor, value) for tensor, value in zip(graph.inputs, flat, strict=True)):
        return stage
    shapes = tuple((tuple(value.shape), str(value.dtype)) for value in flat)
    variants = _variants.setdefault(graph, {})
    if shapes not in variants:
        # In a program, but about shapes alone: the axis of the replicas does not exist in Keras' own tracing.
        with RANDOM_FUNCTIONS.suspended(), BATCH_MOMENTS.suspended():
            again = graph_of(graph.model, inputs, graph.training, graph.opening)
        if [node.key for node in again.nodes if node.is_layer] != [n.key for n in graph.nodes if n.is_layer]:
            raise ValueError(
                f"`call` of model {graph.model.name!r} uses other layers for inputs {shapes} than for "
                f"{tuple((t.shape, t.dtype) for t in graph.inputs)}. Use the same layers for all inputs."
            )
        known = {node.key: s for node, s in zip(graph.nodes, stage.cut, strict=True)}
        variants[shapes] = split(again, [known.get(node.key, node.stage) for node in again.nodes])
    return variants[shapes][stage.index]


def _fits(traced: Tensor, value: Array) -> bool:
    same = len(traced.shape) == len(value.shape) and keras.backend.standardize_dtype(value.dtype) == traced.dtype
    return same and all(a in (None, b) for a, b in zip(traced.shape, value.shape, strict=True))


# --- stages of nodes -------------------------------------------------------------------------------------------------


def complete(graph: Graph, stages: Sequence[int | None]) -> tuple[int, ...]:
    """A stage for every node. An operation without one goes to the latest stage that computes any of its inputs.

    An operation that uses only the model's inputs and variables goes where it is used. Layers must have a stage.
    """
    missing = [node for node, stage in zip(graph.nodes, stages, strict=True) if node.is_layer and stage is None]
    if missing:
        raise ValueError(
            f"All layers of a pipelined model need a stage, but {_names(missing)} of model {graph.model.name!r} "
            f"{'has' if len(missing) == 1 else 'have'} none. Create or call every layer inside a `PipelineStage`, or "
            "use `set_pipeline_stage_assignment`."
        )
    made: dict[int, int] = {}
    done: list[int] = []
    for node, stage in zip(graph.nodes, stages, strict=True):
        latest = max((made[id(tensor)] for tensor in node.inputs if id(tensor) in made), default=None)
        done.append(stage if stage is not None else _FREE if latest is None else latest)
        # What depends on inputs, variables and constants alone may be computed in any stage.
        made.update((id(tensor), done[-1]) for tensor in node.outputs if done[-1] != _FREE)
    return _late(graph, stages, done)


_FREE = -2
"""The stage of a node that may run in any stage."""


def _late(graph: Graph, given: Sequence[int | None], stages: list[int]) -> tuple[int, ...]:
    """Put free nodes, and conversions of a nested model's inputs, where they are first used.

    So later stages read inputs and variables themselves, and converted tensors do not travel, only their originals do.
    """
    last = max(stages, default=0)
    uses: dict[int, int] = {}
    for i in reversed(range(len(stages))):
        node = graph.nodes[i]
        if given[i] is None and (stages[i] == _FREE or isinstance(node.operation, Entry)):
            first = min((uses[id(t)] for t in node.outputs if id(t) in uses), default=last)
            stages[i] = max(first, 0)
        for tensor in node.inputs:
            uses[id(tensor)] = min(stages[i], uses.get(id(tensor), last))
    return tuple(stages)


def check(graph: Graph, stages: Sequence[int]) -> None:
    """Raise if these stages cannot run one after another."""
    name, present, last = graph.model.name, set(stages), max(stages, default=0)
    if min(present, default=0) < 0:
        raise ValueError(f"Model {name!r} has a layer in stage {min(present)}. Number the stages from 0.")
    missing = [stage for stage in range(last) if stage not in present]
    if missing:
        raise RuntimeError(
            f"Every stage of a pipeline needs a layer, but model {name!r} has stages up to {last} with nothing in "
            f"{_stages(missing)}. Number the stages 0, 1, 2, ... without gaps."
        )
    if last == 0:
        raise ValueError(
            f"A pipeline has at least 2 stages, but all layers of model {name!r} are in stage 0. Assign some of them "
            "to stage 1, or run the model without pipelining."
        )
    check_order(graph, stages)


def check_order(graph: Graph, stages: Sequence[int]) -> None:
    """Raise if a node uses an output of a later stage."""
    made = {id(t): (n, s) for n, s in zip(graph.nodes, stages, strict=True) for t in n.outputs}
    for node, stage in zip(graph.nodes, stages, strict=True):
        for tensor in node.inputs:
            source, at = made.get(id(tensor), (None, 0))
            if at > stage:
                raise ValueError(
                    f"Layer {str(node)!r} in stage {stage} uses the output of {str(source)!r}, which is computed "
                    f"later, in stage {at}. A layer can only use what its own and earlier stages compute: move "
                    f"{str(node)!r} to stage {at} or later, or {str(source)!r} to stage "
                    f"{'0' if stage == 0 else f'{stage} or earlier'}."
                )


def _names(nodes: Sequence[Node]) -> str:
    shown = ", ".join(repr(str(node)) for node in nodes[:5])
    return shown if len(nodes) <= 5 else f"{shown} and {len(nodes) - 5} more"


def _stages(stages: Sequence[int]) -> str:
    return f"stage {stages[0]}" if len(stages) == 1 else f"stages {', '.join(map(str, stages))}"


# --- stages ----------------------------------------------------------------------------------------------------------


def split(graph: Graph, stages_of_nodes: Sequence[int | None]) -> tuple[Stage, ...]:
    """The stages of a graph. `stages_of_nodes` has a stage for each node, or None for operations."""
    stages = complete(graph, stages_of_nodes)
    check(graph, stages)
    count = max(stages) + 1
    nodes = [tuple(n for n, s in zip(graph.nodes, stages, strict=True) if s == stage) for stage in range(count)]
    boundaries = _boundaries(graph, nodes)
    used = [_distinct(v for node in part for v in node.variables) for part in nodes]
    layers = [_distinct(node.operation for node in part if node.is_layer) for part in nodes]
    begins = _begins(graph, stages)
    everywhere = _distinct(v for part in used for v in part)
    uses = Counter(id(v) for part in used for v in part)
    unused = _without(graph.model.variables, everywhere)
    parts = []
    for i in range(count):
        before = [v for part in used[:i] for v in part]
        own = _without(used[i], before)
        parts.append(Stage(
            index=i,
            last=i == count - 1,
            graph=graph,
            nodes=nodes[i],
            receives=boundaries[i],
            sends=boundaries[i + 1],
            layers=_without(layers[i], [layer for part in layers[:i] for layer in part]),
            # Loss and metrics run in the last stage and may use layers that `call` does not.
            variables=(*own, *unused) if i == count - 1 else own,
            borrows=_without(used[i], own),
            later=_distinct(layer for layer, begin in begins.values() if begin > i),
            seeds=tuple(v for v in used[i] if not v.trainable and uses[id(v)] > 1),
            cut=stages,
        ))  # fmt: skip
    return tuple(parts)


def _begins(graph: Graph, stages: Sequence[int]) -> dict[tuple[int, int], tuple[keras.Layer, int]]:
    """The layer, and the stage of the first part, of each call that is not inside another."""
    found: dict[tuple[int, int], tuple[keras.Layer, int]] = {}
    for node, stage in zip(graph.nodes, stages, strict=True):
        if node.is_layer:
            layer, call = node.within[0] if node.within else (node.operation, node.index)
            _, before = found.get((id(layer), call), (layer, stage))
            found[id(layer), call] = layer, min(stage, before)
    return found


def _boundaries(graph: Graph, nodes: Sequence[Sequence[Node]]) -> list[tuple[Tensor, ...]]:
    """What each stage receives, in the order in which it is computed, plus an empty boundary after the last stage."""
    needed_until = {id(tensor): len(nodes) - 1 for tensor in keras.tree.flatten(graph.outputs)}
    for stage, part in enumerate(nodes):
        for node in part:
            for tensor in node.inputs:
                needed_until[id(tensor)] = max(stage, needed_until.get(id(tensor), 0))
    made = [(stage, tensor) for stage, part in enumerate(nodes) for node in part for tensor in node.outputs]
    return [
        tuple(tensor for at, tensor in made if at < stage <= needed_until.get(id(tensor), -1))
        for stage in range(len(nodes) + 1)
    ]


def _distinct(items: Iterable[Any]) -> tuple[Any, ...]:
    return tuple({id(item): item for item in items}.values())


def _without(items: Iterable[Any], others: Iterable[Any]) -> tuple[Any, ...]:
    known = {id(item) for item in others}
    return tuple(item for item in _distinct(items) if id(item) not in known)
