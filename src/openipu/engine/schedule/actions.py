"""A pipeline schedule as a value: a table of actions (devices by ticks) that can be printed, compared and checked.

    tick      0     1     2          3          4          5     6
    device 0  F0:0  F0:1  F0:2       B0:0,F0:3  B0:1       B0:2  B0:3
    device 1  -     F1:0  B1:0,F1:1  B1:1,F1:2  B1:2,F1:3  B1:3  -

`F1:0` is the forward of stage 1 for micro-batch 0. measures.py computes numbers about a table (bubble, memory), and
table_arrays.py makes the arrays that a compiled program follows.

[Note: when values are available] All devices go from tick to tick together, and values move between devices only
between ticks. So a value can be used on another device in any later tick. On its own device, later actions in the same
cell can use it, too.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import chain

_ACTION = re.compile(r"([FB])(\d+):(\d+)")
_IDLE = "-"
_AROUND = 5
"""How many ticks an error message shows on either side of the offending cell."""


class Kind(StrEnum):
    """What an action computes.

    >>> ipu.schedules.Action(2, ipu.schedules.Kind.BACKWARD, 0)
    B2:0
    """

    FORWARD = "F"
    BACKWARD = "B"


@dataclass(frozen=True, slots=True)
class Action:
    """The forward or backward of one stage for one micro-batch. Prints as `F2:0` or `B1:3`.

    >>> print(ipu.schedules.Action(stage=2, kind=ipu.schedules.Kind.FORWARD, micro_batch=0))
    F2:0
    """

    stage: int
    kind: Kind
    micro_batch: int

    def __repr__(self) -> str:
        return f"{self.kind.value}{self.stage}:{self.micro_batch}"

    @classmethod
    def parse(cls, text: str) -> Action:
        """The action that prints as `text`.

        >>> ipu.schedules.Action.parse("B1:3").stage
        1
        """
        found = _ACTION.fullmatch(text)
        if found is None:
            raise ValueError(f"{text!r} is not an action. Write F or B, stage, colon and micro-batch, such as F2:0.")
        return cls(int(found[2]), Kind(found[1]), int(found[3]))


Cell = tuple[Action, ...]
"""What a device does in one tick, in this order; empty if it is idle."""


def forward(stage: int, micro_batch: int) -> Action:
    """The action `F<stage>:<micro_batch>`.

    >>> print(ipu.schedules.forward(stage=2, micro_batch=0))
    F2:0
    """
    return Action(stage, Kind.FORWARD, micro_batch)


def backward(stage: int, micro_batch: int) -> Action:
    """The action `B<stage>:<micro_batch>`.

    >>> print(ipu.schedules.backward(stage=1, micro_batch=3))
    B1:3
    """
    return Action(stage, Kind.BACKWARD, micro_batch)


def journey(stages: int, micro_batch: int, training: bool = True) -> list[Action]:
    """Everything that happens to one micro-batch, in order: F0, F1, ..., and in training also ..., B1, B0.

    >>> print(*ipu.schedules.journey(stages=3, micro_batch=0))
    F0:0 F1:0 F2:0 B2:0 B1:0 B0:0
    """
    there = [forward(stage, micro_batch) for stage in range(stages)]
    return there + [backward(stage, micro_batch) for stage in reversed(range(stages))] if training else there


def position(action: Action, stages: int) -> int:
    """The position of an action in the journey of its micro-batch."""
    return action.stage if action.kind is Kind.FORWARD else 2 * stages - 1 - action.stage


def needs(action: Action, stages: int) -> list[Action]:
    """The actions whose results this one uses."""
    stage, micro_batch = action.stage, action.micro_batch
    if action.kind is Kind.FORWARD:
        return [forward(stage - 1, micro_batch)] if stage else []
    return [forward(stage, micro_batch)] + ([backward(stage + 1, micro_batch)] if stage + 1 < stages else [])


@dataclass(frozen=True, slots=True)
class Table:
    """What each device does in each tick of one update: `cells[device][tick]`. Prints as rows of actions.

    >>> table = ipu.schedules.Table.parse(["F0:0 -    -    B0:0", "-    F1:0 B1:0 -"], devices=[0, 1])
    >>> table.stages, table.ticks, table.micro_batches
    (2, 4, 1)
    """

    cells: tuple[tuple[Cell, ...], ...]
    devices: tuple[int, ...]
    """The device of each stage."""
    micro_batches: int
    training: bool = True
    one_at_a_time: bool = True
    """Whether a device runs at most one action in a tick."""

    def __post_init__(self) -> None:
        lengths = sorted({len(row) for row in self.cells})
        if len(lengths) != 1:
            raise ValueError(f"The rows of a table have {lengths} ticks. Give every device the same number of ticks.")
        if not self.devices or len(self.cells) <= max(self.devices):
            raise ValueError(
                f"A table of {len(self.cells)} rows cannot hold stages on the devices {list(self.devices)}. "
                "Give one row per device, counting from 0."
            )

    @classmethod
    def at(
        cls, ticks: Mapping[Action, int], devices: Sequence[int], training: bool = True, one_at_a_time: bool = True
    ) -> Table:
        """The table in which every action runs at its tick. In a cell, older micro-batches come first."""
        rows: list[list[list[Action]]] = [
            [[] for _ in range(max(ticks.values(), default=-1) + 1)] for _ in range(max(devices) + 1)
        ]
        for action, tick in ticks.items():
            rows[devices[action.stage]][tick].append(action)
        cells = tuple(tuple(_by_age(cell, len(devices)) for cell in row) for row in rows)
        micro_batches = 1 + max((action.micro_batch for action in ticks), default=-1)
        return cls(cells, tuple(devices), micro_batches, training, one_at_a_time)

    @classmethod
    def parse(
        cls, rows: Iterable[str], devices: Sequence[int], training: bool = True, one_at_a_time: bool = True
    ) -> Table:
        """The table with the given rows, written as they print: `"F0:0 F0:1 - B0:0,F0:2"`."""
        cells = tuple(tuple(_parse_cell(cell) for cell in row.split()) for row in rows)
        micro_batches = {action.micro_batch for row in cells for cell in row for action in cell}
        return cls(cells, tuple(devices), 1 + max(micro_batches, default=-1), training, one_at_a_time)

    @property
    def stages(self) -> int:
        """How many stages the model has."""
        return len(self.devices)

    @property
    def ticks(self) -> int:
        """How many ticks the table has: its columns."""
        return len(self.cells[0])

    def columns(self) -> Iterator[tuple[Cell, ...]]:
        """The ticks in order, each with one cell per device."""
        return zip(*self.cells, strict=True)

    def actions(self) -> Iterator[tuple[int, int, Action]]:
        """The tick, device and action of everything that runs, in order of time."""
        for tick, column in enumerate(self.columns()):
            for device, cell in enumerate(column):
                for action in cell:
                    yield tick, device, action

    def __str__(self) -> str:
        return "\n".join(render(self))


def _by_age(cell: list[Action], stages: int) -> Cell:
    return tuple(sorted(cell, key=lambda action: (action.micro_batch, position(action, stages))))


def _parse_cell(text: str) -> Cell:
    return () if text == _IDLE else tuple(map(Action.parse, text.split(",")))


def render(
    table: Table, start: int = 0, stop: int | None = None, mark: tuple[int, int] | None = None, width: int | None = None
) -> list[str]:
    r"""Lines of text for the ticks from `start` to `stop`. `mark` is a (device, tick) to point at.

    A table that is wider than `width` continues below, after an empty line.

    >>> table = ipu.schedules.GPipe().table(stages=2, micro_batches=2)
    >>> print("\n".join(ipu.schedules.render(table, start=0, stop=3)))
    tick      0     1     2
    device 0  F0:0  F0:1  -
    device 1  -     F1:0  F1:1
    """
    names = ["tick", *(f"device {device}" for device in range(len(table.cells)))]
    columns = [
        [str(tick), *(text_of(table.cells[device][tick], (device, tick) == mark) for device in range(len(table.cells)))]
        for tick in range(table.ticks)[start:stop]
    ]
    lines: list[str] = []
    for block in _blocks(columns, width, len(max(names, key=len))):
        lines += [""] if lines else []
        lines += ["  ".join(cells).rstrip() for cells in zip(*map(_padded, [names, *block]), strict=True)]
    return lines


def text_of(cell: Cell, marked: bool = False) -> str:
    """A cell as it prints."""
    text = ",".join(map(repr, cell)) or _IDLE
    return f">{text}<" if marked else text


def _padded(column: list[str]) -> list[str]:
    width = max(map(len, column))
    return [text.ljust(width) for text in column]


def _blocks(columns: list[list[str]], width: int | None, taken: int) -> Iterator[list[list[str]]]:
    """Runs of columns that fit side by side, with at least one column each."""
    block: list[list[str]] = []
    used = taken
    for column in columns:
        wide = 2 + max(map(len, column))
        if block and width is not None and used + wide > width:
            yield block
            block, used = [], taken
        block.append(column)
        used += wide
    yield block


class ScheduleError(ValueError):
    r"""A table breaks a rule. The message shows where.

    >>> table = ipu.schedules.Table.parse(["F0:0 -", "F1:0 -"], devices=[0, 1], training=False)
    >>> try:
    ...     ipu.schedules.validate(table)
    ... except ipu.schedules.ScheduleError as error:
    ...     print(*str(error).splitlines()[1:], sep="\n")
    tick      0       1
    device 0  F0:0    -
    device 1  >F1:0<  -
    """

    def __init__(self, rule: str, table: Table, device: int, tick: int) -> None:
        start = max(0, tick - _AROUND)
        lines = render(table, start, tick + _AROUND + 1, mark=(device, tick))
        super().__init__("\n".join([f"Device {device}, tick {tick}: {rule}", *lines]))
        self.device, self.tick = device, tick


def validate(table: Table) -> Table:
    """Return the table, or raise a `ScheduleError` for the first cell that breaks one of these rules.

    1. An action is in the row of the device that holds its stage, and there are no backwards without training.
    2. A stage runs at most one forward and one backward in a tick. If the table is `one_at_a_time`, a device runs at
       most one action in a tick.
    3. Nothing runs twice.
    4. What an action uses has been computed and has arrived [Note: when values are available]. That is the forward of
       the stage before or, for a backward, the forward of the same stage and the backward of the stage after.
    5. Every micro-batch passes every stage, forwards and, in training, backwards.

    >>> table = ipu.schedules.validate(ipu.schedules.OneFOneB().table(stages=2, micro_batches=2))
    >>> print(table)
    tick      0     1     2     3     4     5
    device 0  F0:0  F0:1  -     B0:0  -     B0:1
    device 1  -     F1:0  B1:0  F1:1  B1:1  -
    """
    if not isinstance(table, Table):
        raise TypeError(f"The `table` method of a schedule returned a {type(table).__name__}. Return a `Table`.")
    when = {action: (tick, device) for tick, device, action in reversed(list(table.actions()))}
    done: set[Action] = set()
    for tick, column in enumerate(table.columns()):
        for device, cell in enumerate(column):
            _check_number(table, device, tick, cell)
            for place, action in enumerate(cell):
                _check_action(table, device, tick, action, (done, cell[:place]), when)
        done.update(chain.from_iterable(column))
    _check_complete(table, when)
    return table


def _check_number(table: Table, device: int, tick: int, cell: Cell) -> None:
    if table.one_at_a_time and len(cell) > 1:
        raise ScheduleError(
            f"{len(cell)} actions in one tick, but this schedule runs one at a time. "
            "Move the others to other ticks, or set one_at_a_time=False.",
            table, device, tick,
        )  # fmt: skip
    for (kind, stage), count in Counter((action.kind, action.stage) for action in cell).items():
        if count > 1:
            raise ScheduleError(
                f"stage {stage} runs {count} {kind.name.lower()}s in one tick, but it can run one. "
                "Move the others to other ticks.",
                table, device, tick,
            )  # fmt: skip


def _check_action(
    table: Table,
    device: int,
    tick: int,
    action: Action,
    computed: tuple[Collection[Action], ...],
    when: Mapping[Action, tuple[int, int]],
) -> None:
    def wrong(rule: str) -> ScheduleError:
        return ScheduleError(rule, table, device, tick)

    if action.stage >= table.stages or action.micro_batch >= table.micro_batches:
        raise wrong(
            f"{action} is not part of {table.stages} stages and {table.micro_batches} micro-batches. Count both from 0."
        )
    if table.devices[action.stage] != device:
        home = table.devices[action.stage]
        raise wrong(f"{action} runs on a device without stage {action.stage}. Move it to device {home}.")
    if action.kind is Kind.BACKWARD and not table.training:
        raise wrong(f"{action} is a backward, but nothing is trained. Leave it out, or set training=True.")
    if any(action in part for part in computed):
        raise wrong(f"{action} runs a second time; it already ran in tick {when[action][0]}. Leave one of them out.")
    for needed in needs(action, table.stages):
        if not any(needed in part for part in computed):
            raise wrong(f"{action} uses the result of {needed}, {_why_missing(needed, when, device, tick)}")


def _why_missing(needed: Action, when: Mapping[Action, tuple[int, int]], device: int, tick: int) -> str:
    if needed not in when:
        return "which is never computed. Add it in an earlier tick."
    at, where = when[needed]
    if (at, where) == (tick, device):
        return "which comes after it in the same cell. Change their order."
    return f"which device {where} computes in tick {at}: it is available from tick {at + 1} on. Move one of them."


def _check_complete(table: Table, when: Mapping[Action, tuple[int, int]]) -> None:
    for micro_batch in range(table.micro_batches):
        for action in journey(table.stages, micro_batch, table.training):
            if action not in when:
                device, last = table.devices[action.stage], table.ticks - 1
                raise ScheduleError(
                    f"the table ends, but {action} never ran. Let every micro-batch pass every stage once.",
                    table, device, last,
                )  # fmt: skip
