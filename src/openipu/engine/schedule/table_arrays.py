"""A table as integer arrays: everything that a compiled program looks up while it goes from tick to tick.

On every device, the program has a `mailbox` for what arrives (activations as well as gradients), a store of `residuals`
between forwards and backwards, and an `outbox` with one place per round of transfers. In each row it does this:

    for stage in 0, 1, ...:      forwards, on the device of the stage, where micro_batch is not NONE
    for stage in ..., 1, 0:      backwards, likewise
    for each round of exchanges[exchange]:
        mailbox[receive[round]] = what the round's permutation brings from outbox[round] of another device

A forward reads its `input` from the mailbox and keeps a residual; a backward reads `input`, `gradient` and `residual`.
Both write their result to the outbox, or straight into the mailbox where the next stage is on the same device.

[Note: forwards first] Within a row, forwards run before backwards, whatever their order in the cell. Otherwise XLA
would copy the whole store of residuals. So a slot that a backward frees is used again only from the next row on, and
Grouped needs one more residual slot than it has live micro-batches.

[Note: inputs stay] A stage's input stays in the mailbox until its backward, which reads it again: to recompute the
forward, or because a residual that equals the input is not stored twice. Stage 0 reads its input from the data.
"""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Final

import numpy as np
from numpy.typing import NDArray

from .actions import Action, Kind, Table, backward, forward, needs, position, validate

Ints = NDArray[np.int32]
Link = tuple[int, int]
"""A transfer from one device to another."""
Permutation = tuple[Link, ...]
"""Transfers that happen at the same time: no device sends or receives twice."""

NONE: Final = -1
"""Nothing to do, nothing to read or nothing to write."""


@dataclass(frozen=True, slots=True, eq=False)
class ActionArrays:
    """All forwards or all backwards, as arrays of (row, stage)."""

    micro_batch: Ints
    """NONE: the stage is idle."""
    input: Ints
    """The mailbox slot of the stage's input. NONE for stage 0, which reads the data of its micro-batch."""
    gradient: Ints
    """The mailbox slot of the output's gradient. NONE in forwards, and for the last stage, which has the loss."""
    residual: Ints
    """The slot where the forward writes its residuals and the backward reads them. NONE without training."""
    outbox: Ints
    """The round that sends the result to another device."""
    local: Ints
    """The mailbox slot of the result, if the next stage is on the same device."""


@dataclass(frozen=True, slots=True, eq=False)
class TableArrays:
    """A table as arrays. Each row is a tick in which something happens."""

    devices: tuple[int, ...]
    """The device of each stage."""
    tick: Ints
    """The tick of the table that a row stands for."""
    forward: ActionArrays
    backward: ActionArrays | None
    """None without training."""
    exchange: Ints
    """Per row, which of the `exchanges` follows."""
    receive: Ints
    """Per (row, round, device), the mailbox slot for what the round brings. `trash` takes what is not needed."""
    exchanges: tuple[tuple[Permutation, ...], ...]
    """The rounds of each exchange. The first exchange is empty. There are few, because each is one branch."""
    mailbox_depth: tuple[int, ...]
    """Per device, how many mailbox slots it uses."""
    residual_depth: tuple[int, ...]
    """Per device, how many residual slots it uses."""

    @property
    def trash(self) -> int:
        """The last mailbox slot of every device, after the slots that any device uses."""
        return max(self.mailbox_depth)

    @property
    def residual_slots(self) -> int:
        """The number of residual slots. It is the same on every device, because all run one program."""
        return max(self.residual_depth)

    @property
    def rounds(self) -> int:
        """The number of places in the outbox."""
        return int(self.receive.shape[1])


