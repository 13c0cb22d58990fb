"""How results leave a program while it runs.

Who does what: `DeviceBuffer` is the device's side, a few arrays that a loop carries along. `HostBuffer` is the host's
side, where elements wait to be read.

[Note: visits to the host] A call from a program into Python (host_call.py) costs as much as many steps. So elements
wait on the device and are handed over several at a time. Each visit returns the number of elements after which the next
visit is due: as many as the program makes in `INTERVAL`, limited by the room on the device. A slow program hands over
every element at once, a fast one visits twenty times a second, which is how often Keras draws its progress bar.

[Note: order] The next visit needs the number that a visit returns, so the visits of one replica happen in program
order, whatever XLA reorders. On the host, the n-th elements of all replicas make one element, so all replicas have to
enqueue equally often. All replicas get the same answer to their n-th visit: where only the latest element leaves, their
n-th visits then bring elements of the same step. In a group of processes, each hears of its own replicas only.
"""

from __future__ import annotations

import contextlib
import enum
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from openipu import _validate as validate
from openipu.engine.types import Array, Tree

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .host_call import host_call

log = logging.getLogger("openipu")

INTERVAL = 0.05
"""Seconds between two visits to the host, if elements come faster than that."""
PATIENCE = 15.0
"""Seconds that a program waits for a reader that has stopped reading. It must be less than 40 seconds, because XLA ends
a process whose replicas wait for each other for longer than that."""


class IPUOutfeedMode(enum.Enum):
    """Which elements of an outfeed reach the host.

    >>> outfeed = ipu.ipu_outfeed_queue.IPUOutfeedQueue(ipu.ipu_outfeed_queue.IPUOutfeedMode.LAST)
    """

    ALL = "all"
    """All of them, in order."""
    LAST = "last"
    """Only the latest one."""


class Waiting(NamedTuple):
    """Elements that still wait on the device: the first `filled` of `rows`. They leave when there are `due` of them."""

    rows: Tree
    filled: Array
    due: Array


Receive = Callable[[int, int, list[np.ndarray]], int]
"""The host's side of a visit: (replica, number of elements, rows of each leaf) -> elements until the next visit."""


class DeviceBuffer:
    """Hands the elements of a program to `receive`. Up to `room` of them wait on the device, or only the latest one."""

    def __init__(self, receive: Receive, room: int, *, only_last: bool = False) -> None:
        self._receive, self._room, self._only_last = receive, room, only_last

    def start(self, element: Tree) -> Waiting:
        """An empty buffer for elements like `element`, which may be just a description."""
        rows = 1 if self._only_last else self._room
        return Waiting(
            jax.tree.map(lambda a: jnp.zeros((rows, *a.shape), a.dtype), element), jnp.int32(0), jnp.int32(1)
        )

    def put(self, waiting: Waiting, element: Tree, replica: Array, here: Array | bool = True) -> Waiting:
        """Add one element. If `here` is false, nothing leaves from this replica."""
        position = 0 if self._only_last else waiting.filled

        def store(rows: Array, new: Array) -> Tree:
            return lax.dynamic_update_index_in_dim(rows, jnp.asarray(new, rows.dtype), position, 0)

        waiting = waiting._replace(rows=jax.tree.map(store, waiting.rows, element), filled=waiting.filled + 1)
        return self._leave(waiting, waiting.filled >= waiting.due, replica, here)

    def flush(self, waiting: Waiting, replica: Array, here: Array | bool = True) -> Waiting:
        """Hand over everything that waits."""
        return self._leave(waiting, waiting.filled > 0, replica, here)

    def _leave(self, waiting: Waiting, when: Array, replica: Array, here: Array | bool) -> Waiting:
        rows, filled, due = waiting

        def hand_over() -> tuple[Array, Array]:
            answer = jax.ShapeDtypeStruct((), jnp.int32)
            return jnp.int32(0), host_call(self._host, answer, replica, filled, *jax.tree.leaves(rows))

        def leave() -> tuple[Array, Array]:
            return hand_over() if here is True else lax.cond(here, hand_over, lambda: (jnp.int32(0), due))

        return Waiting(rows, *lax.cond(when, leave, lambda: (filled, due)))

    def _host(self, replica: np.ndarray, count: np.ndarray, *rows: np.ndarray) -> np.ndarray:
        # Copied at once, because the arrays are views of the running program's memory.
        return np.int32(self._receive(int(replica), int(count), [np.array(a) for a in rows]))  # type: ignore[return-value]


