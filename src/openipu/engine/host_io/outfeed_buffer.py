"""How results leave a program while it runs.

Who does what: `DeviceBuffer` is the device's side, a few arrays that a loop carries along; `HostBuffer` is the host's
side, where elements wait until somebody reads them.

[Note: visits to the host] A call from a program into Python (host_call.py) costs as much as many steps. So elements
first wait on the device and are handed over several at a time. At each visit the host answers after how many more it
wants the next one: as many as come in `INTERVAL`, at most as many as there is room for. Slow programs hand over every
element at once, fast ones twenty times a second, which is how often Keras draws its progress bar.

[Note: order] A visit gives a value (that number) which the next visit needs, so the visits of one replica happen in the
order of the program whatever XLA reorders. On the host the n-th elements of all replicas make one element, so replicas
have to enqueue equally often. The answer to the n-th visit is the same for all replicas: where only the latest element
leaves, what their n-th visits bring is of the same step.
"""

from __future__ import annotations

import enum
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

from openipu.engine.types import Tree

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .host_call import host_call

log = logging.getLogger("openipu")

INTERVAL = 0.05
"""Seconds between two visits to the host, where elements come faster than that."""
PATIENCE = 15.0
"""Seconds a program waits for a reader that has stopped to read. XLA ends a process whose replicas wait for each other
for longer than 40 seconds, so it has to be less than that."""


class IPUOutfeedMode(enum.Enum):
    """Which elements of an outfeed the host gets."""

    ALL = "all"
    """Every one, in order."""
    LAST = "last"
    """The latest one."""


class Waiting(NamedTuple):
    """Elements on the device that have not left it yet: the first `count` of `rows`; `due` of them leave together."""

    rows: Tree
    count: Any
    due: Any


Receive = Callable[[int, int, list[np.ndarray]], int]
"""The host's side of a visit: replica, number of elements, rows of each leaf -> elements until the next visit."""


class DeviceBuffer:
    """Hands elements of a program over to `receive`; `room` of them wait on the device, or only the latest one."""

    def __init__(self, receive: Receive, room: int, *, only_last: bool = False) -> None:
        self._receive, self._room, self._only_last = receive, room, only_last

    def start(self, element: Tree) -> Waiting:
        """Nothing waits yet. `element` is one element, or the description of one."""
        rows = 1 if self._only_last else self._room
        return Waiting(
            jax.tree.map(lambda a: jnp.zeros((rows, *a.shape), a.dtype), element), jnp.int32(0), jnp.int32(1)
        )

    def put(self, waiting: Waiting, element: Tree, replica: Any, here: Any = True) -> Waiting:
        """Add one element. Where `here` is False, nothing leaves this replica."""
        position = 0 if self._only_last else waiting.count

        def store(rows: Any, new: Any) -> Any:
            return lax.dynamic_update_index_in_dim(rows, jnp.asarray(new, rows.dtype), position, 0)

        waiting = waiting._replace(rows=jax.tree.map(store, waiting.rows, element), count=waiting.count + 1)
        return self._leave(waiting, waiting.count >= waiting.due, replica, here)

    def flush(self, waiting: Waiting, replica: Any, here: Any = True) -> Waiting:
        """Let everything that waits leave now."""
        return self._leave(waiting, waiting.count > 0, replica, here)

    def _leave(self, waiting: Waiting, when: Any, replica: Any, here: Any) -> Waiting:
        rows, count, due = waiting

        def hand_over() -> tuple[Any, Any]:
            answer = jax.ShapeDtypeStruct((), jnp.int32)
            return jnp.int32(0), host_call(self._host, answer, replica, count, *jax.tree.leaves(rows))

        def leave() -> tuple[Any, Any]:
            return hand_over() if here is True else lax.cond(here, hand_over, lambda: (jnp.int32(0), due))

        return Waiting(rows, *lax.cond(when, leave, lambda: (count, due)))

    def _host(self, replica: Any, count: Any, *rows: Any) -> np.ndarray:
        # Copied before anything waits: the arrays are views of the running program's memory.
        return np.int32(self._receive(int(replica), int(count), [np.array(a) for a in rows]))  # type: ignore[return-value]


class VisitRate:
    """How many elements should come with the next host_call. See [Note: visits to the host]."""

    def __init__(self, room: int) -> None:
        self._room = room
        self._last: float | None = None

    def next(self, count: int) -> int:
        """The answer to a visit that brought `count` elements."""
        now = time.perf_counter()
        last, self._last = self._last, now
        if last is None:
            return 1
        wanted = int(INTERVAL * count / max(now - last, 1e-9))
        return max(1, min(wanted, 2 * count, self._room))


