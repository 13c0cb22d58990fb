"""Attributes that are replaced for a while, which is how Keras is told what it has no argument for."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any


@contextlib.contextmanager
def patched(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Until the block ends, `owner` has `value` under `name`."""
    original = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, original)


class SharedPatch:
    """A patch that any number of threads need: made when the first one enters, undone when the last one has left."""

    def __init__(self, patch: Callable[[], contextlib.AbstractContextManager[None]]) -> None:
        self._patch = patch
        self._lock, self._users = threading.Lock(), 0
        self._undo = contextlib.ExitStack()

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Until the block ends, the patch is there, for all threads."""
        with self._lock:
            if self._users == 0:
                self._undo.enter_context(self._patch())
            self._users += 1
        try:
            yield
        finally:
            with self._lock:
                self._users -= 1
                if self._users == 0:
                    self._undo.close()
