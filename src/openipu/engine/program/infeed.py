"""How elements of a dataset reach a program.

Where the number of elements is known before the launch (`loops.repeat`), they are sent ahead as one slab. Where it is
not (`loops.while_loop`), or where the slab would be too large, the program fetches them while it runs,
`prefetch_depth` at a time. Element i goes to replica i mod R.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from typing import Any, NamedTuple

from openipu.engine.data.dataset_reader import DatasetReader
from openipu.engine.devices.replicas import Replicas
from openipu.engine.host_io.host_call import host_call
from openipu.engine.types import Tree
from openipu.errors import OutOfRangeError

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .program_trace import ProgramTrace


class Fetched(NamedTuple):
    """Elements on the device: the first `available` of `rows`, of which `position` are used, of `taken` in all."""

    rows: Tree
    position: Any
    available: Any
    taken: Any


class InfeedSource:
    """The elements of one infeed queue as programs see them."""

    def __init__(self, elements: DatasetReader, depth: int) -> None:
        self.elements, self._depth = elements, depth
        self._lock = threading.Lock()
        self._dealt: list[deque[Tree]] = []
        self._used: list[int] = []
        self.error: BaseException | None = None
        """Why the program that ran last could not go on."""

    # --- inside the program

    def next(self, trace: ProgramTrace) -> Tree:
        """The next element of this replica."""
        trace.need(self)
        trace.rows = next((leaf.shape[0] for leaf in jax.tree.leaves(self.elements.spec) if leaf.shape), None)
        if trace.discovering:
            trace.scope.set_cell(self, ())
            return jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), self.elements.spec)
        cell = trace.scope.cell(self)
        if id(self) in trace.slabs:
            trace.scope.set_cell(self, cell + 1)
            return jax.tree.map(lambda a: a[cell, 0], trace.slabs[id(self)])
        cell = self._fetch_if_needed(cell, trace.replicas)
        trace.scope.set_cell(self, cell._replace(position=cell.position + 1, taken=cell.taken + 1))
        return jax.tree.map(lambda a: a[cell.position], cell.rows)

    def first_cell(self, *, sent: bool) -> Tree:
        """Where a program begins: at the first row of its slab, or with nothing fetched."""
        if sent:
            return jnp.int32(0)
        rows = jax.tree.map(lambda a: jnp.zeros((self._depth, *a.shape), a.dtype), self.elements.spec)
        return Fetched(rows, jnp.int32(0), jnp.int32(0), jnp.int32(0))

    def _fetch_if_needed(self, cell: Fetched, replicas: Replicas) -> Fetched:
        leaves, structure = jax.tree.flatten(cell.rows)
        shapes = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in leaves]

        def fetch() -> tuple[Any, ...]:
            # `taken` makes each call depend on the one before.
            available, *rows = host_call(
                self._fetch, (jax.ShapeDtypeStruct((), jnp.int32), *shapes), replicas.index(), cell.taken
            )
            return jnp.int32(0), available, *rows

        empty = cell.position >= cell.available
        position, available, *rows = lax.cond(empty, fetch, lambda: (cell.position, cell.available, *leaves))
        return Fetched(jax.tree.unflatten(structure, rows), position, available, cell.taken)

    # --- the host's side

    def slab(self, count: int, replicas: Replicas) -> Tree:
        """`count` elements for each replica, sent to the devices."""
        wanted = count * replicas.count
        elements = self.elements.take(wanted)
        if len(elements) < wanted:
            self.elements.put_back(elements)
            raise OutOfRangeError(
                f"The program takes {wanted} elements of the infeed queue, but {len(elements)} are left. Give a "
                "dataset that repeats, let the program take fewer, or start again with `infeed_queue.initializer`."
            )

        def stack(*rows: np.ndarray) -> np.ndarray:
            return np.stack(rows).reshape(count, replicas.count, *rows[0].shape)

        return jax.device_put(jax.tree.map(stack, *elements), replicas.split(1))

    def slab_bytes(self, count: int) -> int:
        """Bytes that a slab takes on each replica."""
        leaves = jax.tree.leaves(self.elements.spec)
        return count * int(sum(np.dtype(a.dtype).itemsize * math.prod(a.shape) for a in leaves))

    def begin(self, replicas: int) -> None:
        """A program that fetches starts to run."""
        self._dealt, self._used, self.error = [deque() for _ in range(replicas)], [0] * replicas, None

    def end(self, taken: np.ndarray) -> None:
        """The program has ended after each replica took so many: what it fetched in vain comes first next time."""
        rest = {
            (used + i) * len(self._dealt) + replica: element
            for replica, (used, dealt) in enumerate(zip(self._used, self._dealt, strict=True))
            for i, element in enumerate(dealt)
            if used + i >= int(taken[replica])
        }
        self.elements.put_back([rest[number] for number in sorted(rest)])

    def _fetch(self, replica: Any, taken: Any) -> tuple[np.ndarray, ...]:
        try:
            return self._block(int(replica), int(taken))
        except BaseException as error:
            self.error = error
            raise

    def _block(self, replica: int, taken: int) -> tuple[np.ndarray, ...]:
        with self._lock:
            mine = self._dealt[replica]
            for _ in range(taken - self._used[replica]):
                mine.popleft()
            self._used[replica] = taken
            # Wait for one element, but not for more.
            while not mine or (len(mine) < self._depth and self.elements.at_hand >= len(self._dealt)):
                if not self._deal():
                    break
            block = list(mine)[: self._depth]
        if not block:
            raise OutOfRangeError(
                f"The program has taken {taken} elements of the infeed queue on each of {len(self._dealt)} replica(s) "
                "and asks for another, but the data has ended. Give a dataset that repeats, or end the loop before."
            )

        def stack(*rows: np.ndarray) -> np.ndarray:
            return np.stack([*rows, *[rows[0]] * (self._depth - len(rows))])

        return np.asarray(len(block), np.int32), *jax.tree.leaves(jax.tree.map(stack, *block))

    def _deal(self) -> bool:
        """Give each replica one more element, if there are as many."""
        elements = self.elements.take(len(self._dealt))
        if len(elements) < len(self._dealt):
            self.elements.put_back(elements)
            return False
        for part, element in zip(self._dealt, elements, strict=True):
            part.append(element)
        return True
