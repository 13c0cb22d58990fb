"""The arguments of one call of a user's program: inputs, feeds, and what is compiled into the program."""

from __future__ import annotations

import enum
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from openipu.engine.devices.replicas import Replicas
from openipu.engine.types import Array

import jax
import jax.numpy as jnp
import numpy as np

from .infeed import FeedArgument

_INPUT = object()
"""Marks the places of inputs among the static arguments."""


@dataclass(frozen=True)
class CallArguments:
    """The arguments of one call. Arrays and floats are inputs of the program, and iterators are fed to it.

    Everything else is compiled into it.
    """

    arrays: list[Array | np.ndarray]
    feeds: list[FeedArgument]
    _structure: jax.tree_util.PyTreeDef
    _static: list[object]
    key: Hashable
    """Equal for calls that one program can run."""

    @classmethod
    def of(cls, args: Sequence[object], kwargs: Mapping[str, object]) -> CallArguments:
        """Sort the arguments into inputs and static ones."""
        leaves, structure = jax.tree.flatten((tuple(args), dict(kwargs)))
        arrays: list[Array | np.ndarray] = []
        feeds: dict[int, FeedArgument] = {}
        static: list[object] = []
        for leaf in leaves:
            if isinstance(leaf, FeedArgument):
                feeds.setdefault(id(leaf), leaf)
                static.append(_Feed(list(feeds).index(id(leaf)), leaf.feed_key()))
            elif _is_array(leaf):
                static.append(_INPUT)
                arrays.append(as_input(leaf))
            else:
                static.append(leaf)
        # A Python float is an array that takes the dtype of what it is combined with.
        shapes = tuple((a.shape, np.dtype(a.dtype), getattr(a, "weak_type", False)) for a in arrays)
        key = (structure, shapes, tuple(map(_identity, static)))
        return cls(arrays, list(feeds.values()), structure, static, key)

    def with_stand_ins(self) -> CallArguments:
        """The same call with stand-ins for the feeds, to trace a program that serves others as well."""
        return replace(self, feeds=[feed.stand_in() for feed in self.feeds])

    def placed_on(self, replicas: Replicas) -> CallArguments:
        """The same call, with arrays that are on other devices sent to those of `replicas`."""
        wanted = {*replicas.devices}

        def placed(array: Array | np.ndarray) -> Array | np.ndarray:
            elsewhere = isinstance(array, jax.Array) and array.committed and array.devices() != wanted
            return replicas.send(array) if elsewhere else array

        return replace(self, arrays=[placed(array) for array in self.arrays])

    def args(self, arrays: list[Array]) -> Any:
        """(args, kwargs), with these arrays as the inputs."""
        inputs = iter(arrays)

        def filled(part: object) -> object:
            if isinstance(part, _Feed):
                return self.feeds[part.number]
            return next(inputs) if part is _INPUT else part

        return jax.tree.unflatten(self._structure, list(map(filled, self._static)))


@dataclass(frozen=True, slots=True)
class _Feed:
    """The place of a feed among the static arguments."""

    number: int
    key: Hashable


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


def as_input(leaf: object) -> Array | np.ndarray:
    """An array as an input of a program. Raises if devices would compute with other numbers."""
    if isinstance(leaf, float | complex):
        return jnp.asarray(leaf)
    array = leaf if isinstance(leaf, jax.Array) else np.asarray(leaf)
    if array.dtype == np.float64:
        raise TypeError(
            f"An argument of shape {array.shape} has dtype float64, which devices do not compute in. Give float32: "
            "`array.astype('float32')`."
        )
    if array.dtype in (np.int64, np.uint64) and array.size:
        limits = np.iinfo(np.int32 if array.dtype == np.int64 else np.uint32)
        largest = max(int(array.max()), int(array.min()), key=abs)
        if not limits.min <= largest <= limits.max:
            raise TypeError(
                f"An argument of shape {array.shape} and dtype {array.dtype} has the number {largest}, but devices "
                f"compute with whole numbers of 32 bits. Give numbers from {limits.min} to {limits.max}, or floats."
            )
    return array


def _identity(leaf: object) -> Hashable:
    """The key of a static argument: its value if it is a plain one, otherwise the object itself."""
    return (type(leaf), leaf) if isinstance(leaf, int | str | bytes | enum.Enum | _Feed) else SameObject(leaf)
