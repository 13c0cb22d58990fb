"""Collects the facts about one run while it is under way.

The thread that runs it tells what it does (`doing`), what it launches and what it compiles. A second thread
(watcher.py) waits for each execution, so that the first one never waits for the sake of a report.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from . import watcher
from .bounded import Sampled
from .timeline import Interval, Timeline
from .values import CheckpointFacts, Event, Execution, Logged, PipelineFacts, Place, ProgramFacts, RunFacts, Timed

POINTS = 1000
"""The most executions, logs and checkpoints that a report shows."""
MOST_WARNINGS = 50
SETTLE = 1.0
"""How many seconds to wait at most for executions that should have ended."""
STOPS = ("trace", "lower", "compile", "call")
"""While the host does this, the clock stops that measures the time of a step."""


@dataclass(frozen=True, slots=True)
class _Mark:
    """The end of an execution: how far the run had come, and when, on the clock that stops."""

    steps: int
    samples: int
    seconds: float


@dataclass(slots=True, eq=False)
class _Used:
    """A program that the run has launched or compiled."""

    facts: ProgramFacts
    count: Callable[[], float] | None
    """Counts its operations, which takes as long as tracing it."""


class RunRecorder:
    """The facts about one run so far. It may be left and entered again, for calls that belong together."""

    def __init__(self, name: str, model: str) -> None:
        self.name, self.model, self.began = name, model, time.time()
        self._origin = time.perf_counter()
        self._lock = threading.RLock()
        self._line = Timeline()
        self._programs: dict[int, _Used] = {}
        self._place: Place | None = None
        self._pipeline: PipelineFacts | None = None
        self._launches = self._steps = self._samples = 0
        self._first: _Mark | None = None
        self._last: _Mark | None = None
        self._first_step: float | None = None
        self._only = 0.0
        self._seconds = self._stopped = 0.0
        self._stops = False
        self._executions: Sampled[Execution] = Sampled(POINTS)
        self._logged: Sampled[Logged] = Sampled(POINTS)
        self._checkpoints: Sampled[CheckpointFacts] = Sampled(POINTS)
        self._warnings: list[str] = []
        self._entered: float | None = None
        self._pending = 0
        self._open: list[Interval] = []
        self.ready: Callable[[], int] = lambda: 0
        """How many slabs were ready when that of the next launch was asked for."""
        self.failure: str | None = None
        """What ended the run, if it was not its end."""

    def now(self) -> float:
        """Seconds since the run began."""
        return time.perf_counter() - self._origin

    # --- what the running thread tells

    def enter(self) -> None:
        """The run begins, or goes on."""
        with self._lock:
            self._entered = self.now()
            self._line.begin("call", self._entered)

    def leave(self) -> None:
        """The run ends, or pauses."""
        with self._lock:
            now = self.now()
            while self._open:  # launches that have failed
                self._line.finish(self._open.pop(), now)
            self._line.end(0, now, f"{self.name} of {self.model}")
            self.ready = lambda: 0
            for used in self._programs.values():
                used.count = None  # it holds the program
            self._seconds, self._entered = self._seconds + now - (self._entered or 0.0), None

    def settle(self) -> None:
        """Wait a moment for executions that have just ended to be noted."""
        until = self.now() + SETTLE
        while self._pending and self.now() < until:
            time.sleep(1e-4)

    @contextlib.contextmanager
    def doing(self, kind: str, name: str = "") -> Iterator[None]:
        """Until the block ends, the thread does this."""
        with self._lock:
            depth = self._line.begin(kind, self.now())
            stops = kind in STOPS and not self._stops
            self._stops |= stops
        try:
            yield
        finally:
            with self._lock:
                seconds = self._line.end(depth, self.now(), name)
                if stops:
                    self._stopped, self._stops = self._stopped + seconds, False

    def launching(self) -> Interval:
        """An execution is about to be launched."""
        with self._lock:
            self._open.append(self._line.launch(self.now()))
            return self._open[-1]

    def launched(self, interval: Interval, value: Any, state: Any, steps: int, samples: int, own: bool) -> None:
        """The execution was launched, and returns this. `own` is False for those of calls inside this one."""
        due = self._logged.is_due and own and isinstance(value, Mapping)
        ready = self.ready()
        with self._lock:
            self._open.remove(interval)
            if own:
                self._launches += 1
                self._steps += steps
                self._samples += samples
            self._pending += 1
            at, seen = self._steps, self._samples

        def finished(logs: Mapping[str, Any] | None) -> None:
            with self._lock:
                self._line.finish(interval, self.now())
                self._pending -= 1
                if own:
                    self._note_end(interval, at, seen)
                    self._executions.add(Execution(interval.start, interval.end, steps, samples, ready))
                    if logs is None:
                        self._logged.skip()
                    else:
                        self._logged.add(Logged(at, numbers(logs)))

        watcher.watch(value, state, value if due else None, finished)

    def _note_end(self, interval: Interval, steps: int, samples: int) -> None:
        mark = _Mark(steps, samples, interval.end - self._stopped)
        if self._first is None:
            self._first, self._first_step = mark, interval.end
            self._only = interval.end - interval.start
        self._last = mark

    def used(self, number: int, facts: Callable[[], ProgramFacts], count: Callable[[], float] | None) -> None:
        """The program with this number was compiled or launched. Its facts are asked for once."""
        if number not in self._programs:
            with self.doing("reporting"):
                found = _Used(facts(), count)
            with self._lock:
                self._programs[number] = found

    def placed(self, place: Callable[[], Place], pipeline: Callable[[], PipelineFacts | None]) -> None:
        """Where the run takes place. Only the first answer counts."""
        if self._place is None:
            with self.doing("reporting"):
                self._place, self._pipeline = place(), pipeline()

    def warn(self, message: str) -> None:
        """The log warns of something."""
        if len(self._warnings) < MOST_WARNINGS:
            self._warnings.append(message)

    # --- what other threads tell

    def saved(self, step: int, seconds: float, size: int) -> None:
        """A checkpoint has just been written."""
        with self._lock:
            end = self.now()
            self._checkpoints.add(CheckpointFacts(step, end - seconds, seconds, size))
            self._line.note(Event("checkpoint", "checkpoints", end - seconds, end, f"step {step}"))

    # --- the result

    def count_operations(self) -> None:
        """Count the operations of all programs. Takes as long as tracing them."""
        for used in self._programs.values():
            if used.count is None:
                continue
            count, used.count = used.count, None
            with self.doing("reporting"):
                try:
                    used.facts = replace(used.facts, operations=count())
                except Exception as error:  # the run is worth more than this number
                    self.warn(f"The operations of {used.facts.name} could not be counted: {error}")

    def facts(self) -> RunFacts:
        """Everything that is known by now."""
        with self._lock:
            now = self.now()
            line, parts = self._line, self._line.passed(now)
            events = sorted((event for track in line.events.values() for event in track.items()), key=lambda e: e.start)
            return RunFacts(
                self.name, self.model, self._place, tuple(used.facts for used in self._programs.values()),
                self._pipeline, self._launches, self._steps, self._samples, self.began,
                self._seconds + (0.0 if self._entered is None else now - self._entered), parts,
                line.host.get("feed", 0.0), line.device_seconds, self._first_step, self._timed(),
                self._executions.items(), self._logged.items(), self._checkpoints.items(), tuple(events),
                tuple(self._warnings), self._entered is None, self.failure,
            )  # fmt: skip

    def _timed(self) -> Timed:
        first, last = self._first, self._last
        if first is None or last is None:
            return Timed(0, 0, 0.0, False)
        if last.steps == first.steps:
            return Timed(last.steps, last.samples, self._only, False)
        return Timed(last.steps - first.steps, last.samples - first.samples, last.seconds - first.seconds, True)


def numbers(logs: Mapping[str, Any]) -> dict[str, float | None]:
    """The logs that are single numbers, as JSON can hold them."""
    found = {name: float(value) for name, value in logs.items() if getattr(value, "ndim", 0) == 0 and _is_real(value)}
    return {name: value if math.isfinite(value) else None for name, value in found.items()}


def _is_real(value: object) -> bool:
    return isinstance(value, int | float) or getattr(getattr(value, "dtype", None), "kind", "V") in "biuf"