class HostBuffer:
    """Elements that have left programs and wait to be read, in order; safe to use from many threads.

    `depth` elements may wait while another thread reads; then the program waits for the reader. Without a reader in
    another thread, whoever launched the program is the one who will read, after it has ended: everything is kept.
    """

    def __init__(self, depth: int, *, only_last: bool = False) -> None:
        self._depth, self._only_last = depth, only_last
        self._changed = threading.Condition()
        self._coming: list[deque[list[np.ndarray]]] = [deque()]
        self._pace = VisitRate(depth)
        self._answers: list[deque[int]] = []
        self._counts: list[int] = []
        self._ready: deque[list[list[np.ndarray]]] = deque()
        self._launcher: threading.Thread | None = None
        self._reader: threading.Thread | None = None
        self._read_at = 0.0
        self._running = 0
        self.outlet = DeviceBuffer(self._receive, depth, only_last=only_last)
        self.interrupt: BaseException | None = None
        """What was raised in the program's thread while it handed something over, such as a KeyboardInterrupt."""

    # --- the program's side

    def begin(self, replicas: int) -> None:
        """A program starts to run; one that is under way in another thread ends first."""
        with self._changed:
            while self._running:
                self._changed.wait()
            self._coming = [deque() for _ in range(replicas)]
            self._pace = VisitRate(1 << 30 if self._only_last else self._depth)
            self._answers, self._counts = [deque() for _ in range(replicas)], [0] * replicas
            self._launcher, self._reader = threading.current_thread(), None
            self.interrupt = None
            self._running += 1

    def end(self) -> None:
        """The program has ended."""
        with self._changed:
            self._running -= 1
            self._changed.notify_all()

    def check(self) -> None:
        """Raise an error where the replicas of the program that has ended did not enqueue equally often."""
        if len(set(self._counts)) > 1:
            raise ValueError(
                f"Replicas enqueued different numbers of elements in an outfeed queue: {self._counts}, by replica. The "
                f"n-th elements of all replicas make one element, so {min(self._counts)} could be dequeued and the "
                "others are lost. Let all replicas enqueue equally often: always, or under a condition that is the "
                "same on all of them (see `ipu.cross_replica_ops`)."
            )

    def _receive(self, replica: int, count: int, rows: list[np.ndarray]) -> int:
        """Take elements over; waits while there are `depth` and somebody reads them."""
        try:
            for i in range(1 if self._only_last else count):
                self.add(replica, [a[i] for a in rows])
        except BaseException as error:  # an error here would end the program and with it the state it holds
            self.interrupt = error
        return self._answer(replica, count)

    def _answer(self, replica: int, count: int) -> int:
        """See [Note: order]."""
        with self._changed:
            self._counts[replica] += count
            mine = self._answers[replica]
            if not mine:  # the first replica to make this visit
                answer = self._pace.next(count)
                for answers in self._answers:
                    answers.append(answer)
            return mine.popleft()

    def add(self, replica: int, element: list[np.ndarray]) -> None:
        """Take one element of a replica over."""
        with self._changed:
            self._wait(replica)
            self._coming[replica].append(element)
            while all(self._coming):
                if self._only_last:
                    self._ready.clear()
                self._ready.append([coming.popleft() for coming in self._coming])
            self._changed.notify_all()

    def _wait(self, replica: int) -> None:
        began = time.monotonic()
        while len(self._ready) + len(self._coming[replica]) >= self._depth and not self._only_last and self._is_read():
            left = PATIENCE - (time.monotonic() - max(began, self._read_at))
            if left <= 0:
                log.warning(
                    "nobody has read an outfeed for %.0f s; the program goes on, and its elements are kept", PATIENCE
                )
                self._reader = None
                return
            self._changed.wait(min(left, 0.1))

    def _is_read(self) -> bool:
        return self._reader is not None and self._reader is not self._launcher and self._reader.is_alive()

    # --- the reader's side

    def take(self, most: int | None = None) -> list[list[list[np.ndarray]]]:
        """What is there now, at most `most` elements: for each element, for each replica, its leaves."""
        with self._changed:
            self._reader, self._read_at = threading.current_thread(), time.monotonic()
            count = len(self._ready) if most is None else min(most, len(self._ready))
            taken = [self._ready.popleft() for _ in range(count)]
            self._changed.notify_all()
            return taken

    def latest(self) -> list[list[np.ndarray]] | None:
        """The latest element; it stays."""
        with self._changed:
            return self._ready[-1] if self._ready else None

    def wait_for_programs(self) -> None:
        """Return when no program runs. Everything it produces meanwhile is kept, because whoever waits cannot read."""
        with self._changed:
            while self._running:
                self._reader = None
                self._changed.notify_all()
                self._changed.wait(0.1)

    def clear(self) -> None:
        """Forget all elements."""
        with self._changed:
            self._ready.clear()
            self._changed.notify_all()
