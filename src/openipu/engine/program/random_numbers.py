"""Random numbers that users' programs draw."""

from __future__ import annotations

import keras

from .program_trace import current

_seeds: list[keras.random.SeedGenerator] = []


def program_seeds() -> keras.random.SeedGenerator | None:
    """The generator of users' programs; None outside of a program, and in a part of one.

    It is a variable, so every launch goes on where the last one stopped.
    """
    trace = current()
    if trace is None or not trace.whole:
        return None
    if not _seeds:
        _seeds.append(keras.random.SeedGenerator())
    return _seeds[0]
