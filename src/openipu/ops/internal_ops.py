"""Operations for finding errors, and for the layout of values on an IPU."""

from __future__ import annotations

import sys
from typing import Any

from openipu._unavailable import unavailable
from openipu.engine.types import Array

import jax
import numpy as np
from jax.typing import ArrayLike

from ._operation import array, operation

__all__ = ["print_tensor", "remap", "remap_deduce"]


def __getattr__(name: str) -> Any:
    return unavailable("internal_ops", name)


@operation
def print_tensor(input: ArrayLike, name: str = "") -> Array:
    """The array itself, which is printed to stderr each time the program computes it.

    >>> value = ipu.internal_ops.print_tensor(np.array([3.0, 4.0]), "value")  # stderr gets: value: [3. 4.]

    Args:
        input: An array.
        name: What is printed in front of it.
    """

    def show(value: np.ndarray[Any, Any]) -> None:
        print(f"{name}: {value}" if name else value, file=sys.stderr)  # noqa: T201 - this is what it is for

    values = array(input)
    jax.debug.callback(show, values)
    return values


@operation
def remap(x: ArrayLike, name: str | None = None) -> Array:  # noqa: ARG001
    """The array itself. XLA decides how it lies in memory.

    >>> print(ipu.internal_ops.remap([1.0, 2.0]))
    [1. 2.]
    """
    return array(x)


@operation
def remap_deduce(x: ArrayLike, name: str | None = None) -> Array:  # noqa: ARG001
    """The array itself. XLA decides how it lies in memory.

    >>> print(ipu.internal_ops.remap_deduce([1.0, 2.0]))
    [1. 2.]
    """
    return array(x)
