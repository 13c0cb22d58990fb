"""What each layer of a traced program costs: operations, and bytes that pass between layers.

The trace is used and not the compiled program, because XLA joins operations of several layers and calls libraries whose
work it does not count. The trace has each operation once, under the name of its layer.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Final

from openipu.engine.facts.costs import Cost, Counted, Part, TopOperation

import jax
from jax.extend.core import ClosedJaxpr

from .operation_count import PRODUCTS, Unit, Value, Work, works
from .state import State

TOP: Final = 20
"""How many operations of most work are kept."""


def counted(program: ClosedJaxpr, names: Sequence[str] = (), part: Part | None = None) -> Counted:
    """The costs of a program. `names` are those of its arguments; `part` is what all of it belongs to, if given."""
    done = works(program)
    operations: dict[Unit, float] = defaultdict(float)
    for work in done:
        if work.unit is not None:
            operations[work.unit] += work.operations
    moved = _moved(done)
    costs = tuple(
        Cost(unit.layer, part or _part(unit), count, moved[unit])
        for unit, count in operations.items()
        if count or moved[unit]
    )
    return Counted(sum(cost.operations for cost in costs), costs, _top(done, part), _dtype(done), _owners(done, names))


def names_of(state: State) -> list[str]:
    """The names of the arrays of a state, in the order of a program's arguments: "trainable[0]" and so on."""
    return [jax.tree_util.keystr(path).lstrip(".") for path, _ in jax.tree_util.tree_flatten_with_path(state)[0]]


def joined(*all_: Counted) -> Counted:
    """The costs of several programs together."""
    costs: dict[tuple[str, Part], Cost] = {}
    for cost in (cost for one in all_ for cost in one.costs):
        old = costs.get((cost.layer, cost.part), Cost(cost.layer, cost.part, 0.0, 0.0))
        costs[cost.layer, cost.part] = replace(
            old, operations=old.operations + cost.operations, bytes=old.bytes + cost.bytes
        )
    top = _largest(operation for one in all_ for operation in one.top)
    owners = {name: layer for one in reversed(all_) for name, layer in one.owners.items()}
    dtype = next((one.dtype for one in all_ if one.dtype), "")
    return Counted(sum(one.operations for one in all_), tuple(costs.values()), top, dtype, owners)


def scaled(one: Counted, factor: float) -> Counted:
    """The costs, each times a factor."""
    costs = tuple(replace(c, operations=factor * c.operations, bytes=factor * c.bytes) for c in one.costs)
    top = tuple(replace(t, operations=factor * t.operations, times=factor * t.times) for t in one.top)
    return replace(one, operations=factor * one.operations, costs=costs, top=top)


def without(one: Counted, other: Counted) -> Counted:
    """The costs of a program without those of a part of it, which has been counted alone."""
    operations: dict[str, float] = defaultdict(float)
    moved: dict[str, float] = defaultdict(float)
    for cost in other.costs:
        operations[cost.layer] += cost.operations
        moved[cost.layer] += cost.bytes
    costs = []
    for cost in one.costs:
        known = cost.part == "forward" and cost.layer in operations
        count = cost.operations - operations[cost.layer] if known else cost.operations
        rest = max(cost.bytes - moved[cost.layer], 0.0) if known else cost.bytes
        if count or rest:
            costs.append(replace(cost, operations=count, bytes=rest))
    gone = {(top.name, top.shapes, top.layer) for top in other.top}
    top = tuple(top for top in one.top if (top.name, top.shapes, top.layer) not in gone)
    return replace(one, operations=one.operations - other.operations, costs=tuple(costs), top=top)


def _part(unit: Unit) -> Part:
    return "backward" if unit.backward else "forward"


def _moved(done: Sequence[Work]) -> dict[Unit, float]:
    """The bytes that each unit reads from others and writes for others. It reads each value once."""
    readers: dict[Value, dict[Unit | None, float]] = defaultdict(dict)
    made: dict[Value, float] = {}
    for work in done:
        for value in work.reads:
            readers[value][work.unit] = max(work.times, readers[value].get(work.unit, 0.0))
        made |= dict.fromkeys(work.writes, work.times)
    moved: dict[Unit, float] = defaultdict(float)
    for value, units in readers.items():
        for unit, times in units.items():
            if unit is not None and unit != value.maker:
                moved[unit] += times * value.bytes
        if value.maker is not None and set(units) != {value.maker}:
            moved[value.maker] += (made.get(value) or max(units.values())) * value.bytes
    return moved


def _top(done: Sequence[Work], part: Part | None) -> tuple[TopOperation, ...]:
    found: dict[tuple[str, str, Unit], TopOperation] = {}
    for work in done:
        if work.unit is None or work.equation is None or not work.operations:
            continue
        shapes = " x ".join(_shape(variable.aval) for variable in work.equation.invars[:2])
        key = (work.equation.primitive.name, shapes, work.unit)
        old = found.get(key) or TopOperation(key[0], shapes, work.unit.layer, part or _part(work.unit), 0.0, 0.0)
        found[key] = replace(old, operations=old.operations + work.operations, times=old.times + work.times)
    return _largest(found.values())


def _largest(operations: Iterable[TopOperation]) -> tuple[TopOperation, ...]:
    return tuple(sorted(operations, key=lambda operation: -operation.operations)[:TOP])


def _shape(aval: object) -> str:
    dtype, shape = getattr(aval, "dtype", "?"), getattr(aval, "shape", ())
    return f"{dtype}[{','.join(map(str, shape))}]"


def _dtype(done: Sequence[Work]) -> str:
    found: dict[str, float] = defaultdict(float)
    for work in done:
        if work.equation is not None and work.equation.primitive.name in PRODUCTS:
            found[str(getattr(work.equation.invars[0].aval, "dtype", ""))] += work.operations
    return max(found, key=lambda dtype: found[dtype], default="")


def _owners(done: Sequence[Work], names: Sequence[str]) -> dict[str, str]:
    """The first layer that reads each argument with a name."""
    owners: dict[str, str] = {}
    for work in done:
        for value in work.reads if work.unit is not None and work.unit.layer else ():
            if value.source is not None and value.source < len(names):
                owners.setdefault(names[value.source], work.unit.layer if work.unit else "")
    return owners
