"""How the elements of a dataset reach a program.

If their number is known before the launch (`loops.repeat`), they are sent ahead as one slab. If it is not
(`loops.while_loop`), or if the slab would be too large, the program fetches them while it runs, `prefetch_depth` at a
time. Element i goes to replica i mod R. In a group of processes, each reads elements for its own replicas, or all of
them read the same elements and each uses those of its replicas.
"""

from __future__ import annotations

import contextlib
import math
import threading
from collections import deque
from collections.abc import Hashable, Iterator, Sequence
from typing import NamedTuple, Self

from openipu import _validate as validate
from openipu.engine.data.dataset_reader import DatasetReader
from openipu.engine.data.instances import check_same
from openipu.engine.devices import group
from openipu.engine.devices.placement import Placement
from openipu.engine.devices.replicas import Replicas
from openipu.engine.devices.transfer import send_own
from openipu.engine.host_io.host_call import host_call
from openipu.engine.shapes import specs_of
from openipu.engine.types import Array, Tree
from openipu.errors import OutOfRangeError

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .program_trace import ProgramTrace


class Fetched(NamedTuple):
    """Elements that were fetched: the first `available` of `rows`. The next one is at `position`."""

    rows: Tree
    position: Array
    available: Array
    taken: Array
    """How many elements the replica has taken since the launch."""


class InfeedSource:
    """The elements of one infeed queue, as programs take them.

    A `stand_in` has no elements of its own. A program that was traced with one can run with any source like it.
    """

    def __init__(self, spec: Tree, elements: DatasetReader | None, depth: int) -> None:
        self.spec, self._elements, self._depth = spec, elements, depth
        self._lock, self._borrowing = threading.Lock(), threading.Lock()
        self._dealt: dict[int, deque[Tree]] = {}
        self._used: dict[int, int] = {}
        self._asking: set[int] = set()
        self.error: BaseException | None = None
        """Why the latest program had to stop, if it did."""

    @property
    def elements(self) -> DatasetReader:
        """Where the elements come from."""
        assert self._elements is not None, "a stand-in was not given elements"
        return self._elements

    def stand_in(self) -> InfeedSource:
        """A source of elements of the same shapes, which has none yet."""
        return InfeedSource(self.spec, None, self._depth)

    @contextlib.contextmanager
    def reading(self, other: InfeedSource) -> Iterator[None]:
        """Until the block ends, this stand-in has the elements of another source. One thread at a time can do this."""
        with self._borrowing:
            self._elements = other.elements
            try:
                yield
            finally:
                self._elements = None

    # --- inside the program

    def next(self, trace: ProgramTrace) -> Tree:
        """The next element for this replica."""
        trace.need(self)
        trace.rows = next((leaf.shape[0] for leaf in jax.tree.leaves(self.spec) if leaf.shape), None)
        if trace.discovering:
            trace.scope.set_cell(self, ())
            return jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), self.spec)
        cell = trace.scope.cell(self)
        if id(self) in trace.slabs:
            trace.scope.set_cell(self, cell + 1)
            return jax.tree.map(lambda a: a[cell, 0], trace.slabs[id(self)])
        cell = self._fetch_if_needed(cell, trace.replicas)
        trace.scope.set_cell(self, cell._replace(position=cell.position + 1, taken=cell.taken + 1))
        return jax.tree.map(lambda a: a[cell.position], cell.rows)

    def first_cell(self, *, sent: bool) -> Tree:
        """The cell at the start of a program: at the first row of a slab that was sent, or with nothing fetched."""
        if sent:
            return jnp.int32(0)
        rows = jax.tree.map(lambda a: jnp.zeros((self._depth, *a.shape), a.dtype), self.spec)
        return Fetched(rows, jnp.int32(0), jnp.int32(0), jnp.int32(0))

    def _fetch_if_needed(self, cell: Fetched, replicas: Replicas) -> Fetched:
        leaves, structure = jax.tree.flatten(cell.rows)
        shapes = specs_of(leaves)

        def fetch() -> tuple[Array, ...]:
            # The argument `taken` keeps the calls in order.
            available, *rows = host_call(
                self._fetch, (jax.ShapeDtypeStruct((), jnp.int32), *shapes), replicas.index(), cell.taken
            )
            return jnp.int32(0), available, *rows

        empty = cell.position >= cell.available
        position, available, *rows = lax.cond(empty, fetch, lambda: (cell.position, cell.available, *leaves))
        return Fetched(jax.tree.unflatten(structure, rows), position, available, cell.taken)

    # --- the host's side

    def take(self, count: int, place: Placement) -> list[Tree]:
        """The next `count` elements for each replica. If there are not so many, an error is raised and none is lost."""
        replicas = place.replicas
        wanted = count * len(place.fed)
        elements = self.elements.take(wanted)
        found = [len(elements)] if replicas.is_local else group.exchange("the infeed queue", len(elements))
        if min(found) < wanted:
            self.elements.put_back(elements)
            whose = "" if len(found) == 1 else f" in instance {found.index(min(found))}"
            raise OutOfRangeError(
                f"The program takes {wanted} elements of the infeed queue, but {min(found)} are left{whose}. Give a "
                "dataset that repeats, take fewer elements, or start again with `infeed_queue.initializer`."
            )
        if not replicas.is_local and not place.own_data:
            check_same(elements)
        return elements

    def slab_bytes(self, count: int) -> int:
        """The bytes that a slab of `count` elements takes on each replica."""
        leaves = jax.tree.leaves(self.spec)
        return count * int(sum(np.dtype(a.dtype).itemsize * math.prod(a.shape) for a in leaves))

    def begin(self, place: Placement) -> None:
        """Call before a program runs that fetches elements."""
        self._dealt = {replica: deque() for replica in place.fed}
        self._used, self.error = dict.fromkeys(self._dealt, 0), None
        self._asking = set(place.replicas.own)

    def end(self, taken: np.ndarray) -> None:
        """Call when the program has ended, with the number of elements that each replica took. The rest is put back."""
        rest = {
            (self._used[replica] + i, replica): element
            for replica, dealt in self._dealt.items()
            for i, element in enumerate(dealt)
            if self._used[replica] + i >= int(taken[replica])
        }
        self.elements.put_back([rest[place] for place in sorted(rest)])

    def _fetch(self, replica: np.ndarray, taken: np.ndarray) -> tuple[np.ndarray, ...]:
        try:
            return self._block(int(replica), int(taken))
        except BaseException as error:
            self.error = error
            raise

    def _block(self, replica: int, taken: int) -> tuple[np.ndarray, ...]:
        """The next elements of a replica that has taken `taken`: their number, and the leaves of `depth` rows."""
        with self._lock:
            mine = self._dealt[replica]
            self._drop(replica, taken)
            # Replicas of other processes do not ask here. They take as many elements as ours.
            for other in self._dealt.keys() - self._asking:
                self._drop(other, min(self._used[own] for own in self._asking))
            # Wait for one element, but take more only if they are ready.
            while not mine or (len(mine) < self._depth and self.elements.at_hand >= len(self._dealt)):
                if not self._deal():
                    break
            block = list(mine)[: self._depth]
        if not block:
            raise OutOfRangeError(
                f"The program has taken {taken} elements of the infeed queue on each of "
                f"{validate.counted(len(self._dealt), 'replica')} and asks for another, but the data has ended. Give "
                "a dataset that repeats, or end the loop earlier."
            )

        def stack(*rows: np.ndarray) -> np.ndarray:
            return np.stack([*rows, *[rows[0]] * (self._depth - len(rows))])

        return np.asarray(len(block), np.int32), *jax.tree.leaves(jax.tree.map(stack, *block))

    def _drop(self, replica: int, taken: int) -> None:
        """Forget the elements that a replica has taken."""
        for _ in range(taken - self._used[replica]):
            self._dealt[replica].popleft()
        self._used[replica] = max(taken, self._used[replica])

    def _deal(self) -> bool:
        """Deal one more element to each replica, if there are enough."""
        elements = self.elements.take(len(self._dealt))
        if len(elements) < len(self._dealt):
            self.elements.put_back(elements)
            return False
        for part, element in zip(self._dealt.values(), elements, strict=True):
            part.append(element)
        return True


