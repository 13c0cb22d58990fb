"""What a step enqueues into outfeeds, on its way out of the functions that JAX transforms.

A layer enqueues in the middle of a function that is differentiated, recomputed or rewritten. A value leaves such a
function only as one of its results. So these functions collect what is enqueued in them and return it:

    with collected() as enqueued:
        loss = ...
    return loss, enqueued()         # outside: enqueue_again(...)

The loop (loop/execution.py) and the ticks of a pipeline hand the elements over to the host.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import wraps
from typing import Any, ParamSpec, Protocol, TypeVar

from openipu.engine.shapes import specs_of
from openipu.engine.types import Tree

import jax
from jax.extend.core import get_opaque_trace_state

P = ParamSpec("P")
R = TypeVar("R")

TWICE = (
    "A program enqueues into the same outfeed queue twice. Enqueue all values at once, as a tuple or dict, or use two "
    "queues."
)
IN_STAGES = (
    "A gradient function enqueues into an outfeed queue, but the model is pipelined: each device has only the "
    "gradients of its own stages. Enqueue in the `call` of a layer or in the optimizer, or train without stages."
)
IN_SHARES = (
    "An optimizer enqueues into an outfeed queue, but its state is divided over replicas: each has only its share of "
    "the gradients. Enqueue in the `call` of a layer, or use `replicated_optimizer_state_sharding=False`."
)


class OutfeedError(RuntimeError):
    """Something enqueues where that is not possible."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class Enqueued:
    """Elements, or their shapes, and the outfeeds that they go to. An outfeed is there at most once."""

    elements: tuple[Tree, ...] = ()
    outfeeds: tuple[Any, ...] = field(default=(), metadata={"static": True})

    @classmethod
    def of(cls, pairs: Mapping[Any, Tree]) -> Enqueued:
        """These elements, by outfeed."""
        return cls(tuple(pairs.values()), tuple(pairs))

    @classmethod
    def joined(cls, parts: Iterable[Enqueued]) -> Enqueued:
        """What several functions enqueue. Raise if two of them use the same outfeed."""
        found: dict[Any, Tree] = {}
        for part in parts:
            for outfeed, element in part.items():
                if outfeed in found:
                    raise ValueError(TWICE)
                found[outfeed] = element
        return cls.of(found)

    def items(self) -> Iterator[tuple[Any, Tree]]:
        """Pairs of an outfeed and its element."""
        return zip(self.outfeeds, self.elements, strict=True)

    def specs(self) -> dict[Any, Tree]:
        """The shapes of the elements, by outfeed."""
        return {outfeed: specs_of(element) for outfeed, element in self.items()}


class _Place(Protocol):
    """Where elements go that are enqueued now."""

    def add(self, outfeed: Any, element: Tree) -> None:
        """Take an element."""


class _Collected:
    """Keeps elements for the function that is being traced."""

    def __init__(self) -> None:
        self._where, self.found = traced_program(), dict[Any, Tree]()

    def add(self, outfeed: Any, element: Tree) -> None:
        if self._where != traced_program():
            raise OutfeedError(
                "An outfeed is used inside one of JAX's own loops, conditionals or gradients, or in a layer that is "
                "recomputed, where the element would be lost. Return the value from there, and enqueue it outside."
            )
        if outfeed in self.found:
            raise ValueError(TWICE)
        self.found[outfeed] = element


class _Ignored:
    """Drops elements."""

    def add(self, outfeed: Any, element: Tree) -> None:
        pass


@dataclass(frozen=True, slots=True)
class _Refused:
    """Takes no elements."""

    message: str

    def add(self, outfeed: Any, element: Tree) -> None:
        del outfeed, element
        raise OutfeedError(self.message)


_place: contextvars.ContextVar[_Place | None] = contextvars.ContextVar("elements_go_to", default=None)


def enqueue(outfeed: Any, element: Tree) -> bool:
    """Enqueue in the step that is being traced. Returns False if there is none."""
    place = _place.get()
    if place is not None:
        place.add(outfeed, element)
    return place is not None


def enqueue_again(enqueued: Enqueued) -> None:
    """Enqueue what a function has returned that collected it."""
    for outfeed, element in enqueued.items():
        assert enqueue(outfeed, element), "every step collects what it enqueues"


@contextlib.contextmanager
def collected() -> Iterator[Callable[[], Enqueued]]:
    """Until the block ends, collect what is enqueued. Yields a function that returns it."""
    collecting = _Collected()
    with _going_to(collecting):
        yield lambda: Enqueued.of(collecting.found)


def collecting(function: Callable[P, R]) -> Callable[P, tuple[R, Enqueued]]:
    """The function, which now also returns what it enqueues."""

    @wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> tuple[R, Enqueued]:
        with collected() as enqueued:
            result = function(*args, **kwargs)
        return result, enqueued()

    return run


def carried(transform: Callable[[Callable[P, Any]], Callable[P, Any]], function: Callable[P, R]) -> Callable[P, R]:
    """`transform(function)`, which is one of JAX's. What the function enqueues is enqueued outside."""
    transformed = transform(collecting(function))

    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        result, enqueued = transformed(*args, **kwargs)
        enqueue_again(enqueued)
        found: R = result
        return found

    return run


def ignored() -> contextlib.AbstractContextManager[None]:
    """Until the block ends, enqueuing has no effect: something is traced only to look at it."""
    return _going_to(_Ignored())


def refused(message: str) -> contextlib.AbstractContextManager[None]:
    """Until the block ends, enqueuing raises an error with this message."""
    return _going_to(_Refused(message))


@contextlib.contextmanager
def _going_to(place: _Place) -> Iterator[None]:
    token = _place.set(place)
    try:
        yield
    finally:
        _place.reset(token)


def traced_program() -> object:
    """Identifies the program that JAX is tracing now."""
    return get_opaque_trace_state(convention="flax")
