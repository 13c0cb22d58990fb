"""Random initial values without a long wait.

On a CPU, XLA takes 0.4 to 0.8 seconds to compile the random numbers of one shape, and a model has many shapes. Such a
program runs once, so it is compiled with fewer optimizations, which takes a quarter of the time. The values stay the
same to the bit.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from .patches import RANDOM_FUNCTIONS

_DRAWN = ("normal", "truncated_normal", "uniform")
_OPTIONS = {"xla_backend_optimization_level": 1}  # at 0, values differ in the last bit


def quick_initial_values() -> contextlib.AbstractContextManager[None]:
    """Until the block ends, what Keras draws in this thread compiles quickly, unless it is part of a program.

    Does nothing if XLA_FLAGS say how much to optimize: at level 0, the values of plain Keras would be others.
    """
    if "xla_backend_optimization_level" in os.environ.get("XLA_FLAGS", ""):
        return contextlib.nullcontext()
    return RANDOM_FUNCTIONS.using(lambda function, name: _quick(function) if name in _DRAWN else function)


@functools.cache
def _quick(function: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    compiled: Callable[..., jax.Array] = jax.jit(
        function, static_argnames=("shape", "dtype"), compiler_options=_OPTIONS
    )

    def draw(key: jax.Array, *, shape: Any, **kwargs: Any) -> jax.Array:
        # While a program is traced, even a constant is a tracer.
        traced = any(isinstance(value, jax.core.Tracer) for value in (jnp.zeros(()), key, *kwargs.values()))
        if traced or {device.platform for device in key.devices()} != {"cpu"}:
            return function(key, shape=shape, **kwargs)
        return compiled(key, shape=tuple(shape), **kwargs)

    return draw
