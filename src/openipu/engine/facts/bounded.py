"""Lists that stay short, however much is added."""

from __future__ import annotations

import collections
from typing import Generic, TypeVar

T = TypeVar("T")


class Sampled(Generic[T]):
    """Every n-th item of a long series. `n` doubles whenever the list is full; the latest item is always there."""

    def __init__(self, most: int) -> None:
        self._most, self._every, self._count = most, 1, 0
        self._items: list[T] = []
        self._latest: T | None = None

    @property
    def is_due(self) -> bool:
        """Whether the next item will be kept for longer than until the one after it."""
        return self._count % self._every == 0

    def skip(self) -> None:
        """Count an item without keeping it."""
        self._count += 1

    def add(self, item: T) -> None:
        """Add the next item."""
        self._latest = item
        if self.is_due:
            self._items.append(item)
        self._count += 1
        if len(self._items) > self._most:
            self._items = self._items[::2]
            self._every *= 2

    def items(self) -> tuple[T, ...]:
        """The items that are kept, in order."""
        last = self._latest
        return (*self._items, last) if last is not None and last is not self._items[-1] else tuple(self._items)


class Ends(Generic[T]):
    """The first and the last items of a long series."""

    def __init__(self, each: int) -> None:
        self._each = each
        self._first: list[T] = []
        self._last: collections.deque[T] = collections.deque(maxlen=each)

    def add(self, item: T) -> None:
        """Add the next item."""
        if len(self._first) < self._each:
            self._first.append(item)
        else:
            self._last.append(item)

    def items(self) -> tuple[T, ...]:
        """The items that are kept, in order."""
        return (*self._first, *self._last)
