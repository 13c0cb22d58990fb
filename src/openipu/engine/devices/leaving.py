"""How a process of a group ends: whatever happens, the others do not wait for it in vain.

JAX waits at the end of a process until all others have come to their end. So one that has failed ends without JAX.
"""

from __future__ import annotations

import atexit
import functools
import logging
import os
import sys
import time
from collections.abc import Callable
from typing import Any, Final, NoReturn

import jax

from . import standing

FAREWELL: Final = 2.0
"""How many seconds a process that ends with an exit code other than 0 waits for others that do the same.

This is a courtesy to those that still write something. Nothing depends on it being long enough.
"""

_failed = 0


def prepare(client: Any, index: int, count: int, launched: bool) -> None:
    """See to it that this process, which has joined a group, ends well. `launched` says whether it has a launcher."""
    sys.excepthook = functools.partial(_end_at_once, sys.excepthook)
    python: Any = sys
    python.exit = _exit
    watch = standing.Watch(client, index, launched, _end_stuck)
    watch.start()
    atexit.register(_leave, client, index, count, watch, os.getpid())


def _end_at_once(show: Callable[..., None], kind: type[BaseException], error: BaseException, trace: Any) -> None:
    """Show an error that nobody has caught, and end. JAX would wait for the others, which wait for this process."""
    show(kind, error, trace)
    _end_process(130 if issubclass(kind, KeyboardInterrupt) else 1)


def _exit(status: Any = None) -> NoReturn:
    """`sys.exit`, which notes the exit code. When a process ends, nothing else knows it before JAX has ended, too."""
    global _failed
    _failed = 0 if status is None else status & 0xFF if isinstance(status, int) else 1
    raise SystemExit(status)


def _leave(client: Any, index: int, count: int, watch: standing.Watch, process: int) -> None:
    """Tell the others that this process is at the end of its script. If it has failed alone, end it."""
    if os.getpid() != process:  # a child that it has forked
        return
    watch.end()
    until = time.monotonic() + FAREWELL
    try:
        standing.tell_end(client, index, _failed)
        for other in range(count if _failed else 0):
            standing.wait_for_end(client, other, until - time.monotonic())
    except jax.errors.JaxRuntimeError:
        if _failed:
            _end_process(_failed)


def _end_stuck(problem: str) -> NoReturn:
    """End, because this process waits for something that will never happen."""
    standing.show_main_thread(problem)
    _end_process(1)


def _end_process(code: int) -> NoReturn:
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
