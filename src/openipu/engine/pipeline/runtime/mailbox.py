"""Packs what travels between stages: the arrays of a boundary become one vector per dtype.

A vector has the same length for all boundaries, because all devices run the same program.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from openipu.engine.types import Array

import jax.numpy as jnp

from .packing import Spec

Vectors = dict[str, Array]
"""One stack of vectors per dtype, by the name of the dtype."""


@dataclass(frozen=True, slots=True)
class Mailbox:
    """The lengths of the vectors, enough for every boundary, and how arrays are put into them."""

    lengths: tuple[tuple[str, int], ...]

    @classmethod
    def for_all(cls, boundaries: Iterable[Sequence[Spec]]) -> Mailbox:
        """A mailbox with room for any of these boundaries."""
        lengths: dict[str, int] = {}
        for specs in boundaries:
            for name, size in _sizes(specs).items():
                lengths[name] = max(size, lengths.get(name, 0))
        return cls(tuple(sorted(lengths.items())))

    def empty(self, slots: int) -> Vectors:
        """Stacks of `slots` vectors, filled with zeros."""
        return {name: jnp.zeros((slots, length), name) for name, length in self.lengths}

    def put(self, stacks: Vectors, slot: Array, arrays: Sequence[Array]) -> Vectors:
        """The stacks with these arrays at `slot`."""
        new = dict(stacks)
        for name, length in self.lengths:
            flat = [a.reshape(-1) for a in arrays if str(a.dtype) == name]
            if flat:
                vector = flat[0] if len(flat) == 1 else jnp.concatenate(flat)
                padded = jnp.pad(vector, (0, length - vector.size)) if vector.size < length else vector
                new[name] = stacks[name].at[slot].set(padded, mode="promise_in_bounds")
        return new

    def get(self, stacks: Vectors, slot: Array, specs: Sequence[Spec]) -> list[Array]:
        """The arrays at `slot`, which have these shapes."""
        taken = dict.fromkeys(stacks, 0)
        arrays = []
        for spec in specs:
            name, first = spec.dtype.name, taken[spec.dtype.name]
            vector = stacks[name].at[slot].get(mode="promise_in_bounds")
            arrays.append(vector[first : first + spec.size].reshape(spec.shape))
            taken[name] = first + spec.size
        return arrays

    @property
    def bytes(self) -> int:
        """The bytes of one slot."""
        return sum(length * jnp.dtype(name).itemsize for name, length in self.lengths)


def _sizes(specs: Sequence[Spec]) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for spec in specs:
        sizes[spec.dtype.name] = sizes.get(spec.dtype.name, 0) + spec.size
    return sizes
