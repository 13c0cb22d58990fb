"""Host data -> static slabs, one per execution.

Who does what:
- Keras' data adapters read every kind of source (arrays, tf.data, grain, PyDataset, DataLoader, generators).
- A source here hands out passes over that data; `ArraySource` deals in the order of samples only, because its arrays
  are resident on the device, `StreamSource` in the batches themselves.
- `Feed` cuts passes into epochs and epochs into slabs of at most `steps_per_execution` batches.
- The loop (loop.py) runs one slab per launch.
- `Position` (position.py) says where a feed is, so that a feed in another process can go on from there.

[Note: the last partial batch] is not padded. It is the `tail` of its slab and runs as a step of its own size at the
end of the same program, so that BatchNormalization, custom losses, custom metrics and custom train steps see exactly
the rows that plain Keras shows them.
"""

from __future__ import annotations

import functools
import itertools
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import jax
import numpy as np

from . import adapters
from . import model as keras_model
from .position import Position, Random, random, set_random
from .replicate import Replicas

Tree = Any

SMALL_SLAB = 64 << 10
"""Bytes up to which a slab is not sent ahead but travels with its launch, which then is one call to JAX less."""


@dataclass(frozen=True, slots=True)
class Slab:
    """What one execution processes: `count` equal batches stacked in `body`, then perhaps one smaller `tail`.

    Axis 0 of `body` is the step, axis 1 the replica: batch number i of the slab goes to replica i mod R. It may have
    room for more than `count` batches (its shape is static, the trip count is not) and is None when only a tail is
    left. `tail` is always given, and ignored without `has_tail`, when its size is known before the end of the data.
    """

    begin: int
    count: int
    body: Tree
    tail: Tree
    has_tail: bool

    @property
    def steps(self) -> int:
        """Batches in the slab, over all replicas."""
        return self.count + self.has_tail

    @property
    def end(self) -> int:
        """Index of the last step, as callbacks count."""
        return self.begin + self.steps - 1


class Pass(Protocol):
    """One run through the data from its first sample to its last."""

    def take(self, begin: int, steps: int) -> Slab | None:
        """The next at most `steps` batches, or None at the end of the data."""

    def skip(self, steps: int) -> None:
        """Leave out that many batches."""


class Source(Protocol):
    """Data that can be passed over."""

    resident: Tree
    num_batches: int | None
    batch_size: int | None
    opened: Random
    """The random sequences when the pass that was started last was opened."""
    changes: bool
    """Whether the data may change when an epoch ends."""

    def start(self, width: int) -> Pass:
        """A new pass whose slabs are `width` batches wide."""

    def replay(self, position: Position) -> None:
        """Bring new data to where it was when the pass of `position` was opened, without reading earlier passes."""

    def first_batch(self) -> Tree:
        """The first batch of a pass of its own, as host arrays."""

    def batch_bytes(self) -> int:
        """Bytes that one batch adds to a slab."""

    def begin_epoch(self) -> None:
        """Called before the first batch of an epoch is read."""

    def end_epoch(self) -> None:
        """Called after the last batch of an epoch was read, also when training stops in the middle of it."""


# --- arrays ----------------------------------------------------------------------------------------------------------


class ArraySource:
    """Arrays made resident on the device once; a slab holds row numbers, and the program gathers its batches."""

    def __init__(self, adapter: Any, replicas: Replicas) -> None:
        self._samples, batch, self._shuffle = keras_model.array_order(adapter)
        self._batch = min(batch, self._samples)
        self.batch_size: int | None = self._batch
        self._replicas = replicas
        self.num_batches: int | None = adapter.num_batches
        self.changes = False
        self._host = keras_model.converted_arrays(adapter)
        self.resident: Tree = jax.device_put(self._host, replicas.everywhere())

    def start(self, width: int) -> _ArrayPass:
        """Begin a pass in a new order."""
        self.opened = random()
        return _ArrayPass(self._order(), self._batch, width, self._replicas)

    def replay(self, position: Position) -> None:
        """Nothing: each order is drawn from NumPy's random sequence alone."""

    def first_batch(self) -> Tree:
        """Gather the first batch on the host."""
        rows = np.random.permutation(self._batch) if self._shuffle == "batch" else self._order()[: self._batch]
        return jax.tree.map(lambda a: a[rows], self._host)

    def batch_bytes(self) -> int:
        """Count the row numbers, which are all that is sent."""
        return 4 * self._batch

    def begin_epoch(self) -> None:
        """Nothing: arrays know no epochs."""

    def end_epoch(self) -> None:
        """Nothing: arrays know no epochs."""

    def _order(self) -> np.ndarray:
        """Row numbers in the order of plain Keras, drawn from the same random sequence."""
        if self._shuffle == "batch":
            starts = range(0, self._samples, self._batch)
            sizes = [min(self._batch, self._samples - s) for s in starts]
            return np.concatenate([np.random.permutation(n) + s for s, n in zip(starts, sizes, strict=True)])
        return np.random.permutation(self._samples) if self._shuffle else np.arange(self._samples)


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
        return _slab(begin, len(rows), body, self._tail if len(self._tail) else None, has_tail, self._replicas)

    def skip(self, steps: int) -> None:
        self._position += steps