def compile_table(table: Table) -> TableArrays:
    """The arrays for a table, which is checked first. Ticks in which every device is idle are left out."""
    clock = _Clock(validate(table))
    transfers = _transfers(table, clock)
    patterns = _merge(Counter(pairs.values()) for pairs in transfers)
    exchanges = ((), *map(_rounds, patterns))
    mail, mailbox_depth = _mailbox(table, clock)
    residuals, residual_depth = _residuals(table, clock)

    exchange = np.zeros(clock.rows, np.int32)
    receive = np.full((clock.rows, max(map(len, exchanges)), len(table.cells)), max(mailbox_depth), np.int32)
    outbox: dict[Action, int] = {}
    for row, pairs in enumerate(transfers):
        if pairs:
            exchange[row] = 1 + _index(patterns, Counter(pairs.values()))
        for action, turn in _assign(pairs, exchanges[exchange[row]]).items():
            outbox[action] = turn
            receive[row, turn, pairs[action][1]] = mail[action]

    def actions_of(kind: Kind) -> ActionArrays:
        result = ActionArrays(*(np.full((clock.rows, table.stages), NONE, np.int32) for _ in fields(ActionArrays)))
        for action, row in clock.row.items():
            if action.kind is kind:
                at, m = (row, action.stage), action.micro_batch
                result.micro_batch[at] = m
                result.input[at] = mail.get(forward(action.stage - 1, m), NONE)
                result.residual[at] = residuals.get(forward(action.stage, m), NONE)
                result.outbox[at] = outbox.get(action, NONE)
                if action not in outbox:
                    result.local[at] = mail.get(action, NONE)
                if kind is Kind.BACKWARD:
                    result.gradient[at] = mail.get(backward(action.stage + 1, m), NONE)
        return result

    backwards = actions_of(Kind.BACKWARD) if table.training else None
    return TableArrays(
        table.devices, clock.tick, actions_of(Kind.FORWARD), backwards, exchange, receive, exchanges, mailbox_depth,
        residual_depth,
    )  # fmt: skip


class _Clock:
    """The rows of a table and the moments in a row: the parts of a journey in order, then the exchange."""

    def __init__(self, table: Table) -> None:
        busy = [tick for tick, column in enumerate(table.columns()) if any(column)]
        row = {tick: row for row, tick in enumerate(busy)}
        self.stages = table.stages
        self.rows = len(busy)
        self.tick = np.array(busy, np.int32)
        self.row = {action: row[tick] for tick, _, action in table.actions()}

    def moment(self, action: Action) -> int:
        """When an action runs."""
        return self.row[action] * (2 * self.stages + 1) + position(action, self.stages)

    def after(self, action: Action) -> int:
        """When the exchange that follows an action happens."""
        return self.row[action] * (2 * self.stages + 1) + 2 * self.stages


def _consumer(action: Action, table: Table) -> Action | None:
    """The action that reads the result of this one from a mailbox, if any."""
    step = 1 if action.kind is Kind.FORWARD else -1
    stage = action.stage + step
    return Action(stage, action.kind, action.micro_batch) if 0 <= stage < table.stages else None


def _transfers(table: Table, clock: _Clock) -> list[dict[Action, Link]]:
    """Per row, the results that have to move to another device."""
    found: list[dict[Action, Link]] = [{} for _ in range(clock.rows)]
    for _, device, action in table.actions():
        consumer = _consumer(action, table)
        if consumer is not None and table.devices[consumer.stage] != device:
            found[clock.row[action]][action] = (device, table.devices[consumer.stage])
    return found


def _mailbox(table: Table, clock: _Clock) -> tuple[dict[Action, int], tuple[int, ...]]:
    """The mailbox slot of every result that another action reads, and how many slots each device needs."""
    spans: dict[int, dict[Action, Link]] = defaultdict(dict)
    for _, device, action in table.actions():
        consumer = _consumer(action, table)
        if consumer is None:
            continue
        there = table.devices[consumer.stage]
        arrives = clock.moment(action) if there == device else clock.after(action)
        # [Note: inputs stay]
        last = backward(consumer.stage, action.micro_batch) if table.training else consumer
        spans[there][action] = (arrives, clock.moment(last))
    return _slots(table, spans)


def _residuals(table: Table, clock: _Clock) -> tuple[dict[Action, int], tuple[int, ...]]:
    """The residual slot of every forward, and how many slots each device needs."""
    spans: dict[int, dict[Action, Link]] = defaultdict(dict)
    for _, device, action in table.actions():
        if action.kind is Kind.BACKWARD:
            made = next(iter(needs(action, table.stages)))
            spans[device][made] = (clock.moment(made), clock.moment(action))
    return _slots(table, spans)


