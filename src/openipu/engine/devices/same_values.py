"""Values that are the same in all processes of a group.

Every process has its own Keras variables. Before they go to the devices, those that are not known to be equal become
those of instance 0. So initial values, and whatever a callback changes in one process only, cannot drift apart.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Sequence

from openipu.engine.types import Array

import jax.numpy as jnp
import numpy as np

from . import group
from .transfer import of_first_process

_known: dict[int, weakref.ref[Array]] = {}


def same(values: Sequence[Array]) -> list[Array]:
    """The values, with instance 0's in place of those that are not known to be the same everywhere."""
    changed = [i for i, value in enumerate(values) if not _is_known(value)]
    needed = sorted({i for found in group.exchange("the values of variables", changed) for i in found})
    found = list(values)
    if needed:
        shapes = {f"Variable {i}": f"{value.dtype.name}{list(value.shape)}" for i, value in enumerate(values)}
        group.agree("the shapes of variables", shapes, "Build the same model in all instances.")
        first = of_first_process([np.asarray(values[i]) for i in needed])
        for i, value in zip(needed, first, strict=True):
            found[i] = jnp.asarray(value, values[i].dtype)
    return found


def mark(values: Sequence[Array]) -> None:
    """Note that these arrays are the same in all processes."""
    for value in values:
        _known[id(value)] = weakref.ref(value, functools.partial(_forget, id(value)))


def _forget(key: int, _: weakref.ref[Array]) -> None:
    _known.pop(key, None)


def _is_known(value: Array) -> bool:
    known = _known.get(id(value))
    return known is not None and known() is value
