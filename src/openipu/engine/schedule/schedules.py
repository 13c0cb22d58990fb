"""The schedules: frozen values with one pure method, `table`.

Grouped, Interleaved and Sequential come from the IPU API. In all three, a micro-batch that has entered goes through one
stage per tick without waiting. They differ in when the next one enters. GPipe and OneFOneB are known from elsewhere: in
each tick, every device runs the most urgent action that it can.
"""

from __future__ import annotations

import difflib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Final, Protocol

from openipu import _validate as validate

from .actions import Action, Kind, Table, backward, forward, journey


class Schedule(Protocol):
    """Anything with this method is a schedule. The table it returns is what is run, drawn, measured and checked.

    The schedule in this example sends `size` micro-batches through the pipeline forwards, then backwards, and then
    takes the next ones. Unlike that of GPipe, its memory does not grow with the number of micro-batches.

    >>> from dataclasses import dataclass
    >>> from openipu.schedules import Table, check, journey, validate
    >>> @dataclass(frozen=True)
    ... class Bursts:
    ...     size: int = 2
    ...
    ...     def table(self, stages, micro_batches, devices=None, training=True):
    ...         devices = check(stages, micro_batches, devices, multiple=self.size, name="Bursts")
    ...         half, ticks = self.size + stages - 1, {}
    ...         for m in range(micro_batches):
    ...             start = m // self.size * half * (2 if training else 1) + m % self.size
    ...             for k, action in enumerate(journey(stages, m, training)):
    ...                 ticks[action] = start + k + (half - stages if k >= stages else 0)
    ...         return Table.at(ticks, devices, training)
    >>> print(validate(Bursts().table(stages=2, micro_batches=4)))
    tick      0     1     2     3     4     5     6     7     8     9     10    11
    device 0  F0:0  F0:1  -     -     B0:0  B0:1  F0:2  F0:3  -     -     B0:2  B0:3
    device 1  -     F1:0  F1:1  B1:0  B1:1  -     -     F1:2  F1:3  B1:2  B1:3  -
    """

    def table(
        self, stages: int, micro_batches: int, devices: Sequence[int] | None = None, training: bool = True
    ) -> Table:
        """The table of one update. `devices` is the device of each stage; by default every stage has its own."""
        ...


_OPTIONS = "`gradient_accumulation_steps_per_replica` in training, `steps_per_execution` in evaluate and predict"


def check(
    stages: int,
    micro_batches: int,
    devices: Sequence[int] | None = None,
    multiple: int = 1,
    name: str = "The schedule",
    option: str = _OPTIONS,
) -> tuple[int, ...]:
    """The device of each stage. Raises if one of the numbers is impossible, and says what is possible instead.

    `option` tells users, in errors, where they set the number of micro-batches.

    >>> ipu.schedules.check(stages=4, micro_batches=8, devices=[0, 1, 1, 0])
    (0, 1, 1, 0)
    """
    if validate.count("stages", stages) < 2:
        raise ValueError(
            f"A pipeline has at least 2 stages, but this one has {stages}. Split the model into more stages, or run it "
            "without pipelining."
        )
    validate.count("micro_batches", micro_batches)
    if micro_batches % multiple:
        raise ValueError(
            f"{name} with {stages} stages needs a multiple of {multiple} micro-batches, not {micro_batches}. "
            f"Use {' or '.join(map(str, _neighbours(micro_batches, multiple)))} "
            f"({option})."
        )
    return tuple(range(stages)) if devices is None else check_devices(stages, devices)


def check_devices(stages: int, devices: Sequence[int]) -> tuple[int, ...]:
    """The device of each stage. Raises if the devices are wrong."""
    devices = tuple(devices)
    if len(devices) != stages:
        raise ValueError(
            f"{len(devices)} devices are given for {stages} stages: {list(devices)}. Give one device for every stage."
        )
    return tuple(validate.count(f"devices[{stage}]", device, least=0) for stage, device in enumerate(devices))


def micro_batch_multiple(schedule: Schedule, devices: Sequence[int], training: bool) -> int:
    """The number of micro-batches has to be a multiple of this; 1 if the schedule does not say."""
    overlap: Callable[[int, Sequence[int], bool], int] | None = getattr(schedule, "overlap", None)
    return 1 if overlap is None else overlap(len(devices), devices, training)


def _neighbours(number: int, multiple: int) -> list[int]:
    """The nearest multiples below and above a number, without 0."""
    below = number // multiple * multiple
    return [near for near in (below, below + multiple) if near]


