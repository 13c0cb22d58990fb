"""The arguments of one call of a user's program: what is an input of the program, and what is compiled into it."""

from __future__ import annotations

import enum
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from openipu.engine.types import Array

import jax
import jax.numpy as jnp
import numpy as np

_INPUT = object()
"""Marks the places of inputs among the static arguments."""


@dataclass(frozen=True)
class CallArguments:
    """The arguments of one call. Arrays and floats are inputs of the program; everything else is compiled into it."""

    arrays: list[Array | np.ndarray]
    _structure: jax.tree_util.PyTreeDef
    _static: list[object]
    key: Hashable
    """Equal for calls that one program can run."""

    @classmethod
    def of(cls, args: Sequence[object], kwargs: Mapping[str, object]) -> CallArguments:
        """Sort the arguments into inputs and static ones."""
        leaves, structure = jax.tree.flatten((tuple(args), dict(kwargs)))
        arrays, static = [], []
        for leaf in leaves:
            dynamic = _is_array(leaf)
            static.append(_INPUT if dynamic else leaf)
            if dynamic:
                arrays.append(_array(leaf))
        shapes = tuple((a.shape, np.dtype(a.dtype)) for a in arrays)
        return cls(arrays, structure, static, (structure, shapes, tuple(map(_identity, static))))

    def args(self, arrays: list[Array]) -> Any:
        """(args, kwargs), with these arrays as the inputs."""
        inputs = iter(arrays)
        return jax.tree.unflatten(self._structure, [next(inputs) if s is _INPUT else s for s in self._static])


@dataclass(frozen=True, eq=False)
class SameObject:
    """A key that is equal to another if both hold the very same object. It keeps the object alive."""

    value: object

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SameObject) and other.value is self.value

    def __hash__(self) -> int:
        return id(self.value)


def _is_array(leaf: object) -> bool:
    return isinstance(leaf, np.ndarray | np.generic | jax.Array | float | complex) or (
        hasattr(leaf, "__array__") and hasattr(leaf, "dtype") and not hasattr(leaf, "assign")
    )


def _array(leaf: object) -> Array | np.ndarray:
    if isinstance(leaf, float | complex):
        return jnp.asarray(leaf)
    array = leaf if isinstance(leaf, jax.Array) else np.asarray(leaf)
    if array.dtype == np.float64:
        raise TypeError(
            f"An argument of shape {array.shape} has dtype float64, which devices do not compute in. Give float32: "
            "`array.astype('float32')`."
        )
    return array


def _identity(leaf: object) -> Hashable:
    """The key of a static argument: its value if it is a plain one, otherwise the object itself."""
    return (type(leaf), leaf) if isinstance(leaf, int | str | bytes | enum.Enum) else SameObject(leaf)
