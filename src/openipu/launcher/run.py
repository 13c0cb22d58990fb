"""Runs the instances of a job: all start together, and all end together."""

import queue
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final, TypeAlias

from .coordinator import coordinator
from .job import Job, name
from .lines import prefix, prefixed
from .output import Output
from .process import Ended, Process

Event: TypeAlias = Ended | signal.Signals | OSError
"""An instance has ended, the user wants to stop, or the output cannot be written."""
Events: TypeAlias = "queue.SimpleQueue[Event]"  # signal handlers may put something into this kind of queue

_STOPS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_END: Final = ((signal.SIGTERM, 3.0), (signal.SIGKILL, 2.0), (None, 2.0))
"""Signals for all that still run, and how many seconds to wait after each. None gives up those that do not answer."""
_INTERRUPT: Final = ((signal.SIGINT, 5.0), *_END)
_SSH_FAILED: Final = 255


@dataclass(frozen=True, slots=True)
class Ending:
    """How a job has ended."""

    code: int
    why: str | None = None
    """None if every instance has ended without an error."""
    failed: bool = True
    """Whether an instance or the output failed; False if the user stopped the job."""
    last: bytes = b""
    """The last lines of the instance that failed first."""


def run(job: Job) -> Ending:
    """Run a job to its end, with as many restarts as it allows."""
    events: Events = queue.SimpleQueue()
    output = Output(events.put)
    with _stops_become(events):
        for restarts in range(job.max_restarts + 1):
            why, again = _run_once(job, restarts, output, events)
            if not isinstance(why, Ended) or not again or restarts == job.max_restarts:
                break
            if not why.shown:
                output.write(_last_lines(job, why), error=True)
            output.say(f"restart {restarts + 1} of {job.max_restarts}: {describe(job, why)}")
    if why is None:
        return Ending(0)
    if isinstance(why, Ended):
        return Ending(why.code or 1, describe(job, why), last=_last_lines(job, why))
    if isinstance(why, signal.Signals):
        return Ending(128 + why, f"stopped by {why.name}", failed=False)
    return Ending(1, str(why))


def describe(job: Job, ended: Ended) -> str:
    """How an instance has failed, in one line."""
    who = name(job, ended.index)
    if not ended.started:
        return f"{who} could not be started"
    if ended.code > 128 and ended.code - 128 in set(signal.Signals):
        return f"{who} was killed by {signal.Signals(ended.code - 128).name}"
    if ended.code == _SSH_FAILED and job.hosts:
        return f"{who} failed with exit code {ended.code}, or the connection to it was lost"
    return f"{who} failed with exit code {ended.code}"


def _last_lines(job: Job, ended: Ended) -> bytes:
    return prefixed(ended.last, prefix(ended.index, job.instances))


@contextmanager
def _stops_become(events: Events) -> Iterator[None]:
    """Put signals that ask the launcher to stop among the events. Those that are ignored (nohup) stay ignored."""
    before = {number: signal.getsignal(number) for number in _STOPS}
    for number, handler in before.items():
        if handler is not signal.SIG_IGN:
            signal.signal(number, lambda number, _: events.put(signal.Signals(number)))
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _run_once(job: Job, restarts: int, output: Output, events: Events) -> tuple[Event | None, bool]:
    """Start all instances and wait for them. Returns what went wrong, if anything, and whether to try again."""
    with coordinator(job, stop=lambda: not events.empty()) as at:
        if at is None:
            return events.get(), False
        if isinstance(at, Ended):
            return at, True
        running: dict[int, Process] = {}
        try:
            for index in range(job.instances):
                running[index] = Process(job, job.instance(index, at, restarts), output, events.put)
        except OSError as problem:  # the system allows no more processes
            events.put(problem)
        why = _wait(running, events)
        return why, _end(running, events, _INTERRUPT if why is signal.SIGINT else _END)


def _wait(running: dict[int, Process], events: Events) -> Event | None:
    """Wait until all have ended. Returns at once if something goes wrong."""
    while running or not events.empty():
        event = events.get()
        if not isinstance(event, Ended) or _failed(event, running):
            return event
    return None


def _failed(ended: Ended, running: dict[int, Process]) -> bool:
    """Note that an instance has ended. Returns whether it failed."""
    running.pop(ended.index).close()
    return ended.code != 0 or not ended.started


def _end(running: dict[int, Process], events: Events, signals: Sequence[tuple[signal.Signals | None, float]]) -> bool:
    """End what still runs, and at once if Ctrl-C is pressed meanwhile. Returns whether all may be started again."""
    stopped = hurry = False
    for number, seconds in signals:
        if hurry and number in (signal.SIGINT, signal.SIGTERM):
            continue
        for process in running.values():
            process.abandon() if number is None else process.send(number)
        until = time.monotonic() + seconds
        while running and (left := until - time.monotonic()) > 0:
            try:
                event = events.get(timeout=left)
            except queue.Empty:
                break
            if isinstance(event, Ended):
                _failed(event, running)
            elif isinstance(event, signal.Signals):
                stopped = True
                if event is signal.SIGINT and not hurry:
                    hurry = True
                    break
    return not (stopped or running)
