"""What loops and conditionals of a program work with: ranges, the variables that they carry, and branches."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from openipu.engine.program.gradient_marks import resolved
from openipu.engine.program.program_trace import ProgramTrace, current
from openipu.engine.types import Array, Tree

import jax
import jax.numpy as jnp
import numpy as np
import tensorflow as tf
from jax.typing import ArrayLike

from .values import Lazy, native, where

State = tuple[Any, ...]

_local = threading.local()


@dataclass(frozen=True, slots=True)
class Range(Lazy):
    """`tf.range` in a program: a loop runs over it without having its values."""

    start: Any
    limit: Any
    delta: Any
    dtype: Any

    @property
    def count(self) -> Any:
        """How many values it has; a number if that is known while tracing."""
        parts = (self.start, self.limit, self.delta)
        if not any(isinstance(part, jax.core.Tracer) for part in parts):
            return max(0, int(np.ceil((np.asarray(self.limit) - np.asarray(self.start)) / np.asarray(self.delta))))
        return jnp.maximum(0, jnp.ceil((self.limit - self.start) / self.delta)).astype(jnp.int32)

    def at(self, index: ArrayLike) -> Array:
        """The value at an index."""
        return jnp.asarray(self.start + index * self.delta).astype(self.dtype)

    def __jax_array__(self) -> Array:
        return jnp.arange(self.start, self.limit, self.delta, self.dtype)

    def __iter__(self) -> Iterator[Array]:
        return map(self.at, map(jnp.int32, range(self.count)))


def is_traced(value: object) -> bool:
    """Whether a value is known only when the program runs."""
    return isinstance(value, jax.core.Tracer)


def the_trace() -> ProgramTrace:
    """The trace of the program, or of the part of one, that is being traced."""
    trace = current()
    assert trace is not None
    return trace


class Lost(Lazy):
    """What is left in a list of a value that a loop or a branch has put there, when the loop or branch has ended."""

    def _refuse(self, *_: object) -> NoReturn:
        raise RuntimeError(
            f"A value that a loop or a branch of the program has put into a list is used outside of it ({where()}). A "
            "program does not carry lists that grow. Keep the value in a variable that has a value before the loop, "
            "for example in an array of zeros to which the loop adds its rows."
        )

    __add__ = __radd__ = __mul__ = __rmul__ = __sub__ = __rsub__ = __truediv__ = __rtruediv__ = __getitem__ = _refuse
    __jax_array__ = __array__ = __float__ = __len__ = __iter__ = __getattr__ = _refuse


def note_added(function: Any, args: Sequence[Any]) -> None:
    """Call when code that is traced calls a function: it may put values into a list."""
    owner, levels = getattr(function, "__self__", None), _levels()
    if type(owner) is not list or not levels:
        return
    kind = function.__name__
    added = args[-1:] if kind in ("append", "insert") else args[0] if kind == "extend" else ()
    if isinstance(added, list | tuple):
        levels[-1].extend((owner, value) for value in added if any(map(is_traced, jax.tree.leaves(value))))


def _levels() -> list[list[tuple[list[Any], Any]]]:
    found: list[list[tuple[list[Any], Any]]] = _local.__dict__.setdefault("levels", [])
    return found


@contextlib.contextmanager
def inside() -> Iterator[None]:
    """Until the block ends, the body of a loop or a branch is traced. What it has put into lists is lost then."""
    levels = _levels()
    levels.append([])
    try:
        yield
    finally:
        for changed, added in levels.pop():
            changed[:] = [Lost() if value is added else value for value in changed]


class Carried:
    """The variables of a function that a loop carries. Others have to stay what they are."""

    def __init__(self, get: Callable[[], State], put: Callable[[State], None], names: Sequence[str]) -> None:
        self._get, self._put, self._names = get, put, names
        self._first = get()
        self._places = [i for i, value in enumerate(self._first) if is_carried(value)]
        self.values = [as_arrays(self._first[i]) for i in self._places]

    def put(self, values: Sequence[Any]) -> None:
        """Set the variables, the others to what they were before the loop."""
        state = list(self._first)
        for place, value in zip(self._places, values, strict=True):
            state[place] = value
        self._put(tuple(state))

    def get(self) -> list[Any]:
        """The variables after the body."""
        state = self._get()
        for place, value in enumerate(state):
            before = self._first[place]
            if place not in self._places and value is not before and not is_undefined(before):
                raise TypeError(
                    f"A loop changes `{self._names[place]}` from {before!r} to {value!r} ({where()}). A program "
                    "carries only numbers, arrays, and lists and dicts of them through a loop. Start with one."
                )
        pairs = ((self._names[p], old, state[p]) for p, old in zip(self._places, self.values, strict=True))
        return [like(name, old, new) for name, old, new in pairs]


def is_number(value: object) -> bool:
    """Whether a value is a number or an array."""
    return isinstance(value, bool | int | float | np.generic | np.ndarray | jax.Array | tf.Tensor)


def is_carried(value: Tree) -> bool:
    """Whether a value is one that a program can compute: a number, an array, or a list, tuple or dict of them."""
    leaves = jax.tree.leaves(value)
    return bool(leaves) and all(map(is_number, leaves))


def is_undefined(value: object) -> bool:
    """Whether a variable has no value yet."""
    return type(value).__name__ in ("Undefined", "UndefinedReturnValue")


def as_array(value: Any) -> Array:
    """A number or tensor as an array of the program."""
    array = jnp.asarray(native(value))
    return jax.lax.convert_element_type(array, array.dtype)


def as_arrays(value: Tree) -> Tree:
    """Numbers and tensors in lists, tuples and dicts, as arrays of the program."""
    return jax.tree.map(as_array, value)


def like(name: str, old: Tree, new: Tree) -> Tree:
    """A new value of a variable that a loop carries, as arrays like the old ones."""
    structure: Hashable = jax.tree.structure(old)
    if not is_carried(new) or jax.tree.structure(new) != structure:
        raise TypeError(
            f"A loop sets `{name}` to {new!r}, but it began as {old!r} ({where()}). Give it a value of the same kind."
        )
    return jax.tree.map(functools.partial(_like, name), old, new)


def _like(name: str, old: Array, new: ArrayLike) -> Array:
    array = jnp.asarray(native(new))
    if array.shape != old.shape or (array.dtype != old.dtype and not getattr(array, "weak_type", False)):
        raise TypeError(
            f"A loop changes `{name}` from {old.dtype}{list(old.shape)} to {array.dtype}{list(array.shape)} "
            f"({where()}). Start with a value of the same shape and dtype (0.0, not 0)."
        )
    return jax.lax.convert_element_type(array, old.dtype)


def choose(trace: ProgramTrace, condition: Array, branches: Sequence[Callable[[], list[Any]]]) -> list[Any]:
    """The values of the branch that is taken."""
    if condition.shape:
        raise TypeError(f"The condition of an `if` has shape {condition.shape} ({where()}). Give one boolean.")

    def branch(function: Callable[[], list[Any]]) -> Callable[[list[Any]], list[Any]]:
        def run(_: list[Any]) -> list[Any]:
            with inside():
                return list(resolved(function))

        return run

    demanded = dict(trace.demands)
    chosen = trace.cond(condition.astype(bool), (branch(branches[0]), branch(branches[1])), [])
    if trace.demands != demanded:
        raise ValueError(
            f"A branch of an `if` takes an element from an iterator ({where()}). Take it before the `if`, because "
            "every iteration of a loop takes the same number of elements."
        )
    return chosen
