"""Shapes with the methods that they have in TensorFlow, wherever a script reads or is given one.

The shapes of JAX and Keras are tuples, and so are these: they only know more. Libraries get plain tuples.
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable
from typing import Any, Final, SupportsIndex

import jax
import keras
import tensorflow as tf

from .replacements import Replacements
from .values import LIBRARIES, array_class

_LEGACY: Final = "keras.src.legacy.backend"
"""A module of Keras that takes the shapes it reads for TensorFlow's."""


class Shape(tuple[int | None, ...]):
    """A tuple of sizes; None where a size is not known."""

    __slots__ = ()

    @property
    def rank(self) -> int:
        """The number of axes."""
        return len(self)

    ndims = rank

    @property
    def dims(self) -> list[tf.compat.v1.Dimension]:
        """The sizes as TensorFlow 1 had them, with a `value`."""
        return [tf.compat.v1.Dimension(size) for size in self]

    def as_list(self) -> list[int | None]:
        """The sizes."""
        return list(self)

    def is_fully_defined(self) -> bool:
        """Whether all sizes are known."""
        return None not in self

    def is_compatible_with(self, other: Any) -> bool:
        """Whether both could be the shape of one array."""
        pairs = zip(self, other, strict=False)
        return len(self) == len(other) and all(one == two or None in (one, two) for one, two in pairs)

    def assert_is_compatible_with(self, other: Any) -> None:
        """Raise if no array can have both shapes."""
        if not self.is_compatible_with(other):
            raise ValueError(f"Shapes {tuple(self)} and {tuple(other)} are incompatible")

    def num_elements(self) -> int | None:
        """The number of elements; None if it is not known."""
        known = [size for size in self if size is not None]
        return math.prod(known) if len(known) == len(self) else None

    def __getitem__(self, key: SupportsIndex | slice) -> Any:
        return Shape(super().__getitem__(key)) if isinstance(key, slice) else super().__getitem__(key)


def as_shape(value: Any) -> Any:
    """The shapes in a tuple, list or dict of shapes, with TensorFlow's methods."""
    if isinstance(value, dict):
        return {name: as_shape(part) for name, part in value.items()}
    if isinstance(value, list | tuple) and not all(size is None or isinstance(size, int) for size in value):
        return type(value)(map(as_shape, value))
    return Shape(value) if isinstance(value, tuple) else value


def install(replacements: Replacements) -> None:
    """Let scripts see these shapes."""
    for kind in (jax.core.Tracer, array_class(), keras.KerasTensor, keras.Variable):
        owner = next(base for base in kind.__mro__ if "shape" in vars(base))
        replacements.put(owner, "shape", _by_reader(vars(owner)["shape"]))
        replacements.put(owner, "get_shape", lambda value: Shape(value.shape))


def _by_reader(original: property) -> property:
    read: Callable[[Any], tuple[int, ...]] = original.__get__

    def shape(value: object) -> tuple[int | None, ...]:
        found = read(value)
        reader = sys._getframe(1).f_globals.get("__name__", "")
        return found if reader.partition(".")[0] in LIBRARIES and reader != _LEGACY else Shape(found)

    return property(shape, original.fset)


def with_shapes(method: Callable[..., Any]) -> Callable[..., Any]:
    """A method of a script's layer that Keras calls with shapes, such as `build`."""

    @functools.wraps(method)
    def call(self: object, *args: Any, **kwargs: Any) -> Any:
        return method(self, *map(as_shape, args), **{name: as_shape(value) for name, value in kwargs.items()})

    return call
