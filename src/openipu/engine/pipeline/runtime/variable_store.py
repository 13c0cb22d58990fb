"""A model's variables on the devices that use them, each device with those of its own stages only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .packing import Buffers, Packing, Slot, Spec, pack


@dataclass(frozen=True, slots=True)
class Store:
    """Which variables each device holds, and where in its buffers.

    `held[device]` are numbers of variables. One that stages on several devices use is held by each of them.
    """

    held: tuple[tuple[int, ...], ...]
    packing: Packing

    def slots(self, device: int, numbers: Sequence[int] | None = None) -> list[Slot]:
        """Where a device keeps these variables, or all of its own."""
        at = dict(zip(self.held[device], self.packing.slots[device], strict=True))
        return [at[number] for number in (self.held[device] if numbers is None else numbers)]

    def shared(self) -> list[int]:
        """The variables that several devices hold."""
        numbers = [number for held in self.held for number in held]
        return sorted({number for number in numbers if numbers.count(number) > 1})

    def specs(self) -> dict[int, jax.ShapeDtypeStruct]:
        """The shape of each variable, by number."""
        found: dict[int, jax.ShapeDtypeStruct] = {}
        for held, slots in zip(self.held, self.packing.slots, strict=True):
            found |= {n: jax.ShapeDtypeStruct(s.spec.shape, s.spec.dtype) for n, s in zip(held, slots, strict=True)}
        return found

    # --- outside the program

    def scatter(self, values: Sequence[Any]) -> list[np.ndarray]:
        """All buffers of all devices, filled with the variables' values: arrays of (device, element)."""
        buffers = [np.zeros((len(self.held), spec.size), spec.dtype) for spec in self.packing.buffers]
        for device, held in enumerate(self.held):
            for number, slot in zip(held, self.packing.slots[device], strict=True):
                flat = np.asarray(values[number]).reshape(-1)
                buffers[slot.buffer][device, slot.offset : slot.offset + flat.size] = flat
        return buffers

    def gather(self, buffers: Sequence[Any], count: int) -> list[Any]:
        """The inverse of `scatter`."""
        host = [_rows(buffer) for buffer in buffers]
        values: list[Any] = [None] * count
        for device, held in reversed(list(enumerate(self.held))):
            for number, slot in zip(held, self.packing.slots[device], strict=True):
                flat = host[slot.buffer][device][slot.offset : slot.offset + slot.spec.size]
                values[number] = jnp.asarray(flat.reshape(slot.spec.shape))
        return values


def make_store(specs: Sequence[Spec], held: Sequence[Sequence[int]]) -> Store:
    """A store for variables of these shapes."""
    groups = [[specs[number] for number in numbers] for numbers in held]
    return Store(tuple(map(tuple, held)), pack(groups, range(len(held))))


def zero_filled(variables: Sequence[Any], numbers: Sequence[int], values: Sequence[Any]) -> list[Any]:
    """A value for each variable: those that are known, and zeros that nobody reads for the others."""
    known = dict(zip(numbers, values, strict=True))
    return [known[i] if i in known else jnp.zeros(v.shape, v.dtype) for i, v in enumerate(variables)]


def numbered(buffers: Sequence[Any]) -> Buffers:
    """A list of buffers by number."""
    return dict(enumerate(buffers))


def listed(buffers: Buffers) -> list[Any]:
    """All buffers as a list."""
    return [buffers[i] for i in range(len(buffers))]


def _rows(buffer: Any) -> dict[int, np.ndarray]:
    """A buffer's row for each device, read from where it is."""
    if isinstance(buffer, np.ndarray):
        return dict(enumerate(buffer))
    found: dict[int, np.ndarray] = {}
    for shard in buffer.addressable_shards:
        first = shard.index[0].start or 0
        if first not in found:
            for i, row in enumerate(np.asarray(shard.data)):
                found[first + i] = row
    return found
