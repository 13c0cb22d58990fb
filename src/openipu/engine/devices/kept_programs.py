"""Compiled programs that are kept: the most recently used ones, as long as their devices exist."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

from .placement import Placement

T = TypeVar("T")


class KeptPrograms(Generic[T]):
    """At most `most` values, by place and key."""

    def __init__(self, most: int) -> None:
        self._most, self._lock = most, threading.RLock()
        self._values: OrderedDict[tuple[Placement, Hashable], T] = OrderedDict()

    def get(
        self, place: Placement, key: Hashable, make: Callable[[], T], is_current: Callable[[T], bool] = lambda _: True
    ) -> T:
        """The value for a key, made if none is there that `is_current`. Values of older configurations are dropped."""
        whole = (place, key)
        with self._lock:
            if whole in self._values and not is_current(self._values[whole]):
                del self._values[whole]
            if whole not in self._values:
                for old in [old for old in self._values if old[0].generation != place.generation]:
                    del self._values[old]
                self._values[whole] = make()
                while len(self._values) > self._most:
                    self._values.popitem(last=False)
            self._values.move_to_end(whole)
            return self._values[whole]