# --- everything else -------------------------------------------------------------------------------------------------


class StreamSource:
    """Batches as they come from a data adapter, stacked on the host and sent one slab at a time.

    [Note: who opens the data] Opening a shuffled source moves its random sequence on. Plain Keras opens it once when
    it has to see a batch to build the model, and once per pass. So a batch that was only read to learn its size is kept
    for whichever of the two comes next.
    """

    def __init__(self, adapter: Any, replicas: Replicas) -> None:
        self._adapter, self._replicas = adapter, replicas
        self.resident: Tree = None
        self.num_batches: int | None = adapter.num_batches
        self.batch_size: int | None = adapter.batch_size
        self.changes = adapters.changes(adapter)
        self._peeked: tuple[Tree, Iterator[Tree]] | None = None

    def start(self, width: int) -> _StreamPass:
        """Begin a pass, with the batch that was read to learn its size, if one was."""
        peeked, self._peeked = self._peeked, None
        if not peeked:
            self.opened = random()
        batches = itertools.chain([peeked[0]], peeked[1]) if peeked else adapters.batches(self._adapter)
        return _StreamPass(batches, width, self._replicas)

    def replay(self, position: Position) -> None:
        """End the epochs that were ended, and open the data as often as it was.

        A pass that was begun to learn the size of a batch is the first one.
        """
        begun, passes = self._peeked is not None, position.passes - 1
        if passes or not adapters.opens_once(self._adapter):
            self._peeked = None
        adapters.replay_epochs(self._adapter, [functools.partial(set_random, state) for state in position.ends])
        adapters.replay_passes(self._adapter, passes - begun)

    def first_batch(self) -> Tree:
        """Read one batch to build the model from."""
        batch, _ = self._peek()
        if not adapters.reads_ahead(self._adapter):
            self._peeked = None
        return batch

    def batch_bytes(self) -> int:
        """Measure the first batch."""
        batch, _ = self._peek()
        return sum(np.asarray(leaf).nbytes for leaf in jax.tree.leaves(_as_arrays(batch)))

    def begin_epoch(self) -> None:
        """Tell the adapter, which may start workers."""
        self._adapter.on_epoch_begin()

    def end_epoch(self) -> None:
        """Tell the adapter, which may stop workers or reshuffle."""
        self._adapter.on_epoch_end()

    def _peek(self) -> tuple[Tree, Iterator[Tree]]:
        if self._peeked is None:
            self.opened = random()
            batches = adapters.batches(self._adapter)
            batch = next(batches, None)
            if batch is None:
                raise ValueError(
                    "The data source is empty: it gave 0 batches. Give at least one batch; a generator that was "
                    "already used up cannot be read a second time."
                )
            self._peeked = batch, batches
        return self._peeked


class _StreamPass:
    def __init__(self, batches: Iterator[Tree], width: int, replicas: Replicas) -> None:
        self._batches: Iterator[Tree] = map(_as_arrays, batches)
        self._width, self._replicas = width, replicas
        self._full: Tree = None

    def take(self, begin: int, steps: int) -> Slab | None:
        alike, other = self._read(steps)
        if not alike and other is None:
            return None
        if alike:
            self._full = alike[0]
        tail = other if len(alike) < steps and _is_tail(other, self._full) else None
        if other is not None and tail is None:
            self._batches = itertools.chain([other], self._batches)
        body = jax.tree.map(lambda *rows: _stack(rows, self._width), *alike) if alike else None
        return _slab(begin, len(alike), body, tail, tail is not None, self._replicas)

    def skip(self, steps: int) -> None:
        for batch in itertools.islice(self._batches, steps):
            if not _is_tail(batch, self._full):
                self._full = batch

    def _read(self, steps: int) -> tuple[list[Tree], Tree]:
        """Up to `steps` batches of one shape, and the batch of another shape that ended them, if one did."""
        alike: list[Tree] = []
        for batch in itertools.islice(self._batches, steps):
            if (not alike and _is_tail(batch, self._full)) or (alike and _spec(batch) != _spec(alike[0])):
                return alike, batch
            alike.append(batch)
        return alike, None


def _slab(begin: int, count: int, body: Tree, tail: Tree, has_tail: bool, replicas: Replicas) -> Slab:
    """Send a slab to the devices, its batches dealt to the replicas in turn."""
    dealt = jax.tree.map(lambda a: a.reshape(-1, replicas.count, *a.shape[1:]), body)
    if replicas.count == 1 and sum(a.nbytes for a in jax.tree.leaves((dealt, tail))) <= SMALL_SLAB:
        return Slab(begin, count, dealt, tail, has_tail)
    return Slab(
        begin, count, jax.device_put(dealt, replicas.split(1)), jax.device_put(tail, replicas.everywhere()), has_tail
    )


