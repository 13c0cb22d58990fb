"""Convolutions with small kernels at a fraction of the multiplications: Winograd's minimal filtering.

The input is cut into overlapping tiles of n x n. A linear transform of each tile and of the kernel turns the
convolution of a tile into n x n independent products. Over all tiles and channels, these are n x n matrix products.
With n = 6, a 3x3 kernel costs 36 multiplications per 4x4 outputs instead of 144, and the transformed tiles take a
quarter of the memory of patches.

The three parts of one layer share their transforms, because they are written as transposes of each other: forward and
weight gradient share the transform of the input, both gradients share that of the incoming gradient, and forward and
input gradient share that of the kernel. The compiler sees equal expressions and computes them once.

[Note: rounding of Winograd] Rounding errors grow with the tile and the number of channels. With the points 0,
+-1/sqrt 2, +-sqrt 2 and up to 64 channels, the largest error of a float32 result is 0.5e-6 to 1.6e-6 of its largest
entry, compared with 0.5e-6 for a plain sum. The usual points 0, +-1, +-2 would lead to 4e-6. The root mean square is
2.0 to 2.6 times that of XLA's own convolution. Most of it comes from the sums over channels. Adding these up in two
halves would reduce it, but takes 20 to 45 % longer. With n = 4, the error is that of a plain sum. An infinity in the
input turns its whole tile into NaN.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, reduce
from math import prod, sqrt
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from .arrays import Axes, arrange, pad, window
from .geometry import Geometry, Shape

POINTS = {4: (0.0, 1.0, -1.0), 6: (0.0, sqrt(0.5), -sqrt(0.5), sqrt(2.0), -sqrt(2.0))}

Rows = tuple[tuple[float, ...], ...]


@dataclass(frozen=True, slots=True)
class Transform:
    """The matrices for tiles of `n` inputs and kernels of `size`. A tile has `step` outputs along each axis."""

    n: int
    size: int
    gradient: Rows
    kernel: Rows
    data: Rows

    @property
    def step(self) -> int:
        """The number of outputs of a tile along one axis."""
        return self.n - self.size + 1

    def grid(self, area: Shape) -> Shape:
        """How many tiles along each axis cover an area of outputs."""
        return tuple(-(-extent // self.step) for extent in area)


@cache
def transform(n: int, size: int) -> Transform:
    """The transform, after Cook and Toom.

    Each row of `gradient` and `kernel` evaluates a polynomial at one point; the last row does so at infinity. Each row
    of `data` holds the polynomial that is zero at all other points.
    """
    points = np.asarray(POINTS[n])
    step = n - size + 1
    a, g, b = np.zeros((n, step)), np.zeros((n, size)), np.zeros((n, n))
    for j, point in enumerate(points):
        others = np.delete(points, j)
        a[j] = point ** np.arange(step)
        g[j] = point ** np.arange(size) / np.prod(point - others)
        b[j, : n - 1] = np.poly(others)[::-1]
    a[-1, -1] = g[-1, -1] = 1
    b[-1] = np.poly(points)[::-1]
    return Transform(n, size, _rows(a), _rows(g), _rows(b))


def forward(
    lhs: jax.Array, rhs: jax.Array, geo: Geometry, dtype: DTypeLike, precision: lax.PrecisionLike = None, n: int = 6
) -> jax.Array:
    """A convolution by tiles of its output."""
    t = transform(n, geo.kernel[0])
    grid = t.grid(geo.out)
    data = _data_tiles(_arranged(lhs, geo.lhs_spec, "nc", "nhwc"), geo, t, grid)
    kernel = _kernel(_arranged(rhs, geo.rhs_spec, "fc", "hwcf"), t)
    products = _products(data, kernel, (2, 1), dtype, precision)
    out = _placed(products, geo.batch, grid, _transposed(t.gradient), t)
    cut = [(0, want - have, 0) for want, have in zip(geo.out, out.shape[1:3], strict=True)]
    return _out(pad(out, 0, [(0, 0, 0), *cut, (0, 0, 0)]), "nhwf", geo)


def scatter(
    lhs: jax.Array, rhs: jax.Array, geo: Geometry, dtype: DTypeLike, precision: lax.PrecisionLike = None, n: int = 6
) -> jax.Array:
    """The same convolution by tiles of its input, each added to the outputs that it reaches. For input gradients."""
    t = transform(n, geo.kernel[0])
    grid = t.grid(geo.spatial)
    data = _gradient_tiles(_arranged(lhs, geo.lhs_spec, "nc", "nhwc"), t, grid)
    # JAX reverses the kernel for an input gradient. Reversing it back yields the forward kernel and its transform.
    kernel = _kernel(lax.rev(_arranged(rhs, geo.rhs_spec, "fc", "hwfc"), (0, 1)), t)
    products = _products(data, kernel, (2, 2), dtype, precision)
    out = _placed(products, geo.batch, grid, _transposed(t.data), t)
    lows = [low - (t.size - 1) for low, _ in geo.padding]
    cut = [(low, want - have - low, 0) for low, want, have in zip(lows, geo.out, out.shape[1:3], strict=True)]
    return _out(pad(out, 0, [(0, 0, 0), *cut, (0, 0, 0)]), "nhwf", geo)


def weights(
    lhs: jax.Array, rhs: jax.Array, geo: Geometry, dtype: DTypeLike, precision: lax.PrecisionLike = None, n: int = 6
) -> jax.Array:
    """A convolution whose output is as small as a kernel: a weight gradient, with batch and channels exchanged."""
    t = transform(n, geo.out[0])
    grid = t.grid(geo.kernel)
    data = _data_tiles(_arranged(lhs, geo.lhs_spec, "nc", "chwn"), geo, t, grid)
    gradient = _gradient_tiles(_arranged(rhs, geo.rhs_spec, "fc", "chwf"), t, grid)
    products = _products(data, gradient, (1, 1), dtype, precision)
    kernel = _both_ways(lax.reshape(products, (n, n, *products.shape[1:])), _transposed(t.kernel))
    return _out(lax.reshape(kernel, (t.size, t.size, *kernel.shape[1:])), "hwnf", geo)


def _named(spec: Shape, roles: str) -> Axes:
    return tuple(name for _, name in sorted(zip(spec, roles + "hw", strict=True)))


def _arranged(x: jax.Array, spec: Shape, roles: str, wanted: str) -> jax.Array:
    return arrange(x, _named(spec, roles), tuple(wanted))


def _out(x: jax.Array, axes: str, geo: Geometry) -> jax.Array:
    return arrange(x, tuple(axes), _named(geo.out_spec, "nf"))


def _data_tiles(x: jax.Array, geo: Geometry, t: Transform, grid: Shape) -> jax.Array:
    """Every overlapping tile of the padded input, transformed: [n * n, all tiles, channels]."""
    config = [
        (low, (count - 1) * t.step + t.n - extent - low, 0)
        for extent, count, (low, _) in zip(geo.spatial, grid, geo.padding, strict=True)
    ]
    return _by_tiles(pad(x, 0, [(0, 0, 0), *config, (0, 0, 0)]), grid, t.data, t)


def _gradient_tiles(g: jax.Array, t: Transform, grid: Shape) -> jax.Array:
    """Every tile of an incoming gradient, transformed: [n * n, all tiles, channels]."""
    config = [(0, count * t.step - extent, 0) for extent, count in zip(g.shape[1:3], grid, strict=True)]
    return _by_tiles(pad(g, 0, [(0, 0, 0), *config, (0, 0, 0)]), grid, t.gradient, t)


def _by_tiles(x: jax.Array, grid: Shape, matrix: Rows, t: Transform) -> jax.Array:
    """`matrix` applied to every tile of `x` along both axes, one axis after the other."""
    inner = range(len(matrix[0]))
    rows = _stack(_combine([window(x, [1], [i], [t.step], [grid[0]]) for i in inner], matrix), 0)
    both = _stack(_combine([window(rows, [3], [j], [t.step], [grid[1]]) for j in inner], matrix), 1)
    return lax.reshape(both, (t.n * t.n, x.shape[0] * prod(grid), x.shape[-1]))


def _kernel(w: jax.Array, t: Transform) -> jax.Array:
    """The transformed kernel: [n * n, *channels]."""
    return _both_ways(w, t.kernel)


def _both_ways(x: jax.Array, matrix: Rows) -> jax.Array:
    """`matrix` applied along the first two axes, which become one.

    Written as one product, because kernels are small. Sums of slices are as fast, but take far longer to compile, and
    two products with a transposition in between make a step of a CIFAR-10 network 15 % slower.
    """
    both = np.kron(matrix, matrix).astype(x.dtype)
    flat = lax.reshape(x, (both.shape[1], *x.shape[2:]))
    return lax.dot_general(both, flat, (((1,), (0,)), ((), ())), precision=lax.Precision.HIGHEST)


def _products(
    a: jax.Array, b: jax.Array, contracted: tuple[int, int], dtype: DTypeLike, precision: lax.PrecisionLike
) -> jax.Array:
    numbers = (((contracted[0],), (contracted[1],)), ((0,), (0,)))
    return lax.dot_general(a, b, numbers, precision=precision, preferred_element_type=dtype)


def _placed(products: jax.Array, batch: int, grid: Shape, matrix: Rows, t: Transform) -> jax.Array:
    """`matrix` applied to the products along both axes, with the tiles put in place. Overlaps are added up."""
    products = lax.reshape(products, (t.n, t.n, batch, *grid, products.shape[-1]))
    columns = _overlapped(_combine(_along(products, 1), matrix), 3, t.step)
    parts = [_overlapped(_combine(_along(column, 0), matrix), 1, t.step) for column in columns]
    return _interleave([_interleave([part[i] for part in parts], 2) for i in range(t.step)], 1)


def _overlapped(planes: list[jax.Array], axis: int, step: int) -> list[jax.Array]:
    """One plane per place in a tile. What reaches past a tile is added to the tiles after it."""
    reach = (len(planes) - 1) // step
    if not reach:
        return planes
    moved = []
    for i, plane in enumerate(planes):
        config = [(0, 0, 0)] * plane.ndim
        config[axis] = (i // step, reach - i // step, 0)
        moved.append(pad(plane, 0, config))
    return [reduce(lax.add, moved[i::step]) for i in range(step)]


def _interleave(planes: list[jax.Array], axis: int) -> jax.Array:
    """One array from planes that each hold every n-th element along an axis."""
    out = _stack(planes, axis + 1)
    return lax.reshape(out, (*out.shape[:axis], out.shape[axis] * len(planes), *out.shape[axis + 2 :]))


def _combine(terms: Sequence[jax.Array], matrix: Rows) -> list[jax.Array]:
    """The matrix times the vector of arrays. Factors of 0 and 1 cost nothing."""
    out = []
    for row in matrix:
        pairs = [(x, factor) for x, factor in zip(terms, row, strict=True) if factor]
        out.append(reduce(lax.add, [x if factor == 1 else x * np.asarray(factor, x.dtype) for x, factor in pairs]))
    return out


def _along(x: jax.Array, axis: int) -> list[jax.Array]:
    return [lax.index_in_dim(x, i, axis, keepdims=False) for i in range(x.shape[axis])]


def _stack(parts: Sequence[jax.Array], axis: int) -> jax.Array:
    return lax.concatenate([lax.expand_dims(p, [axis]) for p in parts], axis)


def _transposed(matrix: Rows) -> Rows:
    return tuple(zip(*matrix, strict=True))


def _rows(matrix: np.ndarray[Any, Any]) -> Rows:
    clean = np.where(np.abs(matrix) < 1e-12, 0, matrix)
    return tuple(tuple(float(v) for v in row) for row in clean)
