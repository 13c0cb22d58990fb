"""Which steps of a slab a program runs, and what is left over after its whole updates.

An update takes `size` steps, and in each step every replica has one micro-batch. The remainder consists of

    left        steps in which every replica has a micro-batch, fewer than `size`,
    extra       replicas (the first ones) that have one more micro-batch,
    the tail    a smaller last batch, which goes to the next replica.

Together they make one last, incomplete update. It equals the update of one device with all of these samples in one
batch: each sample has the same weight, and if losses are means, the update is as strong as a whole one. If losses are
sums, a sample counts as much as in a whole update.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from openipu.engine.types import Array, Tree

import jax.numpy as jnp
import numpy as np

Number = Array | int
"""A number or condition that may be known only when the program runs."""


class Counts(NamedTuple):
    """Which steps of a slab to run: the part of a program's arguments that may differ from launch to launch.

    It is sent as one array, because each array adds some microseconds to a launch on a GPU.
    """

    first: Number
    """The first step."""
    steps: Number
    """The number of steps for which every replica has a micro-batch."""
    extra: Number
    """The number of replicas that have one more micro-batch after these steps."""

    def pack(self) -> np.ndarray:
        """The counts as one array."""
        return np.array(self, np.int32)

    @classmethod
    def unpack(cls, packed: Array) -> Counts:
        """The inverse of `pack`, inside the program."""
        return cls(packed[0], packed[1], packed[2])

    def batches(self, replicas: int) -> Number:
        """The number of full batches in the slab up to the end of these steps, over all replicas."""
        return (self.first + self.steps) * replicas + self.extra

    def split(self, size: int) -> tuple[Counts, Counts]:
        """The steps that fill updates of `size` steps, and the rest."""
        whole = self.steps // size * size
        return Counts(self.first, whole, 0), Counts(self.first + whole, self.steps - whole, self.extra)


class Form(NamedTuple):
    """What a program is able to run besides a tail, whose shape it is compiled for. [Note: one program, one job]

    Whole updates and the remainder of an execution run in different programs. Most executions have no remainder, so
    their program holds the step only once. The other programs are compiled when the data first ends in such a way,
    which no first step has to wait for.
    """

    updates: Literal["none", "any", "all"] = "none"
    """Whether it runs whole updates: as many as the counts say, or as many as the slab has room for."""
    turns: bool = False
    """Whether it runs micro-batches that do not fill an update."""


class Job(NamedTuple):
    """What one launch runs of a slab."""

    form: Form
    counts: Counts
    tail: Tree = None

    @classmethod
    def of_rest(cls, rest: Counts, tail: Tree) -> list[Job]:
        """The job of what is left over after whole updates, if anything is."""
        turns = bool(rest.steps or rest.extra)
        return [cls(Form(turns=turns), rest, tail)] if turns or tail is not None else []


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
    """Samples in the tail, or 0 if there is none."""
    updates: Number
    """The number of whole updates before it."""
    first: Number
    """The step at which it begins."""
    left: Number
    extra: Number
    samples: Number
    """The number of samples in it; 0 if nothing is left over."""
    adds: bool = False
    """Whether the loss of a micro-batch is the sum over its samples, not the mean."""

    @classmethod
    def of(
        cls, counts: Counts, size: int, replicas: int, strength: int, rows: int, tail_rows: int, adds: bool = False
    ) -> Remainder:
        """What is left over of `counts` after updates of `size` steps."""
        updates = counts.steps // size if size > 1 else counts.steps
        left = counts.steps - updates * size if size > 1 else 0
        first, samples = counts.first + updates * size, rows * (left * replicas + counts.extra) + tail_rows
        return cls(
            size, replicas, strength, rows, tail_rows, updates, first, left, counts.extra, samples, adds
        )  # fmt: skip

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
        """The factor on the gradient of a micro-batch with `rows` samples."""
        if self.adds:
            return jnp.asarray(self.strength / (self.size * self.replicas))
        return rows * self.strength / jnp.maximum(self.samples, 1)
