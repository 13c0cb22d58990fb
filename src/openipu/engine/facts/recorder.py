"""Collects the facts about one run while it is under way.

The thread that runs it tells what it does (`doing`), what it launches and what it compiles. Whenever it does so, and
now and then in a second thread (watcher.py), the executions are looked at. So nothing waits for the sake of a report.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from . import watcher
from .bounded import Sampled
from .costs import Counted, Peak, named
from .timeline import Interval, Timeline
from .values import (
    CheckpointFacts,
    Execution,
    Logged,
    MeasuredStages,
    PipelineFacts,
    Place,
    ProgramFacts,
    RunFacts,
    Timed,
)

POINTS = 1000
"""The most executions, logs and checkpoints that a report shows."""
MOST_WARNINGS = 50
SETTLE = 1.0
"""How many seconds to wait at most for executions that should have ended."""
STOPS = ("trace", "lower", "compile", "call")
"""While the host does this, the clock stops that measures the time of a step."""


StageTiming = Callable[[], MeasuredStages]
"""Times the stages of a pipeline, which compiles a program and takes about a second."""


class _Mark(NamedTuple):
    """The end of an execution: how far the run had come, and when, on the clock that stops."""

    steps: int
    samples: int
    seconds: float


@dataclass(slots=True, eq=False)
class _Used:
    """A program that the run has launched or compiled."""

    facts: ProgramFacts
    count: Callable[[], Counted] | None
    """Counts its operations, which takes as long as tracing it."""


class _Running(NamedTuple):
    """An execution that has been launched, and how far the run is when it has ended."""

    interval: Interval
    array: Any
    """Is there when the execution has ended."""
    logs: Mapping[str, Any] | None
    own: bool
    counts: tuple[int, int, int]
    """Its own steps and samples, and the slabs that were ready."""
    steps: int
    samples: int


class RunRecorder:
    """The facts about one run so far. It may be left and entered again, for calls that belong together."""

    def __init__(self, name: str, model: str) -> None:
        self.name, self.model, self.began = name, model, time.time()
        self._origin = time.perf_counter()
        self._lock, self._reading = threading.RLock(), threading.Lock()
        self._line = Timeline()
        self._programs: dict[int, _Used] = {}
        self._place: Place | None = None
        self._pipeline: PipelineFacts | None = None
        self._timing: StageTiming | None = None
        self._launches = self._steps = self._samples = 0
        self._first: _Mark | None = None
        self._last: _Mark | None = None
        self._first_step: float | None = None
        self._only = 0.0
        self._seconds = self._stopped = 0.0
        self._stops = False
        self._executions: Sampled[tuple[float, float, int, int, int]] = Sampled(POINTS)
        self._logged: Sampled[Logged] = Sampled(POINTS)
        self._checkpoints: Sampled[CheckpointFacts] = Sampled(POINTS)
        self._warnings: list[str] = []
        self._entered: float | None = None
        self._running: deque[_Running] = deque()
        self._unread: list[tuple[int, Mapping[str, Any]]] = []
        self._open: list[Interval] = []
        self.ready: Callable[[], int] = lambda: 0
        """How many slabs were ready when that of the next launch was asked for."""
        self.failure: str | None = None
        """What ended the run, if it was not its end."""
        self.peak: Peak | None = None
        """What the devices can do, if somebody has measured it."""

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
            self._notice(now)
            while self._open:  # launches that have failed
                self._line.finish(self._open.pop(), now)
            self._line.end(0, now, f"{self.name} of {self.model}")
            self.ready = lambda: 0
            for used in self._programs.values():
                used.count = None  # it holds the program
            self._timing = None
            self._seconds, self._entered = self._seconds + now - (self._entered or 0.0), None

    def settle(self) -> None:
        """Wait a moment for executions that should have ended, and read the logs that they leave."""
        until = self.now() + SETTLE
        while self._running and self.now() < until:
            self.look()
            time.sleep(1e-4)
        self.look()

    def doing(self, kind: str, name: str = "") -> AbstractContextManager[None]:
        """Until the block ends, the thread does this."""
        return _Doing(self, kind, name)

    def begin(self, kind: str) -> tuple[int, bool]:
        """The thread begins to do this. Returns what `end` wants to know."""
        with self._lock:
            now = self.now()
            self._notice(now)
            stops = kind in STOPS and not self._stops
            self._stops |= stops
            return self._line.begin(kind, now), stops

    def end(self, depth: int, stops: bool, name: str) -> None:
        """The thread has done what it began at this depth."""
        with self._lock:
            seconds = self._line.end(depth, self.now(), name)
            if stops:
                self._stopped, self._stops = self._stopped + seconds, False

    def launching(self) -> Interval:
        """An execution is about to be launched."""
        with self._lock:
            now = self.now()
            self._notice(now)
            self._open.append(self._line.launch(now))
            return self._open[-1]

    def launched(self, interval: Interval, value: Any, state: Any, steps: int, samples: int, own: bool) -> None:
        """The execution was launched, and returns this. `own` is False for those of calls inside this one."""
        kept = smallest(value, state)
        with self._lock:
            self._open.remove(interval)
            if own:
                self._launches += 1
                self._steps += steps
                self._samples += samples
            logs = value if own and isinstance(value, Mapping) and self._logged.is_due else None
            counts = steps, samples, self.ready()
            self._running.append(_Running(interval, kept, logs, own, counts, self._steps, self._samples))
        watcher.watch(self)

    # --- what is noticed later

    def look(self) -> float | None:
        """Note what has ended. Returns the age of the oldest execution that has not, in seconds; None if all have."""
        with self._reading:
            with self._lock:
                now = self.now()
                self._notice(now)
                age = now - self._running[0].interval.start if self._running else None
                unread, self._unread = self._unread, []
            for step, logs in unread:  # this may wait for a copy from the device, but the run does not
                read = Logged(step, numbers(logs))
                with self._lock:
                    self._logged.add(read)
        return age

    def _notice(self, now: float) -> None:
        """Note the executions that have ended by now. Called whenever something else is noted: it is quick."""
        while self._running and has_ended(self._running[0].array):
            done = self._running.popleft()
            interval = done.interval
            self._line.finish(interval, now)
            if not done.own:
                continue
            mark = _Mark(done.steps, done.samples, now - self._stopped)
            if self._first is None:
                self._first, self._first_step, self._only = mark, now, now - interval.start
            self._last = mark
            self._executions.add((interval.start, now, *done.counts))
            if done.logs is None:
                self._logged.skip()
            else:
                self._unread.append((done.steps, done.logs))

    def used(self, number: int, facts: Callable[[], ProgramFacts], count: Callable[[], Counted] | None) -> None:
        """The program with this number was compiled or launched. Its facts are asked for once."""
        if number not in self._programs:
            with self.doing("reporting"):
                found = _Used(facts(), count)
            with self._lock:
                self._programs[number] = found

    def placed(
        self,
        place: Callable[[], Place],
        pipeline: Callable[[], PipelineFacts | None],
        timing: Callable[[], StageTiming | None] = lambda: None,
    ) -> None:
        """Where the run takes place, and how its stages can be timed. Only the first answer counts."""
        if self._place is None:
            with self.doing("reporting"):
                self._place, self._pipeline, self._timing = place(), pipeline(), timing()

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
            self._line.note("checkpoint", "checkpoints", end - seconds, end, f"step {step}")

    # --- the result

    def count_operations(self) -> None:
        """Count the operations of all programs. Takes as long as tracing them."""
        for used in self._programs.values():
            if used.count is None:
                continue
            count, used.count = used.count, None
            with self.doing("reporting"):
                try:
                    used.facts = _with(used.facts, count())
                except Exception as error:  # the run is worth more than this number
                    self.warn(f"The operations of {used.facts.name} could not be counted: {error}")

    def wants_peak(self) -> tuple[str, int, str] | None:
        """The platform, the number of devices and the dtype for which a peak would say something, if any."""
        place = self._place
        dtypes = [used.facts.counted.dtype for used in self._programs.values() if used.facts.counted is not None]
        dtype = next((dtype for dtype in dtypes if dtype), None)
        if self.peak is not None or place is None or dtype is None or self._entered is not None:
            return None
        return place.platform, place.replicas * place.devices, dtype

    def time_stages(self) -> None:
        """Time the stages of the pipeline, if there is one. Takes as long as compiling it, and about a second more."""
        timing, self._timing = self._timing, None
        if timing is None or self._pipeline is None:
            return
        with self.doing("reporting"):
            try:
                self._pipeline = replace(self._pipeline, measured=timing())
            except Exception as error:  # the run is worth more than these numbers
                self.warn(f"The stages could not be timed: {error}")

    def facts(self) -> RunFacts:
        """Everything that is known by now."""
        with self._lock:
            now = self.now()
            line, parts = self._line, self._line.passed(now)
            return RunFacts(
                self.name, self.model, self._place, tuple(used.facts for used in self._programs.values()),
                self._pipeline, self._launches, self._steps, self._samples, self.began,
                self._seconds + (0.0 if self._entered is None else now - self._entered), parts,
                line.host.get("feed", 0.0), line.device_seconds, self._first_step, self._timed(),
                tuple(Execution(*one) for one in self._executions.items()),
                self._logged.items(), self._checkpoints.items(), line.events(),
                tuple(self._warnings), self._entered is None, self.failure, self.peak,
            )  # fmt: skip

    def _timed(self) -> Timed:
        first, last = self._first, self._last
        if first is None or last is None:
            return Timed(0, 0, 0.0, False)
        if last.steps == first.steps:
            return Timed(last.steps, last.samples, self._only, False)
        return Timed(last.steps - first.steps, last.samples - first.samples, last.seconds - first.seconds, True)


class _Doing:
    """A block in which a thread does something. Not a generator, because there are several for each launch."""

    __slots__ = ("_began", "_kind", "_name", "_run")

    def __init__(self, run: RunRecorder, kind: str, name: str) -> None:
        self._run, self._kind, self._name = run, kind, name
        self._began = 0, False

    def __enter__(self) -> None:
        self._began = self._run.begin(self._kind)

    def __exit__(self, *_: object) -> None:
        self._run.end(*self._began, self._name)


def _with(facts: ProgramFacts, counted: Counted) -> ProgramFacts:
    """The facts about a program, with its costs and the layers that its weights belong to."""
    buffers = None if facts.buffers is None else named(facts.buffers, counted.owners)
    return replace(facts, counted=counted, buffers=buffers)


def smallest(value: Any, state: Any) -> Any:
    """The smallest of the arrays that an execution returns. All are there at the same time, and others may be large."""
    first = next(iter(value.values()), None) if isinstance(value, dict) else None
    if getattr(first, "ndim", 1) == 0 and hasattr(first, "is_ready"):  # logs: this saves the time to look at all
        return first
    import jax

    arrays = [leaf for leaf in jax.tree.leaves(value) if hasattr(leaf, "is_ready")] or jax.tree.leaves(state)
    return min(arrays, key=lambda array: array.nbytes, default=None)


def has_ended(array: Any) -> bool:
    """Whether the execution that returns this array has ended, or has failed, or another one has taken the array."""
    try:
        return bool(array.is_ready())
    except Exception:  # an array of NumPy, one that has been taken, or none
        return True


def numbers(logs: Mapping[str, Any]) -> dict[str, float | None]:
    """The logs that are single numbers, as JSON can hold them."""
    single = {name: value for name, value in logs.items() if getattr(value, "ndim", 0) == 0 and _is_real(value)}
    found = {name: float(np.asarray(value)) for name, value in single.items()}  # JAX's own `float` takes longer
    return {name: value if math.isfinite(value) else None for name, value in found.items()}


def _is_real(value: object) -> bool:
    return isinstance(value, int | float) or getattr(getattr(value, "dtype", None), "kind", "V") in "biuf"
