"""Random numbers."""

from __future__ import annotations

from collections.abc import Sequence

from openipu import _validate as validate
from openipu.engine.program.random_numbers import program_seeds
from openipu.engine.types import Array

import jax
import jax.numpy as jnp
import keras
from jax.typing import ArrayLike

from ._operation import array, operation

__all__ = ["dropout"]


@operation
def dropout(
    x: ArrayLike,
    rate: float = 0.5,
    noise_shape: Sequence[int] | None = None,
    seed: ArrayLike | None = None,
    name: str | None = None,  # noqa: ARG001
) -> Array:
    """Zero for a part of `x`, chosen at random; the others are scaled so that the mean stays.

    >>> kept = ipu.rand_ops.dropout(np.ones(1000), rate=0.5, seed=[1, 2])
    >>> sorted(set(kept.tolist()))
    [0.0, 2.0]

    Args:
        x: An array.
        rate: The part that becomes zero, from 0 up to but not including 1.
        noise_shape: The shape of the random decisions; values along axes of length 1 share them.
        seed: Two whole numbers. The same ones choose the same part. None: another part in each step; only in functions
            for `strategy.run`, because layers have seeds of their own.
        name: A name for the operation in profiles.
    """
    values, rate = array(x), validate.number("rate", rate, least=0.0, below=1.0)
    if not jnp.issubdtype(values.dtype, jnp.floating):
        raise ValueError(f"`x` has dtype {values.dtype}, in which the other values cannot be scaled. Give floats.")
    key = random_key("dropout", seed, "Use `ipu.keras.layers.Dropout`, or give a `seed` of two numbers.")
    # Keras' function, because it draws for the batch of all replicas.
    dropped: Array = keras.random.dropout(values, rate, noise_shape, seed=jax.random.key_data(key))
    return dropped


def random_key(what: str, seed: ArrayLike | None, remedy: str) -> Array:
    """The key of an operation that draws random numbers; without a seed, from the generator of the program."""
    if seed is not None:
        numbers = array(seed, "int32")
        if numbers.shape != (2,):
            raise ValueError(f"`seed` has the shape {numbers.shape}. Give two whole numbers.")
    else:
        seeds = program_seeds()
        if seeds is None:
            raise ValueError(
                f"`{what}` got no seed outside of a program of `strategy.run`, where its choice would be the same in "
                f"every step. {remedy}"
            )
        numbers = seeds.next()
    return jax.random.fold_in(jax.random.key(numbers[0]), numbers[1])
