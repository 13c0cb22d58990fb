"""How much of a slab is used, and what is left over after its whole updates.

An update takes `size` steps, and in each step every replica has one micro-batch. The remainder consists of

    left        steps in which every replica has a micro-batch, fewer than `size`,
    extra       replicas (the first ones) that have one more micro-batch,
    the tail    a smaller last batch, which goes to the next replica.

Together they make one last, incomplete update. Each sample in it has the same weight, and the update is as strong as a
whole one: it equals the update of one device with all of these samples in one batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from openipu.engine.types import Array

import jax.numpy as jnp
import numpy as np

Number = Array | int
"""A number or condition that may be known only when the program runs."""


class Counts(NamedTuple):
    """How much of a slab is used: the part of an execution that may differ from launch to launch.

    It is sent as one array, because each array adds some microseconds to a launch on a GPU.
    """

    steps: Number
    """Steps for which every replica has a micro-batch."""
    extra: Number
    """Replicas that have one more micro-batch."""
    has_tail: Number
    """Whether the next replica has the tail."""

    def pack(self) -> np.ndarray:
        """The counts as one array."""
        return np.array(self, np.int32)

    @classmethod
    def unpack(cls, packed: Array) -> Counts:
        """The inverse of `pack`, inside the program."""
        return cls(packed[0], packed[1], packed[2] > 0)

    def batches(self, replicas: int) -> Number:
        """The number of full batches over all replicas, without the tail."""
        return self.steps * replicas + self.extra


@dataclass(frozen=True, slots=True)
class Remainder:
    """The micro-batches that do not fill an update."""

    size: int
    """Steps in a whole update."""
    replicas: int
    strength: int
    """The factor on the mean gradient of its samples in a whole update."""
    rows: int
    """Samples in a full micro-batch."""
    tail_rows: int
    """Samples in the tail, or 0 if the program has no room for one."""
    updates: Number
    """The number of whole updates before it."""
    left: Number
    extra: Number
    has_tail: Number
    samples: Number
    """The number of samples in it; 0 if nothing is left over."""

    @classmethod
    def of(cls, counts: Counts, size: int, replicas: int, strength: int, rows: int, tail_rows: int) -> Remainder:
        """What is left over of `counts` after updates of `size` steps."""
        updates = counts.steps // size if size > 1 else counts.steps
        left = counts.steps - updates * size if size > 1 else 0
        samples = rows * (left * replicas + counts.extra) + tail_rows * counts.has_tail
        return cls(
            size, replicas, strength, rows, tail_rows, updates, left, counts.extra, counts.has_tail, samples
        )  # fmt: skip

    @property
    def has_turns(self) -> bool:
        """Whether full micro-batches can be left over."""
        return self.size > 1 or self.replicas > 1

    @property
    def is_possible(self) -> bool:
        """Whether anything can be left over."""
        return self.has_turns or self.tail_rows > 0

    @property
    def first(self) -> Number:
        """The step at which it begins."""
        return self.updates * self.size

    @property
    def turns(self) -> Number:
        """The number of full micro-batches on the replica that has the most."""
        return self.left + jnp.asarray(self.extra > 0, jnp.int32) if self.replicas > 1 else self.left

    def turns_of(self, replica: Number) -> Number:
        """The number of full micro-batches on this replica."""
        return self.left + jnp.asarray(replica < self.extra, jnp.int32)

    def is_active(self, turn: Number, replica: Number) -> Number:
        """Whether this replica has a micro-batch in this turn."""
        return (turn < self.left) | (replica < self.extra)

    def takes_tail(self, replica: Number) -> Number:
        """Whether the tail, if there is one, goes to this replica."""
        return replica == self.extra

    def share(self, rows: int) -> Array:
        """The factor on the mean gradient of a micro-batch with `rows` samples."""
        return rows * self.strength / jnp.maximum(self.samples, 1)
