"""One thread that looks, while runs are recorded, which executions have ended, and does what is to happen meanwhile.

It looks again and again instead of waiting for each execution: that would wake it once per launch, which costs more
than a short execution takes. A run also looks itself whenever it tells what it does.
"""

from __future__ import annotations

import atexit
import collections
import threading
import time
from collections.abc import Callable
from typing import Final, Protocol

EVERY = 10.0
"""How many seconds pass between two calls of what is to happen now and then."""
_OFTEN, _SELDOM, _SHARE = 5e-3, 2e-2, 1 / 64
"""How many seconds pass between two looks at least and at most, and the share of an execution's time in between."""
_IDLE: Final = 0.1
"""After so many seconds without an execution, the thread waits until it is needed again."""
_PATIENCE: Final = 5.0
"""How many seconds a process that ends waits for the thread."""


class Watched(Protocol):
    """A run whose executions are watched."""

    def look(self) -> float | None:
        """Note what has ended. Returns the age of the oldest execution that has not, in seconds; None if all have."""


periodic: list[Callable[[], None]] = []
"""What is to happen every few seconds."""
_runs: dict[int, Watched] = {}
_calls: collections.deque[Callable[[], None]] = collections.deque()
_needed = threading.Event()
_thread: threading.Thread | None = None
_lock = threading.Lock()
_over = False


def watch(run: Watched) -> None:
    """Look at the executions of this run until all have ended."""
    with _lock:
        _runs[id(run)] = run
        _needed.set()
    start()


def soon(call: Callable[[], None]) -> None:
    """Let the thread make this call."""
    _calls.append(call)
    start()
    _needed.set()


def start() -> None:
    """Start the thread, if it does not run yet."""
    global _thread
    with _lock:
        if not _over and (_thread is None or not _thread.is_alive()):  # a forked process has no thread yet
            _thread = threading.Thread(target=_watch, name="openipu-watcher", daemon=True)
            _thread.start()


@atexit.register
def _end() -> None:
    """Called when the process ends. A thread that is inside JAX while Python takes itself down would crash."""
    global _over
    with _lock:
        _over = True
    _needed.set()
    if _thread is not None and _thread.is_alive():
        _thread.join(_PATIENCE)


def _watch() -> None:
    written = used = time.monotonic()
    while not _over:
        _needed.clear()  # before looking: what is launched from now on wakes the thread again
        ages = [age for run in list(_runs.values()) if (age := run.look()) is not None]
        now = time.monotonic()
        while _calls:
            _calls.popleft()()
        if now - written >= EVERY:
            for call in tuple(periodic):
                call()
            written = now
        used = now if ages else used
        if now - used < _IDLE:
            time.sleep(min(max(_SHARE * max(ages, default=0.0), _OFTEN), _SELDOM))
        else:
            with _lock:
                if not _needed.is_set():
                    _runs.clear()  # a run that launches is added again
            if not _over:
                _needed.wait(EVERY)
            used = time.monotonic()