@dataclass(frozen=True, slots=True)
class _Steady(ABC):
    """Micro-batches that never wait: micro-batch m enters at tick T(m) and runs part k of its journey at tick T(m) + k.

    A journey has K parts. In every K ticks, L micro-batches enter, always at the same offsets.
    """

    def table(
        self, stages: int, micro_batches: int, devices: Sequence[int] | None = None, training: bool = True
    ) -> Table:
        """The table of one update. `devices` is the device of each stage; by default every stage has its own."""
        offsets = self._offsets(check(stages, 1, devices), training)
        devices = check(stages, micro_batches, devices, len(offsets), type(self).__name__)
        ticks: dict[Action, int] = {}
        for micro_batch in range(micro_batches):
            period, i = divmod(micro_batch, len(offsets))
            parts = journey(stages, micro_batch, training)
            ticks.update((part, period * len(parts) + offsets[i] + k) for k, part in enumerate(parts))
        return Table.at(ticks, devices, training, one_at_a_time=self._one_at_a_time)

    def overlap(self, stages: int, devices: Sequence[int] | None = None, training: bool = True) -> int:
        """L, the number of micro-batches under way at once. The total number has to be a multiple of it."""
        return len(self._offsets(check(stages, 1, devices), training))

    @abstractmethod
    def _offsets(self, devices: Sequence[int], training: bool) -> tuple[int, ...]:
        """The ticks among the first K at which a micro-batch enters."""

    @property
    def _one_at_a_time(self) -> bool:
        return True


def _route(devices: Sequence[int], training: bool) -> list[int]:
    """The device of every part of a journey."""
    return [devices[part.stage] for part in journey(len(devices), 0, training)]


@dataclass(frozen=True, slots=True)
class Grouped(_Steady):
    """A micro-batch enters in every tick, and every stage runs a forward and a backward in each: the smallest bubble.

    A device runs the backward of an older micro-batch and the forward of a newer one in the same tick. Stage s of S
    holds 2 (S - s) - 1 micro-batches. The number of micro-batches is a multiple of 2 S in training and of S otherwise.

    >>> print(ipu.schedules.Grouped().table(stages=2, micro_batches=4))
    tick      0     1     2          3          4          5     6
    device 0  F0:0  F0:1  F0:2       B0:0,F0:3  B0:1       B0:2  B0:3
    device 1  -     F1:0  B1:0,F1:1  B1:1,F1:2  B1:2,F1:3  B1:3  -
    """

    def _offsets(self, devices: Sequence[int], training: bool) -> tuple[int, ...]:
        return tuple(range(len(_route(devices, training))))

    @property
    def _one_at_a_time(self) -> bool:
        return False


@dataclass(frozen=True, slots=True)
class Interleaved(_Steady):
    """A device runs one action per tick, forwards and backwards in turn: half the memory of Grouped, in more time.

    Micro-batches enter as often as possible without a device having to run two stages in one tick: in training, every
    second tick. Stage s of S holds S - s micro-batches. The number of micro-batches is a multiple of S, or of less
    where devices are shared.

    >>> print(ipu.schedules.Interleaved().table(stages=2, micro_batches=2))
    tick      0     1     2     3     4     5
    device 0  F0:0  -     F0:1  B0:0  -     B0:1
    device 1  -     F1:0  B1:0  F1:1  B1:1  -
    """

    def _offsets(self, devices: Sequence[int], training: bool) -> tuple[int, ...]:
        if training and len(set(devices)) < len(devices):
            raise NotImplementedError(
                f"Interleaved can only train with every stage on a device of its own, but some of the {len(devices)} "
                f"stages share one: {list(devices)}. Use Grouped, OneFOneB or Sequential, or more devices."
            )
        return _circular_union(_route(devices, training))


def _circular_union(route: Sequence[int]) -> tuple[int, ...]:
    """As many offsets as possible, taken greedily from 0, at which repeated copies of a route never share a device."""
    length = len(route)
    meet = {
        (there - here) % length
        for here in range(length)
        for there in range(length)
        if here != there and route[here] == route[there]
    }
    offsets: list[int] = []
    for offset in range(length):
        if not any(offset - other in meet for other in offsets):
            offsets.append(offset)
    return tuple(offsets)


@dataclass(frozen=True, slots=True)
class Sequential(_Steady):
    """A micro-batch enters when the one before has finished: one device works at a time, with the least memory.

    It holds one micro-batch, takes any number of them, and allows any stages on any devices.

    >>> print(ipu.schedules.Sequential().table(stages=2, micro_batches=2))
    tick      0     1     2     3     4     5     6     7
    device 0  F0:0  -     -     B0:0  F0:1  -     -     B0:1
    device 1  -     F1:0  B1:0  -     -     F1:1  B1:1  -
    """

    def _offsets(self, devices: Sequence[int], training: bool) -> tuple[int, ...]:  # noqa: ARG002
        return (0,)


