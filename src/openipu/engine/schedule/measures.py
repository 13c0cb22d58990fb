"""What a schedule costs, read off its table: time, bubble, and micro-batches held in memory.

Devices go from tick to tick together, so a tick takes as long as its busiest device. The time that the others wait is
the bubble.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from .actions import Action, Kind, Table


class Pace(Protocol):
    """How long the actions of a table take, in one unit of time."""

    @property
    def exchange(self) -> float:
        """How long devices exchange values after each tick in which something runs."""

    @property
    def typical(self) -> float:
        """A time by which a picture chooses its scale."""

    def of(self, action: Action) -> float:
        """The time of one action."""

    def words(self, action: Action) -> str:
        """The time of one action in words; empty if it is only an assumption."""

    def assumption(self, training: bool) -> str:
        """What the times of a table rest on, in words."""


@dataclass(frozen=True, slots=True)
class Costs:
    """How long one forward and one backward of any stage take, in any unit.

    >>> table = ipu.schedules.GPipe().table(stages=2, micro_batches=2)
    >>> ipu.schedules.total_time(table, ipu.schedules.Costs(forward=1, backward=3))
    12.0
    """

    forward: float = 1.0
    backward: float = 2.0

    @property
    def exchange(self) -> float:
        """Exchanges take no time."""
        return 0.0

    @property
    def typical(self) -> float:
        """The shorter of the two."""
        return min(self.forward, self.backward)

    def of(self, action: Action) -> float:
        """The time of one action."""
        return self.forward if action.kind is Kind.FORWARD else self.backward

    def words(self, action: Action) -> str:  # noqa: ARG002
        """Nothing, because it is an assumption."""
        return ""

    def assumption(self, training: bool) -> str:
        """What the times of a table rest on, in words."""
        if not training:
            return "no training"
        return f"a forward takes {self.forward:g}, a backward {self.backward:g}"


@dataclass(frozen=True, slots=True)
class StageCosts:
    """How long the actions of each stage take, in seconds."""

    forward: tuple[float, ...]
    backward: tuple[float, ...] = ()
    """Empty without training."""
    exchange: float = 0.0
    source: str = "measured"
    """Where the times come from, in one word."""

    @property
    def typical(self) -> float:
        """The mean."""
        return sum((*self.forward, *self.backward)) / len((*self.forward, *self.backward)) or 1.0

    def of(self, action: Action) -> float:
        """The time of one action."""
        return (self.forward if action.kind is Kind.FORWARD else self.backward)[action.stage]

    def words(self, action: Action) -> str:
        """The time of one action in words."""
        return duration(self.of(action))

    def assumption(self, training: bool) -> str:
        """What the times of a table rest on, in words."""
        return self.source if training else f"{self.source}, no training"

    def of_stages(self) -> tuple[float, ...]:
        """How long each stage works for one micro-batch."""
        return tuple(map(sum, zip(self.forward, self.backward, strict=True))) if self.backward else self.forward

    def balance(self) -> float:
        """The mean time of a stage divided by the longest: 1 if all take the same."""
        times = self.of_stages()
        return sum(times) / (len(times) * max(times)) if max(times) else 1.0


def duration(seconds: float) -> str:
    """A time, in a unit in which it is short."""
    for unit, factor in (("µs", 1e6), ("ms", 1e3)):
        if seconds * factor < 1000:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds:.4g} s"


@dataclass(frozen=True, slots=True)
class Measures:
    """The numbers by which schedules are compared.

    >>> ipu.schedules.measure(ipu.schedules.Sequential().table(stages=2, micro_batches=1))
    Measures(ticks=4, time=6.0, bubble=0.5, live=(1, 1), stash=(0, 0))
    """

    ticks: int
    time: float
    bubble: float
    """The share of all devices' time in which they are idle."""
    live: tuple[int, ...]
    """Per stage, the most micro-batches that are between their forward and their backward at one time."""
    stash: tuple[int, ...]
    """Per stage, the most micro-batches that have to be stored: all live ones but the newest."""


def measure(table: Table, costs: Pace | None = None) -> Measures:
    """All measures of one table.

    >>> for schedule in (ipu.schedules.GPipe(), ipu.schedules.OneFOneB()):
    ...     print(ipu.schedules.measure(schedule.table(stages=4, micro_batches=8)))
    Measures(ticks=22, time=33.0, bubble=0.2727272727272727, live=(8, 8, 8, 8), stash=(7, 7, 7, 7))
    Measures(ticks=22, time=40.0, bubble=0.4, live=(4, 3, 2, 1), stash=(3, 2, 1, 0))
    """
    costs = costs or Costs()
    return Measures(table.ticks, total_time(table, costs), bubble(table, costs), live(table), stash(table))


def durations(table: Table, costs: Pace | None = None) -> list[float]:
    """How long each tick takes: as long as its busiest device, and the exchange after it."""
    costs = costs or Costs()
    return [
        max(sum(map(costs.of, cell)) for cell in column) + (costs.exchange if any(column) else 0.0)
        for column in table.columns()
    ]


def total_time(table: Table, costs: Pace | None = None) -> float:
    """How long the table takes.

    >>> ipu.schedules.total_time(ipu.schedules.GPipe().table(stages=2, micro_batches=2))
    9.0
    """
    return sum(durations(table, costs))


def bubble(table: Table, costs: Pace | None = None) -> float:
    """The share of all devices' time in which they are idle, between 0 and 1.

    >>> ipu.schedules.bubble(ipu.schedules.Sequential().table(stages=2, micro_batches=4))
    0.5
    """
    costs = costs or Costs()
    available = total_time(table, costs) * len(table.cells)
    work = sum(costs.of(action) for _, _, action in table.actions())
    return 1 - work / available if available else 0.0


def live(table: Table) -> tuple[int, ...]:
    """Per stage, the most micro-batches between their forward and their backward at one time; 0 without training.

    >>> ipu.schedules.live(ipu.schedules.OneFOneB().table(stages=4, micro_batches=8))
    (4, 3, 2, 1)
    """
    most = [0] * table.stages
    for action, held in _held(table):
        most[action.stage] = max(most[action.stage], held[action.stage])
    return tuple(most)


def stash(table: Table) -> tuple[int, ...]:
    """Per stage, the most older micro-batches that it holds while it runs a forward: the depth of its queue.

    >>> ipu.schedules.stash(ipu.schedules.OneFOneB().table(stages=4, micro_batches=8))
    (3, 2, 1, 0)
    """
    return tuple(max(0, most - 1) for most in live(table))


def live_on_devices(table: Table) -> tuple[int, ...]:
    """Per device, the most micro-batches that its stages hold together at one time.

    >>> ipu.schedules.live_on_devices(ipu.schedules.GPipe().table(stages=2, micro_batches=4, devices=[0, 0]))
    (8,)
    """
    most = [0] * len(table.cells)
    for action, held in _held(table):
        device = table.devices[action.stage]
        together = sum(count for count, at in zip(held, table.devices, strict=True) if at == device)
        most[device] = max(most[device], together)
    return tuple(most)


def _held(table: Table) -> Iterator[tuple[Action, list[int]]]:
    """Each action in order of time, with the number of micro-batches that each stage holds after it."""
    held = [0] * table.stages
    if table.training:
        for _, _, action in table.actions():
            held[action.stage] += 1 if action.kind is Kind.FORWARD else -1
            yield action, held
