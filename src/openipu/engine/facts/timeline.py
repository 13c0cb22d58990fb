"""Where the time of a run goes, moment by moment: what the host does, and when the devices compute."""

from __future__ import annotations

import math
from collections import defaultdict, deque
from dataclasses import dataclass, field

from .bounded import Ends
from .values import Event, TimeParts

EVENTS = 2000
"""How many events of each track a trace has from the start of a run, and again from its end."""
SHORTEST = 20e-6
"""Events of the host that take fewer seconds are not in the trace: there may be many of them, and none is seen."""

_PARTS = {"call": "other"}
"""Kinds that are not parts of the time of their own."""
_Event = tuple[str, str, float, float, str]
"""What an `Event` is made of. There are several for each launch, and tuples are made more quickly."""


@dataclass(slots=True, eq=False)
class Interval:
    """An execution on the devices. It lasts until `end`, which is infinite while it runs."""

    start: float
    end: float = math.inf


@dataclass(slots=True)
class Timeline:
    """Adds up the seconds of each kind, as they pass.

    The host's activities may be inside each other; time counts for the innermost. Time in which an execution runs
    counts for the devices instead. Executions follow each other, so one begins when the one before has ended.
    """

    parts: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    host: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    """The host's seconds of each kind, whether or not the devices computed."""
    device_seconds: float = 0.0
    _kinds: list[tuple[str, float]] = field(default_factory=list)
    """What the host is doing, from outside to inside, and since when."""
    _since: float = 0.0
    _running: deque[Interval] = field(default_factory=deque)
    _free_at: float = -math.inf
    """When the latest finished execution ended."""
    _noted: defaultdict[str, Ends[_Event]] = field(default_factory=lambda: defaultdict(lambda: Ends(EVENTS)))
    """The events of each track, for the trace."""

    def begin(self, kind: str, now: float) -> int:
        """The host begins something. Returns how many other things it is in the middle of."""
        self._pass(now)
        self._kinds.append((kind, now))
        return len(self._kinds) - 1

    def end(self, depth: int, now: float, name: str = "") -> float:
        """The host ends what it began at this depth. Returns how long that took.

        What it began inside has ended as well, even if Ctrl-C has kept it from saying so.
        """
        self._pass(now)
        kind, began = self._kinds[depth]
        del self._kinds[depth:]
        if now - began >= SHORTEST:
            self.note(kind, "host", began, now, name)
        return now - began

    def launch(self, now: float) -> Interval:
        """An execution begins."""
        execution = Interval(now)
        self._running.append(execution)
        return execution

    def finish(self, execution: Interval, now: float) -> None:
        """An execution has ended."""
        execution.start = max(execution.start, min(self._free_at, now))
        execution.end = now
        self._free_at = now
        self.device_seconds += now - execution.start
        self.note("execution", "devices", execution.start, now)

    def note(self, kind: str, track: str, start: float, end: float, name: str = "") -> None:
        """Keep an event for the trace."""
        self._noted[track].add((kind, track, start, end, name))

    def events(self) -> tuple[Event, ...]:
        """The first and the last events of each track, in order."""
        events = [Event(*event) for track in self._noted.values() for event in track.items()]
        return tuple(sorted(events, key=lambda event: event.start))

    def passed(self, now: float) -> TimeParts:
        """The seconds of each kind until now."""
        self._pass(now)
        return TimeParts(**self.parts)

    def _pass(self, now: float) -> None:
        """Account for the time since the last change."""
        start, self._since = self._since, now
        if not self._kinds or now <= start:
            return
        kind, busy, at = _PARTS.get(self._kinds[-1][0], self._kinds[-1][0]), 0.0, start
        for execution in self._running:
            begin, end = max(at, execution.start), min(now, execution.end)
            if end > begin:
                busy, at = busy + end - begin, end
        while self._running and self._running[0].end <= now:
            self._running.popleft()
        self.parts["device"] += busy
        self.parts[kind] += now - start - busy
        self.host[kind] += now - start