def _as_arrays(batch: Tree) -> Tree:
    return jax.tree.map(_dense, batch, is_leaf=lambda leaf: hasattr(leaf, "todense"))


def _dense(leaf: Any) -> np.ndarray:
    return np.asarray(leaf.todense() if hasattr(leaf, "todense") else leaf)


def _spec(batch: Tree) -> tuple[Any, Any]:
    return jax.tree.structure(batch), [(a.shape, a.dtype) for a in jax.tree.leaves(batch)]


def _is_tail(batch: Tree, full: Tree) -> bool:
    """Whether `batch` is `full` with fewer rows."""
    if full is None or _spec(batch)[0] != _spec(full)[0]:
        return False
    pairs = list(zip(jax.tree.leaves(batch), jax.tree.leaves(full), strict=True))
    return all(
        a.ndim and b.ndim and a.dtype == b.dtype and a.shape[1:] == b.shape[1:] and a.shape[0] < b.shape[0]
        for a, b in pairs
    )


def _stack(rows: Sequence[np.ndarray], width: int) -> np.ndarray:
    """Rows stacked into an array of `width` rows; what is left over is zero."""
    stacked = np.zeros((width, *rows[0].shape), rows[0].dtype)
    for i, row in enumerate(rows):
        stacked[i] = row
    return stacked


# --- epochs ----------------------------------------------------------------------------------------------------------


@dataclass
class Feed:
    """Slabs epoch by epoch. With `steps_per_epoch`, an epoch goes on where the last one stopped.

    `width`, `steps_per_epoch` and the steps of slabs count batches over all replicas.
    """

    source: Source
    width: int
    steps_per_epoch: int | None = None
    _pass: Pass | None = field(default=None, repr=False)
    _here: Position = field(default_factory=Position, repr=False)
    _resume: Position | None = field(default=None, repr=False)

    @property
    def num_steps(self) -> int | None:
        """Steps in an epoch, None if nobody knows yet."""
        return self.steps_per_epoch or self.source.num_batches

    def restart(self) -> None:
        """Begin the next epoch at the first batch."""
        self._pass = None

    def position(self) -> Position:
        """Where the feed is: behind the slab that was given out last."""
        source = self.source
        return replace(self._here, batch_size=source.batch_size, opened=source.opened, ahead=random())

    def resume(self, position: Position) -> None:
        """Let the next epoch begin at `position`, which another feed of the same data had reached."""
        self._resume = position.for_batches_of(self.source.batch_size, self.source.num_batches)

    def epoch(self) -> Iterator[Slab]:
        """Give the slabs of the next epoch."""
        resume, self._resume = self._resume, None
        self._here = replace(self._here, done=0) if resume is None else resume
        if resume is not None:
            self.source.replay(resume)
        self.source.begin_epoch()
        try:
            yield from self._slabs(resume)
        finally:
            if self.source.changes:
                self._here = replace(self._here, ends=(*self._here.ends, random()))
            self.source.end_epoch()
        if resume is not None and resume.step == self._here.step:
            set_random(resume.now)

    def _slabs(self, resume: Position | None) -> Iterator[Slab]:
        if resume is None and self.steps_per_epoch is None:
            self._pass = None
        slab = self._next() if resume is None else self._reopen(resume)
        while slab is not None:
            yield slab
            slab = self._next()
        if self.steps_per_epoch is not None and self._here.done < self.steps_per_epoch:
            warnings.warn(
                f"The data ended after {self._here.done} of the {self.steps_per_epoch} steps of this epoch. Give a "
                "source that repeats (for example `tf.data.Dataset.repeat()` or `openipu.data.repeat`), or a smaller "
                "`steps_per_epoch`.",
                stacklevel=2,
            )

    def _reopen(self, resume: Position) -> Slab | None:
        """Come to a position within a pass; the slab behind it."""
        set_random(resume.opened)
        self._pass = self.source.start(self.width)
        self._pass.skip(resume.taken)
        set_random(resume.ahead)
        slab = self._next()
        if slab is not None:
            set_random(resume.now)
        return slab

    def _next(self) -> Slab | None:
        here = self._here
        wanted = self.width if self.steps_per_epoch is None else min(self.width, self.steps_per_epoch - here.done)
        slab = self._take(here.done, wanted) if wanted > 0 else None
        if slab is not None:
            steps, here = slab.steps, self._here
            self._here = replace(here, done=here.done + steps, taken=here.taken + steps, step=here.step + steps)
        return slab

    def _take(self, done: int, wanted: int) -> Slab | None:
        """The next slab; a pass that ended exactly with the last epoch is followed by a new one."""
        if self._pass is not None:
            slab = self._pass.take(done, wanted)
            if slab is not None:
                return slab
            self._pass = None
            if done:
                return None
        if done == 0:
            self._pass = self.source.start(self.width)
            self._here = replace(self._here, passes=self._here.passes + 1, taken=0)
            return self._pass.take(done, wanted)
        return None
