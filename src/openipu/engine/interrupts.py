"""Ctrl-C: where it is let through, and where it has to wait.

While `fit` runs, the state of a model is at times neither in its variables nor in a program, and Keras and JAX are at
times in the middle of a trace. An exception at such a moment would lose weights or leave Keras broken. So calls hold
Ctrl-C back (`uninterrupted`), and let it through where nothing can be lost: while the user's own code runs
(`interruptible`), and while the main thread waits (`wait_until`, `in_thread`). A wait in C++ would not hear it at all.

A second press is for people who do not want to wait any longer: it is let through wherever it comes, unless the region
that holds it back is a short one in which weights could be lost. Python handles signals in the main thread, so in other
threads all of this does nothing.
"""

from __future__ import annotations

import atexit
import contextlib
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import FrameType, TracebackType
from typing import Any, Generic, TypeVar

T = TypeVar("T")

LONG = 5.0
"""For how many seconds a second press is held back where weights could be lost."""
SHORT = 0.3
"""The same where only the time to finish a trace could be saved."""
TWICE = 0.1
"""Two signals within so many seconds are one press. Programs that start others often pass a signal on once more."""
LISTEN = 0.05
"""How often, in seconds, a waiting main thread looks whether Ctrl-C was pressed."""


class _Region:
    """A block that holds Ctrl-C back or lets it through. Its methods are short: each callback of a step is in one."""

    __slots__ = ("depth", "lets_through", "patience", "raised")

    def __init__(self, patience: float, lets_through: bool) -> None:
        self.patience, self.lets_through = patience, lets_through
        self.raised = False  # whether a press has raised here, and the exception has to leave undisturbed
        self.depth: int | None = None

    @property
    def is_open(self) -> bool:
        return self.lets_through and not self.raised

    def __enter__(self) -> None:
        if threading.get_ident() == threading.main_thread().ident:
            self.depth = _presses.enter(self)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.depth is not None:
            _presses.leave(self, self.depth, error)


@dataclass(slots=True)
class _Presses:
    """What happens to Ctrl-C: a stack of regions, of which the innermost decides."""

    regions: list[_Region] = field(default_factory=list)
    before: Callable[[int, FrameType | None], object] = signal.default_int_handler
    """The user's handler."""
    held: int | None = None
    """The signal that waits, if one does."""
    last: float = float("-inf")
    """When the last press came."""
    since: float = 0.0
    """When the press came that waits."""

    def handle(self, number: int, frame: FrameType | None) -> None:
        """Called by Python when Ctrl-C was pressed."""
        now = time.monotonic()
        region = self.regions[-1] if self.regions else None
        again = now - self.last < TWICE
        self.last = self.last if again else now
        if region is not None and region.is_open:
            region.raised = True
            self.before(number, frame)
        elif self.held is None and not again:
            self.held, self.since = number, now
        elif region is not None and not again and now - self.since >= region.patience:
            self.deliver(frame)

    def deliver(self, frame: FrameType | None = None) -> None:
        """Let the press through that waits, if one does."""
        number, self.held = self.held, None
        if number is not None:
            self.before(number, frame)

    def enter(self, region: _Region) -> int | None:
        """Begin a region, and return its depth. None if there is nothing to do."""
        if not self.regions:
            current = signal.getsignal(signal.SIGINT)
            if region.lets_through or not callable(current):
                return None
            # From the second line on, a press only waits, so nothing is left half done.
            self.before, self.held, self.last = current, None, float("-inf")
            signal.signal(signal.SIGINT, self.handle)
        elif region.lets_through and self.held is not None:
            self.deliver()
        self.regions.append(region)
        return len(self.regions) - 1

    def leave(self, region: _Region, depth: int, error: BaseException | None) -> None:
        """End a region, and those inside it that could not be ended."""
        del self.regions[depth:]
        if self.regions:
            if region.lets_through or not self.regions[-1].is_open:
                return  # a press waits for the next place where it can be let through
        elif signal.getsignal(signal.SIGINT) == self.handle:
            signal.signal(signal.SIGINT, self.before)
        if isinstance(error, KeyboardInterrupt):
            self.held = None
        if self.held is not None:
            self.deliver()


_presses = _Presses()


def uninterrupted(patience: float = LONG) -> contextlib.AbstractContextManager[None]:
    """Hold Ctrl-C back until the block ends, or until it is pressed again after `patience` seconds."""
    return _Region(patience, lets_through=False)


def interruptible() -> contextlib.AbstractContextManager[None]:
    """Let Ctrl-C through, inside a block that holds it back: what was pressed before, and what is pressed now."""
    return _Region(SHORT, lets_through=True)


def let_through() -> None:
    """Let Ctrl-C through if it was pressed and waits."""
    if _presses.held is not None and threading.current_thread() is threading.main_thread():
        _presses.deliver()


def interruptibly(items: Iterator[T]) -> Iterator[T]:
    """The same items. Ctrl-C is let through while the next one is made."""
    made: list[T] = []
    while True:
        with interruptible():
            try:
                made.append(next(items))
            except StopIteration:
                return
        yield made.pop()  # not kept here, because it may be large


def wait_until(ready: Callable[[], bool]) -> None:
    """Wait, and let Ctrl-C through. Adds about one percent to the time."""
    began = time.perf_counter()
    while not ready():
        let_through()
        time.sleep(min(max((time.perf_counter() - began) / 64, 1e-5), 1e-3))


class Task(threading.Thread, Generic[T]):
    """Runs a call in a thread of its own and keeps its result or error."""

    def __init__(self, call: Callable[[], T], name: str) -> None:
        super().__init__(name=name, daemon=True)
        self._call = call
        self._result: list[T] = []
        self._error: BaseException | None = None
        self._ended = threading.Event()

    def run(self) -> None:
        """Called in the new thread."""
        try:
            self._result.append(self._call())
        except BaseException as error:
            self._error = error
        finally:
            del self._call  # and what it holds
            self._ended.set()

    @property
    def ended(self) -> bool:
        """Whether there is a result or an error."""
        return self._ended.is_set()

    def wait(self) -> None:
        """Wait until there is a result or an error. Ctrl-C is let through meanwhile."""
        while not self._ended.wait(LISTEN):
            let_through()

    def result(self) -> T:
        """Wait for the result and return it, or raise the error. Ctrl-C is let through meanwhile."""
        self.wait()
        if self._error is not None:
            raise self._error
        return self._result[0]


def in_thread(call: Callable[[], T], name: str) -> T:
    """Return `call()`. Ctrl-C is let through meanwhile; the call then goes on in the background, and is forgotten."""
    if threading.current_thread() is not threading.main_thread():
        return call()
    task = Task(call, name)
    task.start()
    try:
        task.wait()
    except BaseException:
        leave(task)
        raise
    return task.result()


_left: list[Task[Any]] = []


def leave(task: Task[Any]) -> None:
    """Let a task go on in the background."""
    _left[:] = [*(other for other in _left if not other.ended), task]


def _end_process() -> None:
    """Called when the process ends. A compiler or a program that still runs would crash when Python takes itself down.

    So after an uncaught Ctrl-C the process ends here, in the way that Python itself would end it. In other cases we
    wait for the tasks; another Ctrl-C ends that.
    """
    running = [task for task in _left if not task.ended]
    if not running:
        return
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    if getattr(sys, "last_type", None) is KeyboardInterrupt:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        signal.raise_signal(signal.SIGINT)
    for task in running:
        task.wait()


atexit.register(_end_process)
