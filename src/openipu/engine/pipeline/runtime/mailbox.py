"""What travels between stages: the arrays of a boundary as one vector per dtype, of the same length for all stages."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from .packing import Spec

Vectors = dict[str, Any]
"""One vector, or one stack of vectors, per dtype."""


@dataclass(frozen=True, slots=True)
class Mailbox:
    """Lengths of the vectors, long enough for every boundary."""

    lengths: tuple[tuple[str, int], ...]

    @classmethod
    def for_all(cls, boundaries: Iterable[Sequence[Spec]]) -> Mailbox:
        """Room for each of these."""
        lengths: dict[str, int] = {}
        for specs in boundaries:
            for name, size in _sizes(specs).items():
                lengths[name] = max(size, lengths.get(name, 0))
        return cls(tuple(sorted(lengths.items())))

    def empty(self, slots: int) -> Vectors:
        """A stack of vectors for each dtype."""
        return {name: jnp.zeros((slots, length), name) for name, length in self.lengths}

    def put(self, stacks: Vectors, slot: Any, arrays: Sequence[Any]) -> Vectors:
        """The stacks with the arrays at `slot`."""
        new = dict(stacks)
        for name, length in self.lengths:
            flat = [a.reshape(-1) for a in arrays if str(a.dtype) == name]
            if flat:
                vector = flat[0] if len(flat) == 1 else jnp.concatenate(flat)
                padded = jnp.pad(vector, (0, length - vector.size)) if vector.size < length else vector
                new[name] = stacks[name].at[slot].set(padded, mode="promise_in_bounds")
        return new

    def get(self, stacks: Vectors, slot: Any, specs: Sequence[Spec]) -> list[Any]:
        """The arrays at `slot`."""
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
        """Bytes of one slot."""
        return sum(length * jnp.dtype(name).itemsize for name, length in self.lengths)


def _sizes(specs: Sequence[Spec]) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for spec in specs:
        sizes[spec.dtype.name] = sizes.get(spec.dtype.name, 0) + spec.size
    return sizes
