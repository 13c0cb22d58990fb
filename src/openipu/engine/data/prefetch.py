"""Builds slabs early, while an execution runs."""

from __future__ import annotations

import collections
from collections.abc import Iterator

from .slab import Slab


class Prefetch:
    """An iterator over slabs that can build up to `depth` of them early. An error waits until its slab is asked for."""

    def __init__(self, slabs: Iterator[Slab], depth: int = 1) -> None:
        self._slabs, self._depth = slabs, depth
        self._ready: collections.deque[Slab] = collections.deque()
        self._error: BaseException | None = None
        self.ended = False
        """Whether the end of the data has been reached. With a depth of 1, there is then no next slab."""
        self.found = 0
        """How many slabs were ready when the latest one was asked for."""

    def prepare(self) -> None:
        """Build slabs until `depth` of them are ready."""
        while len(self._ready) < self._depth and self._error is None and not self.ended:
            try:
                self._ready.append(next(self._slabs))
            except StopIteration:
                self.ended = True
            except BaseException as error:
                self._error = error

    def __iter__(self) -> Prefetch:
        return self

    def __next__(self) -> Slab:
        self.found = len(self._ready)
        if self._ready:
            return self._ready.popleft()
        if self._error is not None:
            error, self._error = self._error, None
            try:
                raise error
            finally:
                del error  # otherwise this frame and the error keep each other, and the data, alive
        return next(self._slabs)
