"""Data that can be read in any number of passes: arrays that are resident on the device, and streams of batches."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Iterator
from typing import Protocol

from openipu.engine.devices import group
from openipu.engine.devices.replicas import Replicas
from openipu.engine.keras_compat import api as keras_api
from openipu.engine.shapes import signature, specs_of
from openipu.engine.types import Data, Tree

import jax
import numpy as np

from . import adapters
from .instances import NEXT, OwnParts, check_same
from .position import Position, Random, random, set_random
from .slab import Batches, Slab, as_arrays, is_tail, send_slab

SAMPLED = 1 << 20
"""How many bytes of an array are looked at to see whether it was changed in place."""


class Pass(Protocol):
    """One pass through the data, from its first sample to its last."""

    def take(self, begin: int, steps: int) -> Slab | None:
        """A slab of up to `steps` batches whose first step is number `begin`, or None at the end of the data."""

    def skip(self, steps: int) -> None:
        """Skip the next `steps` batches of this process."""

    def read_apart(self, steps: int) -> None:
        """Let reading the next `steps` batches of this process draw its random numbers from a sequence of its own.

        It begins at the current random state. Whatever else draws random numbers meanwhile is not disturbed.
        """


class Source(Protocol):
    """Data that can be read in any number of passes."""

    host: Tree
    """All data as arrays in host memory, or None if it is not there."""
    resident: Tree
    num_batches: int | None
    batch_size: int | None
    opened: Random
    """The random state when the latest pass was opened."""
    openings: int
    """How often the data was opened: once for each pass, and perhaps to look at a batch."""
    changes: bool
    """Whether the data may change when an epoch ends."""

    def start(self, width: int) -> Pass:
        """A new pass whose slabs are `width` batches wide."""

    def replay(self, position: Position) -> None:
        """Bring fresh data to its state when the pass of `position` was opened, without reading earlier passes."""

    def first_batch(self) -> Tree:
        """The first batch of a separate pass, as host arrays."""

    def batch_bytes(self) -> int:
        """Bytes that one batch adds to a slab."""

    def begin_epoch(self) -> None:
        """Called before the first batch of an epoch is read."""

    def end_epoch(self) -> None:
        """Called after the last batch of an epoch was read, and when training stops in the middle of an epoch."""


class ArraySource:
    """Arrays that are resident on the device. A slab holds row numbers, and the program gathers its batches."""

    def __init__(self, adapter: keras_api.ArrayDataAdapter, replicas: Replicas) -> None:
        self._samples, batch, self._shuffle = keras_api.array_order(adapter)
        self._batch = min(batch, self._samples)
        self.batch_size: int | None = self._batch
        self._replicas = replicas
        self.num_batches: int | None = adapter.num_batches
        self.changes = False
        self.openings = 0
        self._adapter = adapter
        self._send()

    def start(self, width: int) -> _ArrayPass:
        """Start a pass in a new order."""
        self.opened = random()
        return _ArrayPass(self._order(), self._batch, width, self._replicas)

    def replay(self, position: Position) -> None:
        """Do nothing: the order depends on NumPy's random state alone."""

    def first_batch(self) -> Tree:
        """Gather the first batch on the host."""
        rows = np.random.permutation(self._batch) if self._shuffle == "batch" else self._order()[: self._batch]
        return jax.tree.map(lambda a: a[rows], self.host)

    def batch_bytes(self) -> int:
        """Count the row numbers, which are all that is sent."""
        return 4 * self._batch

    def begin_epoch(self) -> None:
        """Send the arrays again if they have been changed in place, as callbacks of users do."""
        if self._sent != _sample(keras_api.adapted_arrays(self._adapter)):
            self._send()

    def end_epoch(self) -> None:
        """Do nothing: the end of an epoch changes nothing."""

    def _send(self) -> None:
        self._sent = _sample(keras_api.adapted_arrays(self._adapter))
        self.host: Tree = keras_api.converted_arrays(self._adapter)
        self.resident: Tree = self._replicas.send(self.host)

    def _order(self) -> np.ndarray:
        """Row numbers in the order of plain Keras, drawn from the same random numbers."""
        if self._shuffle == "batch":
            starts = range(0, self._samples, self._batch)
            sizes = [min(self._batch, self._samples - s) for s in starts]
            return np.concatenate([np.random.permutation(n) + s for s, n in zip(starts, sizes, strict=True)])
        return np.random.permutation(self._samples) if self._shuffle else np.arange(self._samples)


