"""Slabs that are built early, while an execution runs."""

from __future__ import annotations

import collections
from collections.abc import Iterator

from .slab import Slab


class Prefetch:
    """An iterator whose next elements can be made early. An error in making one is kept until it is asked for."""

    def __init__(self, slabs: Iterator[Slab], depth: int = 1) -> None:
        self._slabs, self._depth = slabs, depth
        self._ready: collections.deque[Slab] = collections.deque()
        self._error: BaseException | None = None
        self.ended = False
        """Whether it is known that there is no next element, where the depth is 1."""

    def prepare(self) -> None:
        """Make the next elements."""
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
        if self._ready:
            return self._ready.popleft()
        if self._error is not None:
            error, self._error = self._error, None
            try:
                raise error
            finally:
                del error  # or this frame and the error would hold each other, and with them the data
        return next(self._slabs)
