"""A model's variables on the devices that use them: each device only holds those of its own stages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from openipu.engine.devices.transfer import read
from openipu.engine.types import Array

import jax
import jax.numpy as jnp
import numpy as np

from .packing import Buffers, Packing, Shaped, Slot, Spec, pack


@dataclass(frozen=True, slots=True)
class Store:
    """Which variables each device holds, and where they are in its buffers."""

    held: tuple[tuple[int, ...], ...]
    """For each device, numbers of variables. A variable that stages on several devices use is on all of them."""
    packing: Packing
    """One group of arrays per device."""

    def slots(self, device: int, numbers: Sequence[int] | None = None) -> list[Slot]:
        """Where a device holds these variables, or all of its own."""
        at = dict(zip(self.held[device], self.packing.slots[device], strict=True))
        return [at[number] for number in (self.held[device] if numbers is None else numbers)]

    def shared(self) -> list[int]:
        """The numbers of the variables that several devices hold."""
        numbers = [number for held in self.held for number in held]
        return sorted({number for number in numbers if numbers.count(number) > 1})

    def specs(self) -> dict[int, jax.ShapeDtypeStruct]:
        """The shape of each variable, by number."""
        found: dict[int, jax.ShapeDtypeStruct] = {}
        for held, slots in zip(self.held, self.packing.slots, strict=True):
            found |= {n: jax.ShapeDtypeStruct(s.spec.shape, s.spec.dtype) for n, s in zip(held, slots, strict=True)}
        return found

    # --- outside the program

    def scatter(self, values: Sequence[Array | np.ndarray]) -> list[np.ndarray]:
        """The buffers of all devices, filled with the variables' values: arrays of (device, element)."""
        buffers = [np.zeros((len(self.held), spec.size), spec.dtype) for spec in self.packing.buffers]
        for device, held in enumerate(self.held):
            for number, slot in zip(held, self.packing.slots[device], strict=True):
                flat = np.asarray(values[number]).reshape(-1)
                buffers[slot.buffer][device, slot.offset : slot.offset + flat.size] = flat
        return buffers

    def gather(self, buffers: Sequence[Array | np.ndarray], count: int) -> list[Array]:
        """The inverse of `scatter`, for `count` variables."""
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


def zero_filled(variables: Sequence[Shaped], numbers: Sequence[int], values: Sequence[Array]) -> list[Array]:
    """A value for each variable: those in `values`, and for all others zeros, which are never read."""
    known = dict(zip(numbers, values, strict=True))
    return [known[i] if i in known else jnp.zeros(v.shape, v.dtype) for i, v in enumerate(variables)]


def numbered(buffers: Sequence[Array]) -> Buffers:
    """A list of buffers as a dict, by number."""
    return dict(enumerate(buffers))


def listed(buffers: Buffers) -> list[Array]:
    """The inverse of `numbered`."""
    return [buffers[i] for i in range(len(buffers))]


def _rows(buffer: Array | np.ndarray) -> dict[int, np.ndarray]:
    """The row of each device, from the devices of this process if they have all of them."""
    if isinstance(buffer, np.ndarray):
        return dict(enumerate(buffer))
    found: dict[int, np.ndarray] = {}
    for shard in buffer.addressable_shards:
        first = shard.index[0].start or 0
        if first not in found:
            for i, row in enumerate(np.asarray(shard.data)):
                found[first + i] = row
    return found if len(found) == buffer.shape[0] else dict(enumerate(read(buffer)))
