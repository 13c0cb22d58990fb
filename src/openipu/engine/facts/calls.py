"""Which run is being recorded in this thread, if any, and who wants to know about it.

Everything that a run tells goes through `current()` or `doing(...)`. Both are a single check if nothing is recorded.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import TypeVar

from .recorder import RunRecorder

T = TypeVar("T")
log = logging.getLogger("openipu")

MOST_RUNS = 64
"""After so many runs, calls of the same kind are added up."""


class Recording:
    """The runs that somebody wants to know about."""

    def __init__(self) -> None:
        self.runs: list[RunRecorder] = []
        self._keys: dict[tuple[str, str, int], RunRecorder] = {}

    def run_of(self, name: str, model: str, together: bool) -> RunRecorder:
        """The recorder for a call: a new one, unless calls of this kind are added up."""
        key = (name, model, threading.get_ident())
        known = self._keys.get(key)
        if known is not None and (together or len(self.runs) >= MOST_RUNS):
            return known
        run = self._keys[key] = RunRecorder(name, model)
        self.add(run)
        return run

    def add(self, run: RunRecorder) -> None:
        """Take part in a run."""
        if run not in self.runs:
            self.runs.append(run)

    def changed(self) -> None:
        """Called when a run has ended or failed."""


recordings: list[Recording] = []
"""The recordings that want to know about all runs of the process."""


class _Local(threading.local):
    run: RunRecorder | None = None
    depth: int = 0
    """How many calls this thread is in."""
    begun: int = 0
    """At which depth the run began."""
    wanted: tuple[Recording, ...] = ()
    """Who wants to know about the run."""


_local = _Local()
_nothing: AbstractContextManager[None] = contextlib.nullcontext()


def current() -> RunRecorder | None:
    """The run that is recorded in this thread, or None."""
    return _local.run


def is_own() -> bool:
    """Whether this thread is in a call itself, not in one that is inside another."""
    return _local.depth <= _local.begun


def doing(kind: str, name: str = "") -> AbstractContextManager[None]:
    """Until the block ends, this thread does what `kind` says."""
    run = _local.run
    return _nothing if run is None else run.doing(kind, name)


def feeding(items: Iterator[T]) -> Iterator[T]:
    """The same items. The time to make them is recorded."""
    return items if _local.run is None else _fed(items)


def _fed(items: Iterator[T]) -> Iterator[T]:
    made: list[T] = []
    while True:
        with doing("feed"):
            try:
                made.append(next(items))
            except StopIteration:
                return
        yield made.pop()  # not kept here, because it may be large


@contextlib.contextmanager
def recorded(name: str, model: str, together: bool = False, also: Recording | None = None) -> Iterator[None]:
    """Until the block ends, this call runs. A call inside another one belongs to that one.

    `together` adds up the calls of the same name. `also` is a recording that wants to know about this call.
    """
    _local.depth += 1
    try:
        if _local.run is not None:
            with _local.run.doing("call", f"{name} of {model}"):
                yield
            return
        _begin(name, model, together, (*recordings, *(() if also is None else (also,))))
        failure: str | None = None
        try:
            yield
        except BaseException as error:
            failure = words(error)
            raise
        finally:
            _end(failure, together)
    finally:
        _local.depth -= 1


def join(recording: Recording, name: str, model: str) -> None:
    """Let a recording know about the call in which this thread is, from now on if nobody else wanted to know."""
    if _local.run is None:
        _begin(name, model, False, (recording,))
    elif recording not in _local.wanted:
        recording.add(_local.run)
        _local.wanted = (*_local.wanted, recording)


def _begin(name: str, model: str, together: bool, wanted: tuple[Recording, ...]) -> None:
    if not wanted:
        return
    run = wanted[0].run_of(name, model, together)
    for other in wanted[1:]:
        other.add(run)
    _local.run, _local.wanted, _local.begun = run, wanted, _local.depth
    log.addFilter(_note_warning)  # a handler would replace the one that prints warnings
    run.enter()


def _end(failure: str | None, together: bool) -> None:
    run = _local.run
    if run is None:
        return
    try:
        run.failure = failure or run.failure
        if failure is None:
            run.count_operations()
            if not together:  # a single step is no measure of anything
                run.time_stages()
    finally:
        wanted = _local.wanted
        _local.run, _local.wanted = None, ()
        if not together:  # calls of single steps do not wait for their executions
            run.settle()
        run.leave()
    if failure is not None or not together:
        for recording in wanted:
            recording.changed()


def _note_warning(record: logging.LogRecord) -> bool:
    """Passes a warning of the log on to the run of this thread. Lets every message through."""
    if record.levelno >= logging.WARNING and _local.run is not None:
        _local.run.warn(record.getMessage())
    return True


def words(error: BaseException) -> str:
    """An error in words, on one line."""
    text = " ".join(str(error).split())
    if isinstance(error, KeyboardInterrupt):
        return "KeyboardInterrupt: Ctrl-C was pressed"
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
