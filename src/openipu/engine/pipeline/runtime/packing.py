"""Arrays of different stages in shared buffers.

All devices run one program, so an array that only stage 2 needs is still an array on every device. To need no more
memory than the largest device does, the arrays of different devices share buffers. A device's arrays are placed from
the largest to the smallest, each in the buffer that it fills best. An array that fills its buffer, which is the normal
case in a model of equal parts, is read and written without a copy.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from openipu.engine.types import Array

import jax.numpy as jnp
import numpy as np
from jax import lax

Buffers = dict[int, Array]
"""Buffers by number: all of them, or only those that are needed."""


class Shaped(Protocol):
    """An array, a variable, or anything else with a shape and a dtype."""

    @property
    def shape(self) -> Sequence[int]:
        """The length of each axis."""

    @property
    def dtype(self) -> Any:
        """Anything that `np.dtype` understands."""


@dataclass(frozen=True, slots=True)
class Spec:
    """Shape and dtype of an array."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    @property
    def size(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        """The bytes of all elements."""
        return self.size * self.dtype.itemsize

    @classmethod
    def of(cls, array: Shaped) -> Spec:
        """The shape and dtype of an array or variable."""
        return cls(tuple(array.shape), np.dtype(array.dtype))


@dataclass(frozen=True, slots=True)
class Slot:
    """The place of an array: a buffer, and the offset of the array's first element in it."""

    buffer: int
    offset: int
    spec: Spec

    @property
    def flat(self) -> Slot:
        """The same place, with the array as a vector."""
        return Slot(self.buffer, self.offset, Spec((self.spec.size,), self.spec.dtype))


@dataclass(frozen=True, slots=True)
class Packing:
    """The place of every array in each group. Buffers are vectors, or matrices whose rows are used like vectors."""

    buffers: tuple[Spec, ...]
    slots: tuple[tuple[Slot, ...], ...]
    """The places of each group's arrays."""

    def read(self, buffers: Buffers, slots: Sequence[Slot], row: Array | None = None) -> list[Array]:
        """The arrays at `slots`, from `buffers` or from one row of each."""
        return [self._get(buffers[slot.buffer], slot, row) for slot in slots]

    def write(
        self, buffers: Buffers, slots: Sequence[Slot], arrays: Sequence[Array], row: Array | None = None
    ) -> Buffers:
        """The buffers with `arrays` at `slots`, or in one row of each."""
        new = dict(buffers)
        for slot, array in zip(slots, arrays, strict=True):
            new[slot.buffer] = self._set(new[slot.buffer], slot, jnp.asarray(array, new[slot.buffer].dtype), row)
        return new

    def zeros(self, rows: int | None = None, dtype: Any = None) -> Buffers:
        """Buffers of zeros: vectors, or matrices with `rows` rows. `dtype` replaces their own dtypes."""
        front = () if rows is None else (rows,)
        return {i: jnp.zeros((*front, *spec.shape), dtype or spec.dtype) for i, spec in enumerate(self.buffers)}

    @property
    def bytes(self) -> int:
        """The bytes of the buffers on each device."""
        return sum(spec.bytes for spec in self.buffers)

    def _get(self, buffer: Array, slot: Slot, row: Array | None) -> Array:
        flat = buffer if row is None else buffer[row]
        if slot.spec.size != self.buffers[slot.buffer].size:
            flat = lax.slice_in_dim(flat, slot.offset, slot.offset + slot.spec.size)
        return flat.reshape(slot.spec.shape)

    def _set(self, buffer: Array, slot: Slot, array: Array, row: Array | None) -> Array:
        flat = array.reshape(-1)
        if row is not None:
            return lax.dynamic_update_slice(buffer, flat[None], (row, slot.offset))
        if slot.spec.size == self.buffers[slot.buffer].size:
            return flat
        return lax.dynamic_update_slice(buffer, flat, (slot.offset,))


def used(buffers: Buffers, slots: Iterable[Slot]) -> Buffers:
    """The buffers that contain these slots."""
    return {number: buffers[number] for number in sorted({slot.buffer for slot in slots})}


def pack(groups: Sequence[Sequence[Spec]], homes: Sequence[int]) -> Packing:
    """A packing for groups of arrays. Groups with different homes may overlap; those with the same home do not."""
    sizes: list[int] = []
    dtypes: list[np.dtype[Any]] = []
    slots: list[list[Slot]] = [[Slot(0, 0, spec) for spec in group] for group in groups]

    def place(home: int) -> None:
        room = dict.fromkeys(range(len(sizes)), 0)  # the first free element of each buffer
        mine = [(spec, g, i) for g, group in enumerate(groups) if homes[g] == home for i, spec in enumerate(group)]
        for spec, g, i in sorted(mine, key=lambda item: -item[0].size):
            fitting = [
                (sizes[b] - first - spec.size, b)
                for b, first in room.items()
                if dtypes[b] == spec.dtype and sizes[b] - first >= spec.size
            ]
            if fitting:
                _, buffer = min(fitting)
            else:
                buffer = len(sizes)
                sizes.append(spec.size)
                dtypes.append(spec.dtype)
                room[buffer] = 0
            slots[g][i] = Slot(buffer, room[buffer], spec)
            room[buffer] += spec.size

    def total(home: int) -> int:
        return sum(s.bytes for g, group in enumerate(groups) if homes[g] == home for s in group)

    for home in sorted(set(homes), key=lambda home: (-total(home), home)):
        place(home)
    buffers = tuple(Spec((size,), dtype) for size, dtype in zip(sizes, dtypes, strict=True))
    return Packing(buffers, tuple(map(tuple, slots)))
