"""A model and a number of stages -> the cut with the fastest slowest stage.

The cost of a layer is estimated from the operations in its trace and the bytes it reads and writes; nothing is run.
Layers keep their order, and a stage is a run of consecutive layers. All devices go through the ticks together, so a
tick takes as long as the slowest stage plus the transfer of the largest boundary.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

from openipu import _validate as validate
from openipu.engine.core.operation_count import operations
from openipu.engine.keras_compat import api as keras_api
from openipu.engine.types import Tree

import jax
import keras
import numpy as np
from jax.extend.core import ClosedJaxpr

from .graph import Graph, Node
from .recorded_calls import is_symbolic, standardized
from .run_nodes import Value, abstract_values, run_node, spec_of
from .split import complete

BYTE = 20.0
"""How many operations take as long as reading or writing one byte of memory: some tens on CPUs, GPUs and TPUs."""
LINK = 8.0
"""How much longer it takes to send a byte to another device than to read or write it."""
ROWS = 32
"""Rows of the micro-batch that costs are estimated for, unless the model or the caller says otherwise."""


@dataclass(frozen=True, slots=True)
class Balance:
    """A cut: the stage of each layer call, what each stage costs, and how many bytes go over each boundary."""

    stages: tuple[int, ...]
    costs: tuple[float, ...]
    """Estimated number of operations."""
    boundaries: tuple[int, ...]
    """Bytes between each stage and the next, for one micro-batch."""
    names: tuple[str, ...]
    """The name of each layer call."""

    @property
    def efficiency(self) -> float:
        """How busy the devices are if the estimates are right: the mean cost divided by the largest."""
        return sum(self.costs) / (len(self.costs) * max(self.costs))

    def __str__(self) -> str:
        total = sum(self.costs)
        lines = [f"{len(self.costs)} stages, balance {self.efficiency:.0%} (mean over largest cost)"]
        for stage, cost in enumerate(self.costs):
            inside = [name for name, at in zip(self.names, self.stages, strict=True) if at == stage]
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


def balanced(model: keras.Model, graph: Graph | None, stages: int | None, inputs: Tree = None) -> Balance:
    """The best cut of a model into `stages` stages. `inputs` is a micro-batch, or its shapes and dtypes."""
    stages = validate.count("stages", stages, least=2)
    if graph is None:
        raise RuntimeError(
            f"Model {model.name!r} has not been built, so the costs of its layers are unknown. Give it a "
            "`keras.Input`, or call `model.build(input_shape)` first."
        )
    layers = [node for node in graph.nodes if node.is_layer]
    if len(layers) < stages:
        raise ValueError(
            f"Model {model.name!r} has {len(layers)} layer calls, too few for {stages} stages. "
            f"Use at most {len(layers)} stages."
        )
    values = _values(graph, inputs)
    anchors = _anchors(graph)
    costs = np.zeros(len(layers))
    for node, cost in zip(graph.nodes, _costs(graph, values), strict=True):
        costs[anchors[id(node)]] += cost
    traffic = _traffic(graph, values, anchors, len(layers))
    begins = cuts(costs, traffic * BYTE * LINK, stages)
    found = tuple(int(np.searchsorted(begins, i, "right")) for i in range(len(layers)))
    shares = tuple(float(part.sum()) for part in np.split(costs, begins))
    return Balance(found, shares, tuple(int(traffic[i]) for i in begins), tuple(str(node) for node in layers))


# --- shapes ----------------------------------------------------------------------------------------------------------


def _values(graph: Graph, inputs: Tree) -> dict[int, Value]:
    """The shape of every tensor of the graph in training, by the tensor's identity."""
    if inputs is None:
        return abstract_values(graph, _nominal(graph), training=True)
    given = keras.tree.map_structure(spec_of, inputs)
    flat = jax.eval_shape(lambda x: standardized(graph.model, x), given)
    return abstract_values(graph, flat, training=True)


def _nominal(graph: Graph) -> list[jax.ShapeDtypeStruct]:
    """The shapes of the model's own inputs, with `ROWS` rows if their number is open."""
    found = []
    for tensor in graph.inputs:
        shape = (tensor.shape[0] or ROWS, *tensor.shape[1:])
        if None in shape:
            raise ValueError(
                f"Input {tensor.name!r} has the shape {tensor.shape}, so the costs of layers are unknown. Give "
                "`inputs`, a micro-batch as the model will see it."
            )
        found.append(jax.ShapeDtypeStruct(shape, tensor.dtype))
    return found


def _bytes(values: Tree) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(values))


# --- costs -----------------------------------------------------------------------------------------------------------


def _costs(graph: Graph, values: dict[int, Value]) -> Iterator[float]:
    seen: dict[Hashable, float] = {}
    for node in graph.nodes:
        key = _signature(node, values)
        if key not in seen:
            seen[key] = _cost(node, values)
        yield seen[key]


def _signature(node: Node, values: dict[int, Value]) -> Hashable:
    """Equal for calls that cost the same: the same kind of operation, with the same settings, on the same shapes."""
    operation = node.operation
    made = operation.get_config() if node.is_layer else {k: v for k, v in _attributes(operation) if k[0] != "_"}
    made = {name: value for name, value in made.items() if name != "name"}
    leaves = keras.tree.flatten((node.args, node.kwargs))
    shapes = [values[id(leaf)] if is_symbolic(leaf) else str(leaf)[:100] for leaf in leaves]
    return type(operation), repr(made), repr(shapes), repr([(v.shape, v.dtype) for v in node.variables])


def _attributes(operation: object) -> list[tuple[str, Any]]:
    return list(vars(operation).items()) if hasattr(operation, "__dict__") else []


def _cost(node: Node, values: dict[int, Value]) -> float:
    """The operations of a forward pass, plus its memory traffic expressed as operations."""
    variables, tensors = node.variables, node.inputs

    def run(weights: list[Any], given: list[Value]) -> list[Any]:
        env: dict[int, Any] = {}
        for tensor, (value, mask) in zip(tensors, given, strict=True):
            if mask is not None:
                keras_api.set_keras_mask(value, mask)
            env[id(tensor)] = value
        with keras.StatelessScope(list(zip(variables, weights, strict=True))):
            run_node(node, env, training=True)
        return [env.get(id(tensor)) for tensor in node.outputs]

    given = [spec_of(v) for v in variables], [values[id(tensor)] for tensor in tensors]
    traced = jax.make_jaxpr(run)(*given)
    moved = _bytes(given) + _bytes([values[id(tensor)] for tensor in node.outputs])
    return operations(traced) + BYTE * moved


def cost_of(closed: ClosedJaxpr) -> float:
    """The cost of a traced program, estimated like that of a layer."""
    given = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in closed.in_avals]
    moved = _bytes(given) + _bytes([jax.ShapeDtypeStruct(a.shape, a.dtype) for a in closed.out_avals])
    return operations(closed) + BYTE * moved


# --- cuts ------------------------------------------------------------------------------------------------------------


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
            traffic[anchors[id(node)] + 1 : last.get(id(tensor), 0) + 1] += _bytes(values[id(tensor)])
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
