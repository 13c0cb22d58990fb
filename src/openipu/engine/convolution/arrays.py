"""Small operations on arrays with named axes: contractions and windows.

`Axes` name the axes of an array in memory order. Thanks to the names, the lowerings do not depend on layouts (channels
first or last, gradients with exchanged axes).
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import jax
from jax import lax
from jax.experimental.xla_metadata import set_xla_metadata
from jax.typing import ArrayLike, DTypeLike

Axes = tuple[str, ...]


def pad(x: jax.Array, value: ArrayLike, config: Sequence[tuple[int, int, int]]) -> jax.Array:
    """`lax.pad`, skipped if it would do nothing. Negative counts crop."""
    if not any(any(c) for c in config):
        return x
    return lax.pad(x, lax.convert_element_type(value, x.dtype), config)


def computed_once(x: jax.Array) -> jax.Array:
    """`x`, computed once before anything reads it. [Note: a wall XLA:CPU respects]

    XLA:CPU fuses the computation of `x` into its readers and repeats it for every element they read. By then,
    `lax.optimization_barrier` has been removed. A call that must not be inlined stops the fusion and costs nothing.
    """
    with set_xla_metadata(inlineable="false"):
        kept: jax.Array = _as_it_is(x)
    return kept


@jax.jit
def _as_it_is(x: jax.Array) -> jax.Array:
    return x


def window(
    x: jax.Array, axes: Sequence[int], start: Sequence[int], step: Sequence[int], count: Sequence[int]
) -> jax.Array:
    """`count[i]` elements along each `axes[i]`, from `start[i]` on, `step[i]` apart. Other axes stay whole."""
    low, high, stride = [0] * x.ndim, list(x.shape), [1] * x.ndim
    for axis, first, by, size in zip(axes, start, step, count, strict=True):
        low[axis], high[axis], stride[axis] = first, first + (size - 1) * by + 1, by
    return lax.slice(x, low, high, stride if any(s > 1 for s in stride) else None)


def arrange(x: jax.Array, axes: Axes, wanted: Axes) -> jax.Array:
    """`x` with its axes in the wanted order."""
    order = [axes.index(name) for name in wanted]
    return x if order == list(range(x.ndim)) else lax.transpose(x, order)


def merge(x: jax.Array, axes: Axes, blocks: Sequence[Axes]) -> jax.Array:
    """`x` with one axis per block of names. No data moves if the blocks already have this order in memory."""
    flat = tuple(name for block in blocks for name in block)
    x = arrange(x, axes, flat)
    sizes = dict(zip(flat, x.shape, strict=True))
    return lax.reshape(x, [prod(sizes[name] for name in block) for block in blocks])


def contract(
    a: jax.Array, a_axes: Axes, b: jax.Array, b_axes: Axes, dtype: DTypeLike, precision: lax.PrecisionLike = None
) -> tuple[jax.Array, Axes]:
    """The product of `a` and `b`, summed over every shared axis except "g", and its axes: "g", those of `a`, of `b`.

    This is one matrix product, or a batch of them over "g". Axes are merged first, so the compiler sees two plain
    matrices, transposed or not.
    """
    batch: Axes = ("g",) if "g" in a_axes and "g" in b_axes else ()
    shared = tuple(n for n in a_axes if n in b_axes and n not in batch)
    a_free = tuple(n for n in a_axes if n not in shared and n not in batch)
    b_free = tuple(n for n in b_axes if n not in shared and n not in batch)
    sizes = dict(zip(a_axes + b_axes, a.shape + b.shape, strict=True))
    a2, a_dim = _matrix(a, a_axes, batch, a_free, shared)
    b2, b_dim = _matrix(b, b_axes, batch, b_free, shared)
    groups = tuple(range(len(batch)))
    numbers = (((a_dim,), (b_dim,)), (groups, groups))
    out = lax.dot_general(a2, b2, numbers, precision=precision, preferred_element_type=dtype)
    axes = batch + a_free + b_free
    return lax.reshape(out, [sizes[n] for n in axes]), axes


def _matrix(x: jax.Array, axes: Axes, batch: Axes, free: Axes, shared: Axes) -> tuple[jax.Array, int]:
    """`x` as a matrix or a batch of them, and the number of its contracted axis. Picks the order that moves least."""
    lead = len(batch)
    if axes == batch + shared + free:
        return merge(x, axes, [*((n,) for n in batch), shared, free]), lead
    return merge(x, axes, [*((n,) for n in batch), free, shared]), lead + 1
