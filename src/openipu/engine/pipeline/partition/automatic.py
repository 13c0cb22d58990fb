"""Automatic stages: the best cut of a model, looking into layers where the stages cannot be balanced otherwise.

A layer that is made of other layers is one layer at first. If it keeps the stages from being even, it is opened like a
nested model (opened_layer.py). In the end, only layers that a cut goes through stay open.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

from openipu import _validate as validate
from openipu.engine.core.options import CLOSED, Opening
from openipu.engine.keras_compat import api as keras_api
from openipu.engine.types import Tree

import keras

from .balance import Balance, best_cut
from .costs import input_shapes
from .graph import graph_of
from .nodes import Graph, NestedCall
from .opened_layer import has_parts
from .recorded_calls import has_graph

EVEN = 0.9
"""Stages with this balance are good enough not to look into more layers."""
GAIN = 0.95
"""Looking into a layer is worth it if a tick then takes at most this share of the time it took before."""
ROUNDS = 8
"""How often layers are chosen to be looked into."""
UNEVEN = 0.3
"""A cut that gains less than this share of what S stages could gain over one device is worth a warning."""


def balanced(model: keras.Model, stages: int | None, inputs: Tree = None) -> Balance:
    """The best cut of a model into `stages` stages. `inputs` is a micro-batch, or its shapes and dtypes.

    Warn if even the best cut is bad.
    """
    stages = validate.count("stages", stages, least=2)
    if isinstance(model, keras.Sequential) and not has_graph(model):
        raise RuntimeError(
            f"Model {model.name!r} has not been built, so the costs of its layers are unknown. Give it a "
            "`keras.Input`, or call `model.build(input_shape)` first."
        )
    refused: dict[int, str] = {}
    while True:
        best = _search(model, stages, inputs, refused)
        # A layer has to be cut in the same places in every mode.
        otherwise = graph_of(model, inputs, False, best.opening).refused if best.opening.layers else ()
        if not otherwise:
            break
        refused |= {id(layer): reason for layer, reason in otherwise}
    _warn_if_uneven(model, best, refused)
    return best


def _search(model: keras.Model, stages: int, inputs: Tree, refused: dict[int, str]) -> Balance:
    """The best cut. `refused` has layers, by identity, that cannot be looked into, and why. More may be added."""
    graph = graph_of(model, inputs, training=True)
    shapes = input_shapes(graph, inputs)
    opened: dict[int, keras.Layer] = {}
    best = current = best_cut(graph, shapes, stages)
    for _ in range(ROUNDS):
        chosen = _to_open(graph, current, {*opened, *refused})
        if not chosen:
            break
        opened |= {id(layer): layer for layer in chosen}
        graph = graph_of(model, inputs, True, _opening(model, opened.values(), shapes))
        refused |= {id(layer): reason for layer, reason in graph.refused}
        current = best_cut(graph, shapes, stages)
        if best is None or (current is not None and current.tick < GAIN * best.tick):
            best = current
    if best is None:
        raise ValueError(_too_few(model, sum(node.is_layer for node in graph.nodes), stages))
    return _closed_again(model, inputs, best, shapes)


def _too_few(model: keras.Model, layers: int, stages: int) -> str:
    calls = "1 layer call" if layers == 1 else f"{layers} layer calls"
    remedy = "It cannot be pipelined." if layers < 2 else f"Use at most {layers} stages."
    return f"Model {model.name!r} has {calls}, too few for {stages} stages. {remedy}"


def _to_open(graph: Graph, cut: Balance | None, tried: set[int]) -> list[keras.Layer]:
    """The layers to look into next: those that cost more than a stage should, or the slowest stage's costliest one."""
    calls = [node.operation for node in graph.nodes if node.is_layer]
    possible = [i for i, layer in enumerate(calls) if has_parts(layer) and id(layer) not in tried]
    if cut is None:
        return [calls[i] for i in possible]
    if cut.efficiency >= EVEN:
        return []
    mean = sum(cut.costs) / len(cut.costs)
    chosen = [i for i in possible if cut.shares[i] > mean]
    if not chosen:
        least = (1 - GAIN) * max(cut.costs)
        inside = [i for i in possible if cut.stages[i] == cut.slowest and cut.shares[i] > least]
        chosen = sorted(inside, key=lambda i: -cut.shares[i])[:1]
    return [calls[i] for i in chosen]


def _opening(model: keras.Model, layers: Iterable[keras.Layer], shapes: Sequence[Any]) -> Opening:
    chosen = set(map(id, layers))
    numbers = tuple(i for i, layer in enumerate(keras_api.all_layers(model)) if id(layer) in chosen)
    return Opening(numbers, tuple((tuple(s.shape), str(s.dtype)) for s in shapes)) if numbers else CLOSED


def _closed_again(model: keras.Model, inputs: Tree, found: Balance, shapes: Sequence[Any]) -> Balance:
    """The same cut, looking only into layers that it goes through."""
    stages_in: dict[NestedCall, set[int]] = {}
    for call, stage in zip(found.calls, found.stages, strict=True):
        for nested in call.within:
            stages_in.setdefault(nested, set()).add(stage)
    layers = keras_api.all_layers(model)
    through = {id(nested.model) for nested, stages in stages_in.items() if len(stages) > 1}
    opened = {id(layers[i]) for i in found.opening.layers}
    opening = _opening(model, (layer for layer in layers if id(layer) in opened & through), shapes)
    if opening == found.opening:
        return found

    def closed(i: int) -> NestedCall | int:
        """The layer call that contains call number `i` and is closed again, or the call itself."""
        within = found.calls[i].within
        return next((nested for nested in within if id(nested.model) in opened - through), i)

    groups = [list(group) for _, group in groupby(range(len(found.calls)), closed)]
    graph = graph_of(model, inputs, True, opening)
    return replace(
        found,
        stages=tuple(found.stages[group[0]] for group in groups),
        calls=tuple(node for node in graph.nodes if node.is_layer),
        shares=tuple(sum(found.shares[i] for i in group) for group in groups),
        opening=opening,
    )


def _warn_if_uneven(model: keras.Model, cut: Balance, refused: dict[int, str]) -> None:
    """Warn, with the layer that is to blame, if the best cut leaves most devices idle."""
    stages, total = len(cut.costs), sum(cut.costs)
    speedup = total / max(cut.costs)
    if speedup - 1 >= UNEVEN * (stages - 1):
        return
    inside = [i for i, stage in enumerate(cut.stages) if stage == cut.slowest]
    worst = max(inside, key=lambda i: cut.shares[i])
    layer = cut.calls[worst].operation
    why = f", which cannot be cut: {refused[id(layer)]}" if id(layer) in refused else ""
    users = has_parts(layer) and not type(layer).__module__.startswith("keras.")
    remedy = "Call the parts of this layer in the model itself, or use fewer stages." if users else "Use fewer stages."
    warnings.warn(
        f"Stage {cut.slowest} of model {model.name!r} has {max(cut.costs) / total:.0%} of the cost, where "
        f"{1 / stages:.0%} would be even, so {stages} stages can be at most {speedup:.1f} times as fast as one device. "
        f"{cut.shares[worst] / total:.0%} is in layer {str(cut.calls[worst])!r} ({type(layer).__name__})"
        f"{why}. {remedy}",
        stacklevel=4,
    )