def _slots(
    table: Table, spans: Mapping[int, Mapping[Action, tuple[int, int]]]
) -> tuple[dict[Action, int], tuple[int, ...]]:
    """A slot for every value during its span of time, and how many slots each device needs.

    No two values have the same slot at the same time, and there are as few slots as possible.
    """
    slots: dict[Action, int] = {}
    depth = [0] * len(table.cells)
    for device, values in spans.items():
        free: list[int] = []
        taken: list[tuple[int, int]] = []
        for value, (start, end) in sorted(values.items(), key=lambda item: item[1]):
            # An action never writes where it reads, so that XLA can write in place.
            while taken and taken[0][0] < start:
                heapq.heappush(free, heapq.heappop(taken)[1])
            if not free:
                free.append(depth[device])
                depth[device] += 1
            slots[value] = heapq.heappop(free)
            heapq.heappush(taken, (end, slots[value]))
    return slots, tuple(depth)


def _merge(needed: Iterable[Counter[Link]]) -> list[Counter[Link]]:
    """A few sets of links that serve every row in no more rounds than the row needs by itself.

    Rows at the start and the end use some of the links of those in the middle. What travels on the other links is
    discarded, which costs less than a branch of the program for each row.
    """
    distinct = {frozenset(links.items()): links for links in needed if links}
    patterns: list[Counter[Link]] = []
    for links in sorted(distinct.values(), key=lambda links: (-_degree(links), -links.total(), sorted(links.items()))):
        for index, pattern in enumerate(patterns):
            if _degree(pattern) == _degree(links) == _degree(pattern | links):
                patterns[index] = pattern | links
                break
        else:
            patterns.append(links)
    return patterns


def _index(patterns: list[Counter[Link]], links: Counter[Link]) -> int:
    return next(i for i, known in enumerate(patterns) if links <= known and _degree(links) == _degree(known))


def _degree(links: Counter[Link]) -> int:
    """The most values that one device sends or receives, which is the number of rounds it takes."""
    ends: Counter[tuple[str, int]] = Counter()
    for (source, target), count in links.items():
        ends["from", source] += count
        ends["to", target] += count
    return max(ends.values())


def _rounds(links: Counter[Link]) -> tuple[Permutation, ...]:
    """The links as permutations, with as few of them as possible: an edge colouring of a bipartite graph."""
    rounds: list[dict[int, int]] = [{} for _ in range(_degree(links))]  # each from source to target
    for source, target in sorted(links.elements()):
        idle_source = next(turn for turn in rounds if source not in turn)
        idle_target = next(turn for turn in rounds if target not in turn.values())
        _free(target, idle_source, idle_target)
        idle_source[source] = target
    return tuple(tuple(sorted(turn.items())) for turn in rounds)


def _free(target: int, wanted: dict[int, int], other: dict[int, int]) -> None:
    """Make `target` receive nothing in the wanted round, by swapping both rounds along the path that starts there.

    The path leaves targets in the wanted round and sources in the other one, so it never reaches a source that is idle
    in the wanted round.
    """
    path: list[tuple[int, int]] = []
    here, there = wanted, other
    end: int | None = target
    while end is not None:
        source = next((a for a, b in here.items() if b == end), None)
        if source is None:
            break
        path.append((source, here[source]))
        if source in there:
            path.append((source, there[source]))
        end = there.get(source)
    in_wanted, in_other = path[::2], path[1::2]
    for source, _ in in_wanted:
        del wanted[source]
    for source, _ in in_other:
        del other[source]
    wanted.update(in_other)
    other.update(in_wanted)


def _assign(pairs: Mapping[Action, Link], rounds: tuple[Permutation, ...]) -> dict[Action, int]:
    """The round in which each result travels."""
    turns: dict[Link, list[int]] = defaultdict(list)
    for turn, permutation in enumerate(rounds):
        for link in permutation:
            turns[link].append(turn)
    return {action: turns[link].pop(0) for action, link in pairs.items()}
