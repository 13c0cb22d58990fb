"""Arguments that the layers share: those that the original refuses, and seeds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from openipu import _validate as validate

import keras
import numpy as np

Seed = int | Sequence[int] | None
"""A seed of users: a whole number, two of them, or None for another one each time."""


def refuse(layer: str, given: Mapping[str, tuple[object, object]]) -> None:
    """Raise if an argument is not what it has to be. `given` has the value and the only possible one of each."""
    for name, (value, only) in given.items():
        if value is not only and value != only:
            raise ValueError(
                f"`{name}` is {value!r}, but `{layer}` of `ipu.keras.layers` has no such option. Leave it out, or use "
                f"`keras.layers.{layer}`, which also works under a strategy."
            )


def seed_of(name: str, value: Seed) -> int | list[int] | None:
    """A seed in a form that can be saved."""
    if not isinstance(value, Sequence | np.ndarray):
        return validate.count(name, value, optional=True, least=None)
    if len(value) != 2:
        raise ValueError(f"`{name}` has {len(value)} numbers. Give two whole numbers, one, or None.")
    return [validate.count(f"{name}[{i}]", number, least=None) for i, number in enumerate(value)]


def first_seed(seed: int | list[int] | None) -> int | None:
    """What Keras' layers take as their seed."""
    number = seed[0] if isinstance(seed, list) else seed
    return None if number is None else number % 2**32


def set_state(generator: keras.random.SeedGenerator | None, seed: int | list[int] | None) -> None:
    """Start a generator at both numbers of a seed. Keras' own seeds are a single number."""
    if generator is not None and isinstance(seed, list):
        generator.state.assign([number % 2**32 for number in seed])


def no_effect(values: Mapping[str, tuple[Any, str]]) -> None:
    """Say once which arguments of the original have no effect here: those that are set, and why."""
    validate.no_effect({name: why for name, (value, why) in values.items() if value})
