"""Convolutions with so few products per output that they are added one by one, without a matrix product.

These are layers with one to three input channels, depthwise convolutions, and their gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce

import jax
from jax import lax
from jax.typing import DTypeLike

from .arrays import Axes, pad, window
from .geometry import Geometry
from .roles import drop, finish, lhs_axes, padding, positions, rhs_axes, shifted, spatial_axes, split, spread, times


def elementwise(lhs: jax.Array, rhs: jax.Array, geo: Geometry, dtype: DTypeLike) -> jax.Array:
    """A convolution by products and sums, tap by tap. With few input channels a matrix product would mostly copy."""
    spatial = spatial_axes(geo)
    w, w_axes = split(rhs.astype(dtype), rhs_axes(geo), "f", geo.groups)
    x, x_axes = split(lhs.astype(dtype), lhs_axes(geo), geo.group_axis, geo.groups)
    if geo.group_axis == "n":
        return _elementwise_by_output(x, x_axes, w, w_axes, geo)
    if geo.features_out == 1:
        w, w_axes = drop(w, w_axes, "f")
    names = tuple("f" if n == "c" else n for n in x_axes if n != "c" or geo.features_out > 1)
    undilated = max(geo.lhs_dilation) == 1
    if undilated:
        x = pad(x, 0, padding(geo, [x_axes.index(s) for s in spatial], x.ndim))
    shares = []
    for *tap, c in positions((*geo.kernel, geo.features_in)):
        weight = _take(w, w_axes, ("c", *spatial), (c, *tap), names)
        if undilated:
            places = [x_axes.index(s) for s in spatial]
            piece = window(x, places, times(tap, geo.rhs_dilation), geo.strides, geo.out)
            shares.append(_take(piece, x_axes, ("c",), (c,), names) * weight)
        else:
            share = _take(x, x_axes, ("c",), (c,), names) * weight
            shares.append(shifted(share, [names.index(s) for s in spatial], tap, geo))
    return finish(reduce(lax.add, shares), names, geo)


def _take(x: jax.Array, axes: Axes, taken: Axes, at: Sequence[int], names: Axes) -> jax.Array:
    """`x` at one index along each axis in `taken`, with its other axes in the order of `names`."""
    ones = [1] * len(taken)
    x = window(x, [axes.index(n) for n in taken], at, ones, ones)
    for name in taken:
        x, axes = drop(x, axes, name)
    return spread(x, axes, names)


def _elementwise_by_output(x: jax.Array, x_axes: Axes, w: jax.Array, w_axes: Axes, geo: Geometry) -> jax.Array:
    """The weight gradient of a depthwise convolution: per tap and channel, one sum over the batch and all places."""
    spatial = spatial_axes(geo)
    x, x_axes = drop(x, x_axes, "n")
    names = (*x_axes, "f") if geo.features_out > 1 else x_axes
    if geo.features_out == 1:
        w, w_axes = drop(w, w_axes, "f")
    x = pad(x, 0, padding(geo, [x_axes.index(s) for s in spatial], x.ndim))
    places = [x_axes.index(s) for s in spatial]
    w = spread(w, w_axes, names)
    rows = []
    for spot in positions(geo.out):
        piece = window(x, places, times(spot, geo.strides), geo.rhs_dilation, geo.kernel)
        rows.append(_blocks_added(spread(piece, x_axes, names), w, names.index("c")))
    kept = tuple(n for n in names if n not in ("c", *spatial))
    out = lax.concatenate([lax.expand_dims(r, [0]) for r in rows], 0)
    out = out.sum([1 + names.index(n) for n in ("c", *spatial)])
    return finish(lax.reshape(out, (*geo.out, *out.shape[1:])), (*spatial, *kept), geo)


def _blocks_added(a: jax.Array, b: jax.Array, axis: int, most: int = 4) -> jax.Array:
    """Products of `a` and `b`, with up to `most` blocks along an axis added: XLA:CPU fuses this, not an outer sum."""
    blocks = max(n for n in range(1, most + 1) if a.shape[axis] % n == 0)
    size = a.shape[axis] // blocks
    runs = [(i * size, (i + 1) * size) for i in range(blocks)]
    pairs = [[lax.slice_in_dim(x, *run, axis=axis) for x in (a, b)] for run in runs]
    return reduce(lax.add, [x * y for x, y in pairs])
