"""Convolutions with small kernels at a fraction of the multiplications: Winograd's minimal filtering.

The input is cut into overlapping tiles of n x n. A linear transform of each tile and of the kernel turns the
convolution of a tile into n x n independent products. Over all tiles and channels, these are n x n matrix products.
With n = 6, a 3x3 kernel costs 36 multiplications per 4x4 outputs instead of 144, and the transformed tiles take a
quarter of the memory of patches.

The parts of one layer share their transforms: forward and weight gradient that of the input, forward and input gradient
that of the kernel. The compiler sees equal expressions and computes them once.

[Note: rounding of Winograd] Rounding errors grow with the tile and the number of channels. With the points 0,
+-1/sqrt 2, +-sqrt 2 and up to 64 channels, the largest error of a float32 result is 0.5e-6 to 1.6e-6 of its largest
entry, compared with 0.5e-6 for a plain sum. The usual points 0, +-1, +-2 would lead to 4e-6. The root mean square is
2.0 to 2.6 times that of XLA's own convolution. Most of it comes from the sums over channels. Adding these up in two
halves would reduce it, but takes 20 to 45 % longer. With n = 4, the error is that of a plain sum. An infinity in the
input turns its whole tile into NaN.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, reduce
from math import inf, isclose, prod, sqrt
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from .arrays import Axes, arrange, computed_once, pad, window
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


@cache
def mirrored(n: int, size: int) -> Transform:
    """The transform for a kernel back to front, given the transform of the kernel as it is.

    Back to front, a polynomial has the value at a point that it had at the point's inverse, times a factor. Our points
    are each other's inverses, so this only changes the order of the rows and their scale.
    """
    t = transform(n, size)
    points = [*POINTS[n], inf]
    order = [_which(points, _inverse(point)) for point in points]
    kernel, gradient, data = np.asarray(t.kernel), np.asarray(t.gradient), np.asarray(t.data)
    scale = (kernel[order, ::-1] * kernel).sum(1, keepdims=True) / (kernel**2).sum(1, keepdims=True)
    return Transform(n, size, _rows(gradient[order] * scale), t.kernel, _rows(data[order]))


def _inverse(point: float) -> float:
    return 1 / point if point else inf


def _which(points: Sequence[float], wanted: float) -> int:
    return next(i for i, point in enumerate(points) if isclose(point, wanted))


def forward(
    lhs: jax.Array, rhs: jax.Array, geo: Geometry, dtype: DTypeLike, precision: lax.PrecisionLike = None, n: int = 6
) -> jax.Array:
    """A convolution by tiles of its output."""
    t = transform(n, geo.kernel[0])
    kernel = _both_ways(_arranged(rhs, geo.rhs_spec, "fc", "hwcf"), t.kernel)
    return _convolved(lhs, lambda data: _products(data, kernel, (2, 1), dtype, precision), geo, t)


def backward(
    lhs: jax.Array, rhs: jax.Array, geo: Geometry, dtype: DTypeLike, precision: lax.PrecisionLike = None, n: int = 6
) -> jax.Array:
    """The same for an input gradient, for which JAX turns the kernel back to front and exchanges its features."""
    t = mirrored(n, geo.kernel[0])
    kernel = _both_ways(lax.rev(_arranged(rhs, geo.rhs_spec, "fc", "hwfc"), (0, 1)), t.kernel)
    return _convolved(lhs, lambda data: _products(data, kernel, (2, 2), dtype, precision), geo, t)


def scatter(
    lhs: jax.Array, rhs: jax.Array, geo: Geometry, dtype: DTypeLike, precision: lax.PrecisionLike = None, n: int = 6
) -> jax.Array:
    """An input gradient by tiles of its input, each added to the outputs that it reaches. May need fewer tiles."""
    t = transform(n, geo.kernel[0])
    grid = t.grid(geo.spatial)
    data = _gradient_tiles(_arranged(lhs, geo.lhs_spec, "nc", "nhwc"), t, grid)
    kernel = _both_ways(lax.rev(_arranged(rhs, geo.rhs_spec, "fc", "hwfc"), (0, 1)), t.kernel)
    products = _products(data, kernel, (2, 2), dtype, precision)
    out = _overlapping(lax.reshape(products, (n, n, geo.batch, *grid, products.shape[-1])), t)
    lows = [low - (t.size - 1) for low, _ in geo.padding]
    cut = [(low, want - have - low, 0) for low, want, have in zip(lows, geo.out, out.shape[1:3], strict=True)]
    return _out(pad(out, 0, [(0, 0, 0), *cut, (0, 0, 0)]), "nhwf", geo)


def _convolved(lhs: jax.Array, products: Callable[[jax.Array], jax.Array], geo: Geometry, t: Transform) -> jax.Array:
    grid = t.grid(geo.out)
    data = _data_tiles(_arranged(lhs, geo.lhs_spec, "nc", "nhwc"), geo, t, grid)
    out = _placed(products(data), geo.batch, grid, _transposed(t.gradient), t)
    return _out(lax.slice(out, (0, 0, 0, 0), (geo.batch, *geo.out, out.shape[-1])), "nhwf", geo)


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
    counts = [
        (low, (count - 1) * t.step + t.n - extent - low)
        for extent, count, (low, _) in zip(geo.spatial, grid, geo.padding, strict=True)
    ]
    return _by_tiles(_padded(x, counts), grid, t.data, t)


def _gradient_tiles(g: jax.Array, t: Transform, grid: Shape) -> jax.Array:
    """Every tile of an incoming gradient, transformed: [n * n, all tiles, channels]."""
    counts = [(0, count * t.step - extent) for extent, count in zip(g.shape[1:3], grid, strict=True)]
    return _by_tiles(_padded(g, counts), grid, t.gradient, t)


def _padded(x: jax.Array, counts: Sequence[tuple[int, int]]) -> jax.Array:
    """Images with zeros around them. Columns and channels are padded as one axis, which compiles in half the time."""
    batch, height, width, channels = x.shape
    rows, (low, high) = counts[0], counts[1]
    flat = lax.reshape(x, (batch, height, width * channels))
    flat = pad(flat, 0, [(0, 0, 0), (*rows, 0), (low * channels, high * channels, 0)])
    return lax.reshape(flat, (batch, height + sum(rows), width + low + high, channels))


def _by_tiles(x: jax.Array, grid: Shape, matrix: Rows, t: Transform) -> jax.Array:
    """`matrix` applied to every tile of `x` along both axes, one axis after the other.

    The first result is kept [Note: a wall XLA:CPU respects]. Computed again for each reader, it takes 3 times as long.
    """
    inner = range(len(matrix[0]))
    rows = computed_once(_combine([window(x, [1], [i], [t.step], [grid[0]]) for i in inner], matrix, 0))
    both = _combine([window(rows, [3], [j], [t.step], [grid[1]]) for j in inner], matrix, 1)
    return lax.reshape(both, (t.n * t.n, x.shape[0] * prod(grid), x.shape[-1]))


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
    """`matrix` applied to the products along both axes, and the tiles put next to each other."""
    channels = products.shape[-1]
    products = lax.reshape(products, (t.n, t.n, batch, *grid, channels))
    rows = computed_once(_combine(_along(products, 1), matrix, 4))
    rows = lax.reshape(rows, (t.n, batch, grid[0], grid[1] * t.step, channels))
    both = _combine(_along(rows, 0), matrix, 2)
    return lax.reshape(both, (batch, grid[0] * t.step, grid[1] * t.step, channels))


def _overlapping(products: jax.Array, t: Transform) -> jax.Array:
    """The transposed transform of input tiles along both axes. Tiles overlap, and are added up where they do."""
    matrix = _transposed(t.data)
    columns = computed_once(_spread(_along(products, 1), matrix, 3, t.step))
    return _spread(_along(columns, 0), matrix, 1, t.step)


def _spread(terms: Sequence[jax.Array], matrix: Rows, axis: int, step: int) -> jax.Array:
    """The matrix times the vector of arrays. Its rows follow each other along `axis`; the tiles there are `step` apart.

    What reaches past a tile is added to those after it.
    """
    reach = (len(matrix) - 1) // step

    def placed(past: int) -> jax.Array:
        rows = matrix[past * step : (past + 1) * step]
        tiles = _combine(terms, rows, axis + 1)
        around = [(0, 0, 0)] * tiles.ndim
        around[axis], around[axis + 1] = (past, reach - past, 0), (0, step - len(rows), 0)
        tiles = pad(tiles, 0, around)
        return lax.reshape(tiles, (*tiles.shape[:axis], tiles.shape[axis] * step, *tiles.shape[axis + 2 :]))

    return reduce(lax.add, map(placed, range(reach + 1)))


def _combine(terms: Sequence[jax.Array], matrix: Rows, axis: int) -> jax.Array:
    """The matrix times the vector of arrays, with the results along a new axis.

    This is one sum for all rows, in which factors of 0 are multiplied, too. A sum for each row would multiply less, but
    a single convolution is slower that way, and the compiler takes almost three times as long.
    """
    shape = (*terms[0].shape[:axis], len(matrix), *terms[0].shape[axis:])
    others = [i for i in range(len(shape)) if i != axis]

    def product(x: jax.Array, factors: tuple[float, ...]) -> jax.Array:
        row = lax.broadcast_in_dim(np.asarray(factors, x.dtype), shape, (axis,))
        return lax.mul(lax.broadcast_in_dim(x, shape, others), row)

    return reduce(lax.add, map(product, terms, _transposed(matrix)))


def _along(x: jax.Array, axis: int) -> list[jax.Array]:
    return [lax.index_in_dim(x, i, axis, keepdims=False) for i in range(x.shape[axis])]


def _transposed(matrix: Rows) -> Rows:
    return tuple(zip(*matrix, strict=True))


def _rows(matrix: np.ndarray[Any, Any]) -> Rows:
    clean = np.where(np.abs(matrix) < 1e-12, 0, matrix)
    return tuple(tuple(float(v) for v in row) for row in clean)
