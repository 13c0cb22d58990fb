"""Arrays of different stages in common buffers.

All devices run one program, so an array that only stage 2 has still is an array on every device. To hold no more than
the largest device needs, the arrays of different devices share buffers: a device's largest array goes where another
device has one of its size, and what is left over takes what is free. Arrays that fill their buffer, which is the normal
case in a model of equal parts, are read and written without a copy.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

Buffers = dict[int, Any]
"""Buffers by number: all of them, or those that somebody uses."""


@dataclass(frozen=True, slots=True)
class Spec:
    """Shape and dtype of an array."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    @property
    def size(self) -> int:
        """Elements."""
        return math.prod(self.shape)

    @classmethod
    def of(cls, array: Any) -> Spec:
        """The shape and dtype of something that has both."""
        return cls(tuple(array.shape), np.dtype(array.dtype))


@dataclass(frozen=True, slots=True)
class Slot:
    """Where an array lies: in a buffer, from an element on."""

    buffer: int
    offset: int
    spec: Spec

    @property
    def flat(self) -> Slot:
        """The same place for the array as a vector."""
        return Slot(self.buffer, self.offset, Spec((self.spec.size,), self.spec.dtype))


@dataclass(frozen=True, slots=True)
class Packing:
    """Where the arrays of each group lie. A buffer is one-dimensional, or a row of something two-dimensional."""

    buffers: tuple[Spec, ...]
    slots: tuple[tuple[Slot, ...], ...]

    def read(self, buffers: Buffers, slots: Sequence[Slot], row: Any = None) -> list[Any]:
        """The arrays at `slots`, from `buffers` or from one row of each."""
        return [self._get(buffers[slot.buffer], slot, row) for slot in slots]

    def write(self, buffers: Buffers, slots: Sequence[Slot], arrays: Sequence[Any], row: Any = None) -> Buffers:
        """The buffers with `arrays` at `slots`."""
        new = dict(buffers)
        for slot, array in zip(slots, arrays, strict=True):
            new[slot.buffer] = self._set(new[slot.buffer], slot, jnp.asarray(array, new[slot.buffer].dtype), row)
        return new

    def zeros(self, rows: int | None = None, dtype: Any = None) -> Buffers:
        """Empty buffers, each with `rows` rows and of another dtype if asked."""
        front = () if rows is None else (rows,)
        return {i: jnp.zeros((*front, *spec.shape), dtype or spec.dtype) for i, spec in enumerate(self.buffers)}

    @property
    def bytes(self) -> int:
        """What the buffers take on each device."""
        return sum(spec.size * spec.dtype.itemsize for spec in self.buffers)

    def _get(self, buffer: Any, slot: Slot, row: Any) -> Any:
        flat = buffer if row is None else buffer[row]
        if slot.spec.size != self.buffers[slot.buffer].size:
            flat = lax.slice_in_dim(flat, slot.offset, slot.offset + slot.spec.size)
        return flat.reshape(slot.spec.shape)

    def _set(self, buffer: Any, slot: Slot, array: Any, row: Any) -> Any:
        flat = array.reshape(-1)
        if row is not None:
            return lax.dynamic_update_slice(buffer, flat[None], (row, slot.offset))
        if slot.spec.size == self.buffers[slot.buffer].size:
            return flat
        return lax.dynamic_update_slice(buffer, flat, (slot.offset,))


def used(buffers: Buffers, slots: Iterable[Slot]) -> Buffers:
    """Those buffers that hold one of the slots."""
    return {number: buffers[number] for number in sorted({slot.buffer for slot in slots})}


def pack(groups: Sequence[Sequence[Spec]], homes: Sequence[int]) -> Packing:
    """Where to put the arrays of each group. Groups with the same home exist at the same time, others may overlap."""
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
        return sum(s.size * s.dtype.itemsize for g, group in enumerate(groups) if homes[g] == home for s in group)

    for home in sorted(set(homes), key=lambda home: (-total(home), home)):
        place(home)
    buffers = tuple(Spec((size,), dtype) for size, dtype in zip(sizes, dtypes, strict=True))
    return Packing(buffers, tuple(map(tuple, slots)))
