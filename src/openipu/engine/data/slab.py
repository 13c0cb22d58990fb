"""The data of one execution, as arrays of static shape.

[Note: the last partial batch] The last partial batch is not padded. It is the `tail` of its slab and runs as a smaller
step at the end of the same execution, so that BatchNormalization, custom losses, custom metrics and custom train steps
see exactly the rows that plain Keras shows them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from openipu.engine.devices.replicas import Replicas
from openipu.engine.shapes import signature
from openipu.engine.types import Tree

import jax
import numpy as np

SMALL_SLAB = 64 << 10
"""Slabs up to this many bytes are not sent ahead but travel with the launch, which saves a call to JAX."""


@dataclass(frozen=True, slots=True)
class Slab:
    """The data of one execution: `count` equal batches stacked in `body`, and possibly a smaller `tail`.

    Axis 0 of `body` is the step, axis 1 the replica: batch i of the slab goes to replica i mod R. `body` may have room
    for more than `count` batches, because its shape is static but the number of steps is not. It is None if only a tail
    is left.
    """

    begin: int
    count: int
    body: Tree
    tail: Tree
    own: int | None = None
    """The batches that this process has read for it, if it has data of its own."""

    @property
    def has_tail(self) -> bool:
        """Whether a smaller batch comes last."""
        return self.tail is not None

    @property
    def steps(self) -> int:
        """Batches in the slab, over all replicas."""
        return self.count + self.has_tail

    @property
    def batch_size(self) -> int:
        """The samples of a full batch; 0 if there is only a tail."""
        return 0 if self.body is None else int(jax.tree.leaves(self.body)[0].shape[2])

    @property
    def samples(self) -> int:
        """The samples in the slab, over all replicas."""
        return self.count * self.batch_size + (int(jax.tree.leaves(self.tail)[0].shape[0]) if self.has_tail else 0)

    @property
    def end(self) -> int:
        """The index of the last step, as callbacks count."""
        return self.begin + self.steps - 1


def send_slab(begin: int, count: int, body: Tree, tail: Tree, replicas: Replicas) -> Slab:
    """Send a slab to the devices, with its batches dealt to the replicas in turn."""
    dealt = jax.tree.map(lambda a: deal(a, replicas.count), body)
    if replicas.count == 1 and sum(a.nbytes for a in jax.tree.leaves((dealt, tail))) <= SMALL_SLAB:
        return Slab(begin, count, dealt, tail)
    return Slab(begin, count, replicas.send(dealt, 1), replicas.send(tail))


def deal(stacked: np.ndarray, replicas: int) -> np.ndarray:
    """Stacked batches by step and replica."""
    return stacked.reshape(len(stacked) // replicas, replicas, *stacked.shape[1:])


def as_arrays(batch: Tree) -> Tree:
    """A batch as dense NumPy arrays."""
    return jax.tree.map(_dense, batch, is_leaf=lambda leaf: hasattr(leaf, "todense"))


def _dense(leaf: object) -> np.ndarray:
    return np.asarray(leaf.todense() if hasattr(leaf, "todense") else leaf)


def is_tail(batch: Tree, full: Tree) -> bool:
    """Whether `batch` is `full` with fewer rows."""
    if full is None or signature(batch)[0] != signature(full)[0]:
        return False
    pairs = list(zip(jax.tree.leaves(batch), jax.tree.leaves(full), strict=True))
    return all(
        a.ndim and b.ndim and a.dtype == b.dtype and a.shape[1:] == b.shape[1:] and a.shape[0] < b.shape[0]
        for a, b in pairs
    )


class Batches:
    """Batches of one shape, stacked as they are read: a source may use the memory of one batch for the next."""

    def __init__(self, width: int) -> None:
        self._width = width
        self.count = 0
        self.stacked: Tree = None
        """An array with room for `width` batches in place of each array of a batch; None if there are none."""

    def add(self, batch: Tree) -> None:
        """Copy one more batch."""
        if self.stacked is None:
            self.stacked = jax.tree.map(lambda a: np.zeros((self._width, *a.shape), a.dtype), batch)
        for stacked, array in zip(jax.tree.leaves(self.stacked), jax.tree.leaves(batch), strict=True):
            stacked[self.count] = array
        self.count += 1

    def batches(self) -> list[Tree]:
        """The batches, one by one."""
        return [jax.tree.map(lambda a, i=i: a[i], self.stacked) for i in range(self.count)]


def stack_rows(rows: Sequence[np.ndarray], width: int) -> np.ndarray:
    """Rows stacked into an array with room for `width` rows; the unused ones are zero."""
    stacked = np.zeros((width, *rows[0].shape), rows[0].dtype)
    for i, row in enumerate(rows):
        stacked[i] = row
    return stacked
