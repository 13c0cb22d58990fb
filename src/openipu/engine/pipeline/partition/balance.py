"""A model and a number of stages -> the cut with the fastest slowest stage.

Layers keep their order, and a stage is a run of consecutive layers. All devices go through the ticks together, so a
tick takes as long as the slowest stage plus the transfer of the largest boundary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

from openipu.engine.core.options import CLOSED, Opening

import keras
import numpy as np

from .costs import BYTE, bytes_of, costs_of
from .nodes import Graph, Node
from .run_nodes import Value, abstract_values
from .split import complete

LINK = 8.0
"""How much longer it takes to send a byte to another device than to read or write it."""


@dataclass(frozen=True, slots=True)
class Balance:
    """A cut: the stage of each layer call, what each stage costs, and how many bytes go over each boundary."""

    stages: tuple[int, ...]
    costs: tuple[float, ...]
    """Estimated number of operations."""
    boundaries: tuple[int, ...]
    """Bytes between each stage and the next, for one micro-batch."""
    calls: tuple[Node, ...]
    """The layer calls."""
    shares: tuple[float, ...]
    """What each layer call costs."""
    opening: Opening = CLOSED
    """The layers that are looked into."""

    @property
    def efficiency(self) -> float:
        """How busy the devices are if the estimates are right: the mean cost divided by the largest."""
        return sum(self.costs) / (len(self.costs) * max(self.costs))

    @property
    def tick(self) -> float:
        """How long a tick takes, as a share of what one device takes for the whole model."""
        return (max(self.costs) + max(self.boundaries) * BYTE * LINK) / sum(self.costs)

    @property
    def slowest(self) -> int:
        """The stage that costs the most."""
        return self.costs.index(max(self.costs))

    def __str__(self) -> str:
        total = sum(self.costs)
        lines = [f"{len(self.costs)} stages, balance {self.efficiency:.0%} (mean over largest cost)"]
        for stage, cost in enumerate(self.costs):
            inside = [str(call) for call, at in zip(self.calls, self.stages, strict=True) if at == stage]
            layers = inside[0] if len(inside) == 1 else f"{inside[0]} ... {inside[-1]}"
            sends = f", sends {_size(self.boundaries[stage])}" if stage < len(self.boundaries) else ""
            count = f"{len(inside)} layer{'s' if len(inside) > 1 else ''}"
            lines.append(f"  stage {stage}: {cost / total:4.0%} of the cost, {count} ({layers}){sends}")
        return "\n".join(lines)


def _size(count: float) -> str:
    for unit in ("bytes", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "bytes" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"


def best_cut(graph: Graph, shapes: Sequence[Any], stages: int) -> Balance | None:
    """The best cut of a graph into `stages` stages, or None if it has too few layer calls.

    `shapes` has the shape and dtype of each input of the graph.
    """
    layers = tuple(node for node in graph.nodes if node.is_layer)
    if len(layers) < stages:
        return None
    values = abstract_values(graph, shapes, training=True)
    anchors = _anchors(graph)
    costs = np.zeros(len(layers))
    for node, cost in zip(graph.nodes, costs_of(graph, values), strict=True):
        costs[anchors[id(node)]] += cost
    traffic = _traffic(graph, values, anchors, len(layers))
    begins = cuts(costs, traffic * BYTE * LINK, stages)
    found = tuple(int(np.searchsorted(begins, i, "right")) for i in range(len(layers)))
    sums = tuple(float(part.sum()) for part in np.split(costs, begins))
    return Balance(found, sums, tuple(int(traffic[i]) for i in begins), layers, tuple(costs.tolist()), graph.opening)


def _anchors(graph: Graph) -> dict[int, int]:
    """For each node, by identity, the number of the layer call that it stays with, wherever the cuts are.

    An operation stays with the layer call that computes its inputs and adds to the cost of that call.
    """
    numbers = count()
    anchors = complete(graph, [next(numbers) if node.is_layer else None for node in graph.nodes])
    return {id(node): anchor for node, anchor in zip(graph.nodes, anchors, strict=True)}


def _traffic(graph: Graph, values: dict[int, Value], anchors: dict[int, int], layers: int) -> np.ndarray:
    """The bytes that cross a cut before each layer call, and after the last one. At both ends nothing does."""
    last = {id(tensor): layers - 1 for tensor in keras.tree.flatten(graph.outputs)}
    for node in graph.nodes:
        for tensor in node.inputs:
            last[id(tensor)] = max(anchors[id(node)], last.get(id(tensor), 0))
    traffic = np.zeros(layers + 1)
    for node in graph.nodes:
        for tensor in node.outputs:
            traffic[anchors[id(node)] + 1 : last.get(id(tensor), 0) + 1] += bytes_of(values[id(tensor)])
    return traffic


def cuts(costs: np.ndarray, traffic: np.ndarray, stages: int) -> list[int]:
    """The layer calls with which stages 1, 2, ... begin, so that a tick is as short as possible.

    A tick takes as long as the costliest stage plus the costliest boundary. `traffic[i]` is the cost of a cut before
    layer call i. Among equally good cuts, the one with the least traffic is taken.
    """
    found: tuple[tuple[float, float], list[int]] | None = None
    for most in _thresholds(traffic[1:-1], stages - 1):
        best, total, begins = _cuts_below(costs, traffic, stages, most)
        if found is None or (best + most, total) < found[0]:
            found = (best + most, total), begins
    assert found is not None
    return found[1]


def _thresholds(traffic: np.ndarray, cuts: int, limit: int = 32) -> np.ndarray:
    """At most `limit` candidates for the largest boundary, each of which leaves enough places to cut."""
    values = np.unique(np.sort(traffic)[cuts - 1 :])
    chosen: np.ndarray = values[np.unique(np.linspace(0, len(values) - 1, limit).round().astype(int))]
    return chosen


def _cuts_below(costs: np.ndarray, traffic: np.ndarray, stages: int, most: float) -> tuple[float, float, list[int]]:
    """The best cuts with boundaries up to `most`: the largest cost of a stage, all traffic, and where stages begin."""
    size = len(costs)
    sums = np.concatenate([[0.0], np.cumsum(costs)])
    # stage[a, b] is the cost of a stage with the layer calls a to b - 1 (at least one).
    stage = sums[None, :] - sums[:, None]
    stage[np.tril_indices(size + 1)] = np.inf
    stage[1:][traffic[1:] > most] = np.inf
    best = stage[0]
    for _ in range(stages - 1):
        best = np.maximum(best[:, None], stage).min(0)
    allowed = stage <= best[size] * (1 + 1e-9)
    least = np.where(allowed[0], 0.0, np.inf)
    choices = []
    for _ in range(stages - 1):
        total = least[:, None] + np.where(allowed, traffic[:, None], np.inf)
        choices.append(total.argmin(0))
        least = total.min(0)
    return float(best[size]), float(least[size]), _walk_back(choices, size)


def _walk_back(choices: Sequence[np.ndarray], end: int) -> list[int]:
    begins: list[int] = []
    for choice in reversed(choices):
        end = int(choice[end])
        begins.append(end)
    return begins[::-1]