def slabs_of(wanted: Sequence[tuple[InfeedSource, int]], place: Placement) -> list[Tree]:
    """The next elements of several sources, as many for each replica as given, sent to the devices.

    If one source has too few, the others keep theirs.
    """
    taken: list[tuple[InfeedSource, list[Tree]]] = []
    try:
        for source, count in wanted:
            taken.append((source, source.take(count, place)))
    except BaseException:
        for source, elements in reversed(taken):
            source.elements.put_back(elements)
        raise
    return [_sent(elements, place) for _, elements in taken]


def _sent(elements: list[Tree], place: Placement) -> Tree:
    """Elements on the devices, as one slab."""
    replicas, fed = place.replicas, len(place.fed)

    def stack(*rows: np.ndarray) -> np.ndarray:
        return np.stack(rows).reshape(-1, fed, *rows[0].shape)

    stacked = jax.tree.map(stack, *elements)
    return send_own(stacked, replicas.split(1), 1) if place.own_data else replicas.send(stacked, 1)


class FeedArgument:
    """An argument of a function through which it takes elements, such as an iterator.

    A program is traced with a stand-in for it, so that one program serves all such arguments with the same key.
    """

    def feed_key(self) -> Hashable:
        """What a program that takes elements through this has compiled into it."""
        raise NotImplementedError

    def stand_in(self) -> Self:
        """The same without its elements."""
        raise NotImplementedError

    def source(self) -> InfeedSource:
        """What programs take elements from."""
        raise NotImplementedError