@dataclass(frozen=True, slots=True)
class _Urgent(ABC):
    """In each tick, every device runs the most urgent action whose inputs are there and which the schedule admits.

    A backward is more urgent than a forward, and an older micro-batch is more urgent than a newer one. Micro-batches
    keep their order, so gradients are added up in the same order as on one device.
    """

    def table(
        self, stages: int, micro_batches: int, devices: Sequence[int] | None = None, training: bool = True
    ) -> Table:
        """The table of one update. `devices` is the device of each stage; by default every stage has its own."""
        devices = check(stages, micro_batches, devices, name=type(self).__name__)
        progress = _Progress(micro_batches, [0] * stages, [0] * stages, training)
        ticks: dict[Action, int] = {}
        for tick in count():
            chosen: dict[int, Action] = {}
            for action in progress.ready():
                if not training or self._admits(action, progress):
                    chosen.setdefault(devices[action.stage], action)
            # The oldest micro-batch can always continue, so if nothing can run, everything is done.
            if not chosen:
                break
            ticks.update(dict.fromkeys(chosen.values(), tick))
            progress.advance(chosen.values())
        return Table.at(ticks, devices, training)

    @abstractmethod
    def _admits(self, action: Action, progress: _Progress) -> bool:
        """Whether an action whose inputs are there may run, in training."""


@dataclass(frozen=True, slots=True)
class _Progress:
    """How many micro-batches have passed each stage."""

    micro_batches: int
    forwards: list[int]
    backwards: list[int]
    training: bool

    def ready(self) -> Iterator[Action]:
        """The actions whose inputs are there, the most urgent first."""
        last = len(self.forwards) - 1
        for stage, done in sorted(enumerate(self.backwards), key=lambda item: item[1]) if self.training else ():
            if done < (self.forwards[last] if stage == last else self.backwards[stage + 1]):
                yield backward(stage, done)
        # The next micro-batch of a later stage is older.
        for stage in reversed(range(last + 1)):
            done = self.forwards[stage]
            if done < (self.forwards[stage - 1] if stage else self.micro_batches):
                yield forward(stage, done)

    def advance(self, actions: Iterable[Action]) -> None:
        """Count the actions that have run in a tick."""
        for action in actions:
            counts = self.forwards if action.kind is Kind.FORWARD else self.backwards
            counts[action.stage] += 1


@dataclass(frozen=True, slots=True)
class GPipe(_Urgent):
    """All forwards, then all backwards: the bubble of Grouped, but every stage holds all micro-batches at once.

    >>> print(ipu.schedules.GPipe().table(stages=2, micro_batches=2))
    tick      0     1     2     3     4     5
    device 0  F0:0  F0:1  -     -     B0:0  B0:1
    device 1  -     F1:0  F1:1  B1:0  B1:1  -
    """

    def _admits(self, action: Action, progress: _Progress) -> bool:
        return action.kind is Kind.FORWARD or min(progress.forwards) == progress.micro_batches


@dataclass(frozen=True, slots=True)
class OneFOneB(_Urgent):
    """1F1B: a few forwards, then one backward and one forward in turn, each as early as possible.

    Stage s of S never holds more than S - s micro-batches. It takes any number of micro-batches, and allows any stages
    on any devices.

    >>> print(ipu.schedules.OneFOneB().table(stages=2, micro_batches=2))
    tick      0     1     2     3     4     5
    device 0  F0:0  F0:1  -     B0:0  -     B0:1
    device 1  -     F1:0  B1:0  F1:1  B1:1  -
    """

    def _admits(self, action: Action, progress: _Progress) -> bool:
        held = progress.forwards[action.stage] - progress.backwards[action.stage]
        return action.kind is Kind.BACKWARD or held < len(progress.forwards) - action.stage


BUILT_IN: Final[tuple[Schedule, ...]] = (Grouped(), Interleaved(), Sequential(), GPipe(), OneFOneB())
"""The schedules that have a name. The first is the default."""


def by_name(name: str) -> Schedule:
    """The schedule of that name, in any spelling: `"Grouped"`, `"one_f_one_b"`, `"1F1B"`.

    >>> ipu.schedules.by_name("1F1B")
    OneFOneB()
    """
    known = {_plain(type(schedule).__name__): schedule for schedule in BUILT_IN}
    known["1f1b"] = known["onefoneb"]
    plain = _plain(name)
    if plain in known:
        return known[plain]
    names = [type(schedule).__name__ for schedule in BUILT_IN]
    near = difflib.get_close_matches(plain, known, n=1, cutoff=0.5)
    hint = f"Did you mean {type(known[near[0]]).__name__!r}?" if near else "Use one of them."
    raise ValueError(f"There is no schedule {name!r}, only {', '.join(names)}. {hint}")


def _plain(name: str) -> str:
    return name.lower().replace("_", "").replace("-", "").replace(" ", "")
