"""One thread that waits for executions, so that nothing else has to, and calls what is to happen now and then."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

EVERY = 10.0
"""How many seconds pass between two calls of what is to happen now and then."""

Finished = Callable[[Mapping[str, Any] | None], None]
"""Told when an execution has ended, with its logs, if they were wanted."""

_waiting: queue.SimpleQueue[tuple[Any, Mapping[str, Any] | None, Finished]] = queue.SimpleQueue()
_thread: threading.Thread | None = None
_lock = threading.Lock()
periodic: list[Callable[[], None]] = []
"""What is to happen every few seconds while something runs."""


def watch(value: Any, state: Any, logs: Mapping[str, Any] | None, finished: Finished) -> None:
    """Call `finished` when the execution has ended that returns `value` and `state`."""
    import jax

    # All results of a program are there at the same time. Only the smallest is kept here, because others may be large.
    leaves = [a for a in jax.tree.leaves(value) if hasattr(a, "nbytes")] or jax.tree.leaves(state)
    start()
    _waiting.put((min(leaves, key=lambda a: a.nbytes, default=None), logs, finished))


def start() -> None:
    """Start the thread, if it does not run yet."""
    global _thread
    with _lock:
        if _thread is None or not _thread.is_alive():  # a forked process has no thread yet
            _thread = threading.Thread(target=_watch, name="openipu-watcher", daemon=True)
            _thread.start()


def _watch() -> None:
    last = time.monotonic()
    while True:
        with contextlib.suppress(queue.Empty):
            _wait_for(*_waiting.get(timeout=EVERY))
        if time.monotonic() - last >= EVERY:
            for call in periodic:
                call()
            last = time.monotonic()


def _wait_for(array: Any, logs: Mapping[str, Any] | None, finished: Finished) -> None:
    import jax
    import numpy as np

    # An execution that failed, or whose state another one has taken, has ended as well.
    with contextlib.suppress(Exception):
        jax.block_until_ready(array)
    values = None
    with contextlib.suppress(Exception):
        values = None if logs is None else {name: np.asarray(value) for name, value in logs.items()}
    finished(values)
