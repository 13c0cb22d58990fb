"""Random numbers that users' programs draw."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator

import keras

from .program_trace import current

_seeds: list[keras.random.SeedGenerator] = []
_of_step: contextvars.ContextVar[keras.random.SeedGenerator | None] = contextvars.ContextVar("seeds", default=None)


@contextlib.contextmanager
def drawing_from(seeds: keras.random.SeedGenerator | None) -> Iterator[None]:
    """Until the block ends, programs and parts of them draw from this generator. None changes nothing."""
    token = _of_step.set(seeds or _of_step.get())
    try:
        yield
    finally:
        _of_step.reset(token)


def program_seeds() -> keras.random.SeedGenerator | None:
    """The generator of users' programs; None outside of a program, and in a part of one that has no own generator.

    It is a variable, so every launch goes on where the last one stopped.
    """
    if (own := _of_step.get()) is not None:
        return own
    trace = current()
    if trace is None or not trace.whole:
        return None
    if not _seeds:
        _seeds.append(keras.random.SeedGenerator())
    return _seeds[0]
