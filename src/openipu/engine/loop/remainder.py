"""How much of a slab is there, and what is left over after its whole updates.

An update takes `size` steps, and in each step every replica has one micro-batch. What is left over is made of

    left        steps in which every replica has a micro-batch, fewer than `size`,
    extra       replicas (the first ones) that have one micro-batch more,
    the tail    a smaller last batch, which goes to the next replica after those.

Together they make one last, incomplete update. In it each sample counts the same, and it is as strong as a whole
update: it does what one device with all of these samples in one batch would do.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

Number = jax.Array | int
"""A number that may be known only when the program runs."""


class Counts(NamedTuple):
    """How much of a slab is there: the part of an execution that may differ from launch to launch.

    It travels as one array, because each array that is sent costs a GPU's launch some microseconds.
    """

    steps: Any
    """Steps for which every replica has a micro-batch."""
    extra: Any
    """Replicas that have one micro-batch more."""
    has_tail: Any
    """Whether the next replica after those has the tail."""

    def pack(self) -> np.ndarray:
        """As one array."""
        return np.array(self, np.int32)

    @classmethod
    def unpack(cls, packed: Any) -> Counts:
        """The inverse of `pack`, inside the program."""
        return cls(packed[0], packed[1], packed[2] > 0)

    def batches(self, replicas: int) -> Any:
        """Full batches over all replicas, without the tail."""
        return self.steps * replicas + self.extra


@dataclass(frozen=True, slots=True)
class Remainder:
    """The micro-batches that do not fill an update."""

    size: int
    """Steps of a whole update."""
    replicas: int
    strength: int
    """How often the mean gradient of its samples counts in a whole update."""
    rows: int
    """Samples of a full micro-batch."""
    tail_rows: int
    """Samples of the tail; 0 if the program has no room for one."""
    updates: Number
    """Whole updates before it."""
    left: Number
    extra: Number
    has_tail: Number
    samples: Number
    """How many there are in all; none if whole updates take everything."""

    @classmethod
    def of(cls, counts: Counts, size: int, replicas: int, strength: int, rows: int, tail_rows: int) -> Remainder:
        """What `counts` leaves over after updates of `size` steps."""
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
        """The step with which it begins."""
        return self.updates * self.size

    @property
    def turns(self) -> Number:
        """How many full micro-batches there are on a replica that has the most."""
        return self.left + jnp.asarray(self.extra > 0, jnp.int32) if self.replicas > 1 else self.left

    def turns_of(self, replica: Number) -> Number:
        """How many full micro-batches there are on this replica."""
        return self.left + jnp.asarray(replica < self.extra, jnp.int32)

    def is_active(self, turn: Number, replica: Number) -> Any:
        """Whether this replica has a micro-batch in this turn."""
        return (turn < self.left) | (replica < self.extra)

    def takes_tail(self, replica: Number) -> Any:
        """Whether the tail, if there is one, goes to this replica."""
        return replica == self.extra

    def share(self, rows: int) -> Any:
        """How often the mean gradient of a micro-batch of so many rows counts."""
        return rows * self.strength / jnp.maximum(self.samples, 1)