class VisitRate:
    """Decides how many elements should come with the next visit. See [Note: visits to the host]."""

    def __init__(self, room: int) -> None:
        self._room = room
        self._last: float | None = None

    def next(self, count: int) -> int:
        """The number of elements for the next visit, after one that brought `count`."""
        now = time.perf_counter()
        last, self._last = self._last, now
        if last is None:
            return 1
        wanted = int(INTERVAL * count / max(now - last, 1e-9))
        return max(1, min(wanted, 2 * count, self._room))


class HostBuffer:
    """Elements that have left programs and wait to be read, in order. Safe to use from many threads.

    While another thread reads, up to `depth` elements may wait here; then the program waits for the reader. If no other
    thread reads, the launching thread has to read after the program has ended, so everything is kept.
    """

    def __init__(self, depth: int, *, only_last: bool = False) -> None:
        self._depth, self._only_last = depth, only_last
        self._changed = threading.Condition()
        self._coming: dict[int, deque[list[np.ndarray]]] = {}
        self._pace = VisitRate(depth)
        self._answers: dict[int, deque[int]] = {}
        self._counts: dict[int, int] = {}
        self._ready: deque[list[list[np.ndarray]]] = deque()
        self._launcher: threading.Thread | None = None
        self._reader: threading.Thread | None = None
        self._read_at = 0.0
        self._running = 0
        self.outlet = DeviceBuffer(self._receive, depth, only_last=only_last)
        self.interrupt: BaseException | None = None
        """What was raised in the program's thread during a visit, such as a KeyboardInterrupt."""
        self.replicas = 1
        """The number of replicas whose elements come here."""
        self.spec: Tree = None
        """The shapes of one replica's element; None as long as no program enqueues here."""

    # --- the program's side

    def describe(self, spec: Tree, replicas: int) -> None:
        """Set the shapes of what programs enqueue from now on. Elements of other shapes must have been read."""
        if self.spec is not None and (spec, replicas) != (self.spec, self.replicas):
            if self._ready and not self._only_last:
                raise ValueError(
                    f"An outfeed queue has {len(self._ready)} elements of {self.spec} from "
                    f"{validate.counted(self.replicas, 'replica')} that were not read, and now gets {spec} from "
                    f"{replicas}. Call `dequeue` first, enqueue the same shapes everywhere, or use two queues."
                )
            self._ready.clear()
        # In this order: other threads read both as soon as `spec` is set.
        self.replicas, self.spec = replicas, spec

    def begin(self, replicas: Sequence[int], spec: Tree) -> None:
        """Call before a program runs that enqueues elements of these shapes on these replicas.

        Waits for a program that another thread is running.
        """
        with self._changed:
            while self._running:
                self._changed.wait()
            self.describe(spec, len(replicas))
            self._coming = {replica: deque() for replica in replicas}
            self._pace = VisitRate(1 << 30 if self._only_last else self._depth)
            self._answers = {replica: deque() for replica in replicas}
            self._counts = dict.fromkeys(replicas, 0)
            self._launcher, self._reader = threading.current_thread(), None
            self.interrupt = None
            self._running += 1

    def end(self) -> None:
        """Call when the program has ended."""
        with self._changed:
            self._running -= 1
            self._changed.notify_all()

    def check(self) -> None:
        """Raise an error if the replicas of the latest program did not enqueue equally often."""
        counts = list(self._counts.values())
        if len(set(counts)) > 1:
            raise ValueError(
                f"Replicas enqueued different numbers of elements in an outfeed queue: {counts}, by replica. The "
                f"n-th elements of all replicas make one element, so only {min(counts)} can be dequeued and the "
                "rest are lost. Let all replicas enqueue equally often: always, or under a condition that is the "
                "same on all of them (see `ipu.cross_replica_ops`)."
            )

    def _receive(self, replica: int, count: int, rows: list[np.ndarray]) -> int:
        """Take elements from a visit. Waits while `depth` elements are here and another thread reads them."""
        try:
            for i in range(1 if self._only_last else count):
                self.add(replica, [a[i] for a in rows])
        except BaseException as error:  # an error here would end the program and lose its state
            self.interrupt = error
        return self._answer(replica, count)

    def _answer(self, replica: int, count: int) -> int:
        """The answer to a visit, the same for all replicas. See [Note: order]."""
        with self._changed:
            self._counts[replica] += count
            mine = self._answers[replica]
            if not mine:  # this replica is the first to make this visit
                answer = self._pace.next(count)
                for answers in self._answers.values():
                    answers.append(answer)
            return mine.popleft()

    def add(self, replica: int, element: list[np.ndarray]) -> None:
        """Take one element of one replica."""
        with self._changed:
            self._wait(replica)
            self._coming[replica].append(element)
            while all(self._coming.values()):
                if self._only_last:
                    self._ready.clear()
                self._ready.append([coming.popleft() for coming in self._coming.values()])
            self._changed.notify_all()

    def _wait(self, replica: int) -> None:
        began = time.monotonic()
        while len(self._ready) + len(self._coming[replica]) >= self._depth and not self._only_last and self._is_read():
            left = PATIENCE - (time.monotonic() - max(began, self._read_at))
            if left <= 0:
                log.warning(
                    "nobody has read an outfeed for %.0f s; the program continues, and its elements are kept", PATIENCE
                )
                self._reader = None
                return
            self._changed.wait(min(left, 0.1))

    def _is_read(self) -> bool:
        return self._reader is not None and self._reader is not self._launcher and self._reader.is_alive()

    # --- the reader's side

    def take(self, most: int | None = None) -> list[list[list[np.ndarray]]]:
        """The elements that are here now, at most `most`: the leaves of each element, by element and replica."""
        with self._changed:
            self._reader, self._read_at = threading.current_thread(), time.monotonic()
            count = len(self._ready) if most is None else min(most, len(self._ready))
            taken = [self._ready.popleft() for _ in range(count)]
            self._changed.notify_all()
            return taken

    def latest(self) -> list[list[np.ndarray]] | None:
        """The latest element, if there is one. It stays here."""
        with self._changed:
            return self._ready[-1] if self._ready else None

    def wait_for_programs(self) -> None:
        """Wait until no program runs. Meanwhile all elements are kept, because the waiting thread cannot read them."""
        with self._changed:
            if self._running and self._launcher is threading.current_thread():
                raise RuntimeError(
                    "`dequeue(wait_for_completion=True)` was called in a callback while the execution runs, which does "
                    "not end before the callback does. Leave `wait_for_completion` out, or call it after `fit`."
                )
            while self._running:
                self._reader = None
                self._changed.notify_all()
                self._changed.wait(0.1)

    def clear(self) -> None:
        """Drop all elements."""
        with self._changed:
            self._ready.clear()
            self._changed.notify_all()


@contextlib.contextmanager
def filled(outfeeds: Iterable[tuple[HostBuffer, Tree]], replicas: Sequence[int]) -> Iterator[None]:
    """Until the block ends, a program runs that enqueues elements of these shapes on these replicas."""
    with contextlib.ExitStack() as running:
        for outfeed, spec in outfeeds:
            outfeed.begin(replicas, spec)
            running.callback(outfeed.end)
        yield
