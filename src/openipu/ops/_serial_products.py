"""Matrix products that are computed in parts, one after another."""

from __future__ import annotations

from collections.abc import Callable

from openipu.engine.types import Array

import jax.numpy as jnp
from jax import lax


def by_rows(a: Array, b: Array, parts: int) -> Array:
    """The product for a part of the rows of `a` at a time."""
    return _joined(lax.map(lambda piece: jnp.matmul(piece, b), _divided(a, a.ndim - 2, parts)), -2)


def by_sums(a: Array, b: Array, parts: int) -> Array:
    """The product as a sum: for a part of the axis that is added up at a time, in float32 or better."""
    pieces = _divided(a, a.ndim - 1, parts), _divided(b, b.ndim - 2, parts)
    dtype = jnp.result_type(a, b)
    shape = (*jnp.broadcast_shapes(a.shape[:-2], b.shape[:-2]), a.shape[-2], b.shape[-1])
    total = jnp.zeros(shape, jnp.promote_types(dtype, jnp.float32))
    total, _ = lax.scan(lambda sum_, piece: (sum_ + jnp.matmul(*piece).astype(sum_.dtype), None), total, pieces)
    return total.astype(dtype)


def by_columns(a: Array, b: Array, parts: int) -> Array:
    """The product for a part of the columns of `b` at a time."""
    return _joined(lax.map(lambda piece: jnp.matmul(a, piece), _divided(b, b.ndim - 1, parts)), -1)


PRODUCTS: tuple[Callable[[Array, Array, int], Array], ...] = (by_rows, by_sums, by_columns)
"""By what is divided: m, k or n of shapes (..., m, k) and (..., k, n)."""


def _divided(array: Array, axis: int, parts: int) -> Array:
    shape = (*array.shape[:axis], parts, array.shape[axis] // parts, *array.shape[axis + 1 :])
    return jnp.moveaxis(array.reshape(shape), axis, 0)


def _joined(pieces: Array, axis: int) -> Array:
    """Pieces of a result, stacked along a new first axis, joined along an axis of the result."""
    axis += pieces.ndim - 1
    moved = jnp.moveaxis(pieces, 0, axis)
    return moved.reshape((*moved.shape[:axis], moved.shape[axis] * moved.shape[axis + 1], *moved.shape[axis + 2 :]))
