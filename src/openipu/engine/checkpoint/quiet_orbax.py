"""Orbax without its tracebacks and its log handler: when it cannot write, one error is enough.

Orbax raises an error to its caller. Besides, its threads log tracebacks, and writes that are still under way when it
gives up cannot report to it any more, which Python prints as exceptions that were ignored.
"""

from __future__ import annotations

import importlib
import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, Final

_LAST_WRITES_SECONDS: Final = 0.2
"""How long writes may be under way after Orbax has given up."""

_lock = threading.Lock()
_users = 0
_hook_before: Callable[[Any], Any] = sys.unraisablehook


def orbax_checkpoint() -> ModuleType:
    """Orbax, imported when it is first needed, because that takes long."""
    with quiet_orbax():
        return importlib.import_module("orbax.checkpoint")


@contextmanager
def quiet_orbax() -> Iterator[None]:
    """Leave out what Orbax says besides the error that it raises."""
    _enter()
    try:
        yield
    except Exception:
        time.sleep(_LAST_WRITES_SECONDS)
        raise
    finally:
        _leave()


def _enter() -> None:
    global _users, _hook_before
    with _lock:
        _users += 1
        if _users == 1:
            _hook_before, sys.unraisablehook = sys.unraisablehook, _say_ignored
            if not logging.root.handlers and logging.lastResort is not None:
                logging.root.addHandler(logging.lastResort)  # or Orbax adds one, and then all lines look different
            logging.getLogger("absl").addFilter(_is_worth_saying)


def _leave() -> None:
    global _users
    with _lock:
        _users -= 1
        if _users == 0:
            logging.getLogger("absl").removeFilter(_is_worth_saying)
            if logging.lastResort is not None:
                logging.root.removeHandler(logging.lastResort)
            if sys.unraisablehook is _say_ignored:  # nobody else has set one meanwhile
                sys.unraisablehook = _hook_before


def _is_worth_saying(record: logging.LogRecord) -> bool:
    return not (record.exc_info and "orbax" in Path(record.pathname).parts)


def _say_ignored(ignored: sys.UnraisableHookArgs) -> None:
    if str(ignored.exc_value) != "Event loop is closed":
        _hook_before(ignored)