def _sample(arrays: Data) -> list[bytes]:
    """Rows from all over each NumPy array: all rows of small arrays, and `SAMPLED` bytes of large ones."""
    found = [leaf for leaf in jax.tree.leaves(arrays) if isinstance(leaf, np.ndarray)]
    return [array[:: -(-array.nbytes // SAMPLED) or 1].tobytes() for array in found]


class _ArrayPass:
    def __init__(self, order: np.ndarray, batch: int, width: int, replicas: Replicas) -> None:
        full = len(order) // batch
        self._full = order[: full * batch].reshape(full, batch).astype(np.int32)
        self._tail = order[full * batch :].astype(np.int32)
        self._width, self._replicas = width, replicas
        self._position = 0

    def take(self, begin: int, steps: int) -> Slab | None:
        rows = self._full[self._position : self._position + steps]
        has_tail = len(self._tail) > 0 and self._position <= len(self._full) < self._position + steps
        self._position += steps
        if not len(rows) and not has_tail:
            return None
        body = np.zeros((self._width, self._full.shape[1]), np.int32)
        body[: len(rows)] = rows
        return send_slab(begin, len(rows), body, self._tail if has_tail else None, self._replicas)

    def skip(self, steps: int) -> None:
        self._position += steps

    def read_apart(self, steps: int) -> None:
        """Do nothing: only starting a pass draws random numbers."""


class StreamSource:
    """Batches as they come from a data adapter, stacked on the host and sent one slab at a time.

    [Note: who opens the data] Opening a shuffled source advances its random state. Plain Keras opens it once when it
    needs a batch to build the model, and once per pass. So a batch that was only read to learn its size is kept for
    whichever of the two comes next.
    """

    def __init__(self, adapter: keras_api.DataAdapter, replicas: Replicas, own_data: bool = False) -> None:
        self._adapter, self._replicas, self._own_data = adapter, replicas, own_data
        arrays = isinstance(adapter, keras_api.ArrayDataAdapter)
        self.host: Tree = keras_api.adapted_arrays(adapter) if arrays else None
        self.resident: Tree = None
        self.num_batches: int | None = adapter.num_batches
        if own_data:
            counts = group.exchange("the number of batches", adapter.num_batches)
            self.num_batches = None if None in counts else sum(counts)
        self.batch_size: int | None = adapter.batch_size
        self.changes = adapters.changes(adapter)
        self.openings = 0
        self._peeked: tuple[Tree, Iterator[Tree]] | None = None
        self._dropped: tuple[Tree, Iterator[Tree]] | None = None
        """What was read to build the model, until the first pass starts."""

    def start(self, width: int) -> _StreamPass:
        """Start a pass. A batch that was already read to learn its size comes first."""
        peeked, self._peeked, self._dropped = self._peeked, None, None
        batches = itertools.chain([peeked[0]], peeked[1]) if peeked else self._open()
        return _StreamPass(batches, width, self._replicas, OwnParts(self._replicas) if self._own_data else None)

    def replay(self, position: Position) -> None:
        """End as many epochs, and open the data as many times, as happened before `position`.

        What was opened to look at a batch counts, too. It becomes the pass if that was opened at the same time.
        """
        ahead = self._peeked is not None
        # An older checkpoint does not say how often, so it was as often as here.
        number = position.openings or position.passes + self.openings - ahead
        if adapters.opens_once(self._adapter):
            fitting = self.openings == number
            self._peeked = (self._peeked or self._dropped) if fitting else None
        else:
            self._peeked = None
        adapters.replay_epochs(self._adapter, [functools.partial(set_random, state) for state in position.ends])
        if not self._peeked:
            adapters.replay_passes(self._adapter, number - 1 - self.openings)

    def first_batch(self) -> Tree:
        """Read one batch, for building the model."""
        batch, _ = self._peek()
        if not adapters.reads_ahead(self._adapter):
            self._dropped, self._peeked = self._peeked, None
        return batch

    def batch_bytes(self) -> int:
        """Measure the first batch. If it may be another one when the epoch has begun, it is not kept."""
        before = random()
        batch, _ = self._peek()
        if adapters.changes_at_begin(self._adapter) and not adapters.reads_ahead(self._adapter):
            self._peeked = None
            set_random(before)
        return sum(np.asarray(leaf).nbytes for leaf in jax.tree.leaves(as_arrays(batch)))

    def begin_epoch(self) -> None:
        """Notify the adapter, which may start workers."""
        self._adapter.on_epoch_begin()

    def end_epoch(self) -> None:
        """Notify the adapter, which may stop workers or reshuffle."""
        self._adapter.on_epoch_end()

    def _peek(self) -> tuple[Tree, Iterator[Tree]]:
        if self._peeked is None:
            batches = self._open()
            batch = next(batches, None)
            if batch is None:
                raise adapters.empty_source()
            self._peeked = batch, batches
        return self._peeked

    def _open(self) -> Iterator[Tree]:
        """The batches from the first one on."""
        self.opened = random()
        self.openings += 1
        return adapters.batches(self._adapter)


class _StreamPass:
    def __init__(self, batches: Iterator[Tree], width: int, replicas: Replicas, parts: OwnParts | None) -> None:
        self._batches: Iterator[Tree] = map(as_arrays, batches)
        self._width, self._replicas, self._parts = width, replicas, parts
        self._full: Tree = None
        """What a full batch looks like."""
        self._waiting: Tree = None
        """A batch that was read, but belongs to the next slab."""

    def take(self, begin: int, steps: int) -> Slab | None:
        if self._parts is not None:
            for own in self._parts.shares(steps):
                alike, tail = self._next(own)
                slab = self._parts.slab(begin, steps, self._width, alike.batches(), tail, self._full)
                if slab is not None:
                    return slab
            return None
        alike, tail = self._next(steps)
        if not self._replicas.is_local:
            check_same([alike.batches(), tail])
        if not alike.count and tail is None:
            return None
        return send_slab(begin, alike.count, alike.stacked, tail, self._replicas)

    def skip(self, steps: int) -> None:
        for _ in range(steps):
            batch = self._one()
            if batch is not None and not is_tail(batch, self._full):
                self._full = specs_of(batch)

    def read_apart(self, steps: int) -> None:
        self._batches = _read_apart(self._batches, steps, random())

    def _next(self, steps: int) -> tuple[Batches, Tree]:
        """Up to `steps` full batches, and the smaller one after them, if there is one."""
        with contextlib.nullcontext() if self._replicas.is_local else group.failing_together(NEXT):
            alike, other = self._read(steps)
        if other is None or not is_tail(other, self._full):
            self._waiting = other
            return alike, None
        return alike, jax.tree.map(np.copy, other)

    def _read(self, steps: int) -> tuple[Batches, Tree]:
        """Up to `steps` batches of one shape, and the batch of another shape that followed them, if there was one."""
        alike = Batches(self._width)
        while alike.count < steps and (batch := self._one()) is not None:
            if (not alike.count and is_tail(batch, self._full)) or (
                alike.count and signature(batch) != signature(self._full)
            ):
                return alike, batch
            if not alike.count:
                self._full = specs_of(batch)
            alike.add(batch)
        return alike, None

    def _one(self) -> Tree:
        """The next batch; None at the end."""
        batch, self._waiting = self._waiting, None
        return next(self._batches, None) if batch is None else batch


def _read_apart(batches: Iterator[Tree], steps: int, state: Random) -> Iterator[Tree]:
    """The batches, the first `steps` of which are read with random numbers that continue from `state`."""
    for _ in range(steps):
        outside = random()
        set_random(state)
        try:
            batch = next(batches, None)
            state = random()
        finally:
            set_random(outside)
        if batch is None:
            return
        yield batch
    yield from batches
