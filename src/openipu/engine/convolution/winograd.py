"""Convolutions with small kernels at a fraction of the multiplications: Winograd's minimal filtering, F(4x4, 3x3).

The input is cut into tiles of n x n (n = 6) that overlap by two; a linear transform of each tile and of the kernel turns the convolution of a
tile into n x n independent products, which over all tiles and channels are n x n matrix products. A 3x3 kernel then costs 36 multiplications per 4x4
outputs instead of 144, and the transformed tiles take a quarter of the memory of patches.

The three parts of one layer share their transforms, because they are written as the transposes of each other: forward and weight gradient transform
the input alike, weight gradient and input gradient transform the incoming gradient alike, forward and input gradient transform the kernel alike. The
compiler sees equal expressions and computes them once.

Rounding grows with the tile. With the points 0, +-1/sqrt 2, +-sqrt 2 the largest error of a float32 result is about 1e-6 of its largest entry, against 5e-7 of a
plain sum; the usual points 0, +-1, +-2 would give 4e-6.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, reduce
from math import prod, sqrt
from typing import Any

import jax
import numpy as np
from jax import lax

from .arrays import Axes, arrange, pad, window
from .geometry import Geometry, Shape

TILE = 4
_POINTS = {4: (0.0, 1.0, -1.0), 6: (0.0, sqrt(0.5), -sqrt(0.5), sqrt(2.0), -sqrt(2.0))}

Rows = tuple[tuple[float, ...], ...]


def forward(lhs: jax.Array, rhs: jax.Array, geo: Geometry, dtype: Any, precision: Any = None) -> jax.Array:
    """A convolution, by tiles of its output."""
    axes = _axes(geo)
    tiles = _tiles(geo.out)
    x = arrange(lhs, axes.lhs, ("n", *axes.spatial, "c"))
    data = _input_tiles(x, geo, tiles)
    kernel = _kernel(arrange(rhs, axes.rhs, (*axes.spatial, "c", "f")), geo.kernel[0])
    products = _products(data, kernel, (2, 1), dtype, precision)
    out = _planes(products, geo.batch, tiles, _transposed(_matrices(geo.kernel[0])[0]))
    out = pad(out, 0, [(0, 0, 0), *((0, o - size, 0) for o, size in zip(geo.out, out.shape[1:-1], strict=True)), (0, 0, 0)])
    return arrange(out, ("n", *axes.spatial, "f"), axes.out)


def scatter(lhs: jax.Array, rhs: jax.Array, geo: Geometry, dtype: Any, precision: Any = None) -> jax.Array:
    """The same convolution by tiles of its input, each adding to the outputs it reaches: for input gradients."""
    axes = _axes(geo)
    size = geo.kernel[0]
    tiles = _tiles(geo.spatial)
    g = arrange(lhs, axes.lhs, ("n", *axes.spatial, "c"))
    data = _gradient_tiles(g, tiles, size)
    # JAX reverses the kernel for an input gradient; reversed once more it is the forward kernel, and so is its transform.
    flipped = lax.rev(arrange(rhs, axes.rhs, (*axes.spatial, "f", "c")), (0, 1))
    products = _products(data, _kernel(flipped, size), (2, 2), dtype, precision)
    out = _planes(products, geo.batch, tiles, _transposed(_matrices(size)[2]))
    cut = [(low - (size - 1), o - full - low + size - 1, 0) for o, full, (low, _) in zip(geo.out, out.shape[1:-1], geo.padding, strict=True)]
    return arrange(pad(out, 0, [(0, 0, 0), *cut, (0, 0, 0)]), ("n", *axes.spatial, "f"), axes.out)


def weights(lhs: jax.Array, rhs: jax.Array, geo: Geometry, dtype: Any, precision: Any = None) -> jax.Array:
    """A convolution whose output is as small as a kernel: a weight gradient. Batch and channels have exchanged roles in it."""
    axes = _axes(geo)
    size = geo.out[0]
    tiles = _tiles(geo.kernel)
    x = arrange(lhs, axes.lhs, ("c", *axes.spatial, "n"))
    g = arrange(rhs, axes.rhs, ("c", *axes.spatial, "f"))
    products = _products(_input_tiles(x, geo, tiles, size), _gradient_tiles(g, tiles, size), (1, 1), dtype, precision)
    n = TILE + size - 1
    grid = lax.reshape(products, (n, n, *products.shape[1:]))
    back = _transposed(_matrices(size)[1])
    rows = _combine([lax.index_in_dim(grid, i, 0, keepdims=False) for i in range(n)], back)
    columns = [_combine([lax.index_in_dim(row, j, 0, keepdims=False) for j in range(n)], back) for row in rows]
    out = _stack([_stack(c, 0) for c in columns], 0)
    return arrange(out, (*axes.spatial, "n", "f"), axes.out)


def tiles_needed(sizes: Shape) -> int:
    """Tiles that cover an area."""
    return prod(_tiles(sizes))


def _tiles(sizes: Shape) -> Shape:
    return tuple(-(-size // TILE) for size in sizes)


class _axes:
    """The names of the axes of one convolution, in their order in memory."""

    def __init__(self, geo: Geometry) -> None:
        self.spatial = tuple(f"s{i}" for i in range(len(geo.spatial)))
        self.lhs = self._named(geo.lhs_spec, "n", "c")
        self.rhs = self._named(geo.rhs_spec, "f", "c")
        self.out = self._named(geo.out_spec, "n", "f")

    def _named(self, spec: Shape, first: str, second: str) -> Axes:
        return tuple(name for _, name in sorted(zip(spec, (first, second, *self.spatial), strict=True)))


def _input_tiles(x: jax.Array, geo: Geometry, tiles: Shape, size: int = 0) -> jax.Array:
    """Every overlapping tile of the padded input, transformed: [n * n, all tiles, channels]."""
    size = size or geo.kernel[0]
    n = TILE + size - 1
    config = [
        (low, (t - 1) * TILE + n - extent - low, 0) for extent, t, (low, _) in zip(geo.spatial, tiles, geo.padding, strict=True)
    ]
    x = pad(x, 0, [(0, 0, 0), *config, (0, 0, 0)])
    return _by_tiles(x, tiles, _matrices(size)[2])


def _gradient_tiles(g: jax.Array, tiles: Shape, size: int) -> jax.Array:
    """Every tile of an incoming gradient, transformed: [n * n, all tiles, channels]."""
    config = [(0, t * TILE - extent, 0) for extent, t in zip(g.shape[1:-1], tiles, strict=True)]
    return _by_tiles(pad(g, 0, [(0, 0, 0), *config, (0, 0, 0)]), tiles, _matrices(size)[0])


def _by_tiles(x: jax.Array, tiles: Shape, matrix: Rows) -> jax.Array:
    """`matrix` applied to every tile of `x` along both axes, one axis after the other."""
    inner = len(matrix[0])
    rows = _stack(_combine([window(x, [1], [i], [TILE], [tiles[0]]) for i in range(inner)], matrix), 0)
    both = _stack(_combine([window(rows, [3], [j], [TILE], [tiles[1]]) for j in range(inner)], matrix), 1)
    n = len(matrix)
    return lax.reshape(both, (n * n, x.shape[0] * prod(tiles), x.shape[-1]))


def _planes(products: jax.Array, batch: int, tiles: Shape, matrix: Rows) -> jax.Array:
    """`matrix` applied to the products along both axes, and the tiles that come out put in place; where they overlap they add up."""
    n = len(matrix[0])
    grid = lax.reshape(products, (n, n, batch, *tiles, products.shape[-1]))
    columns = _combine([lax.index_in_dim(grid, j, 1, keepdims=False) for j in range(n)], matrix)
    columns = [lax.optimization_barrier(c) for c in _overlapped(columns, 3)]
    parts = [_overlapped(_combine([lax.index_in_dim(c, i, 0, keepdims=False) for i in range(n)], matrix), 1) for c in columns]
    rows = [_interleave([part[i] for part in parts], 2) for i in range(TILE)]
    return _interleave(rows, 1)


def _overlapped(planes: list[jax.Array], axis: int) -> list[jax.Array]:
    """One plane for each place in a tile; what reaches past a tile is added to the tiles after it."""
    reach = (len(planes) - 1) // TILE
    if not reach:
        return planes
    moved = []
    for i, plane in enumerate(planes):
        config = [(0, 0, 0)] * plane.ndim
        config[axis] = (i // TILE, reach - i // TILE, 0)
        moved.append(pad(plane, 0, config))
    return [reduce(lax.add, moved[i::TILE]) for i in range(TILE)]


def _interleave(planes: list[jax.Array], axis: int) -> jax.Array:
    """Planes of every fourth element as one array."""
    out = _stack(planes, axis + 1)
    return lax.reshape(out, (*out.shape[:axis], out.shape[axis] * TILE, *out.shape[axis + 2 :]))


def _kernel(w: jax.Array, size: int) -> jax.Array:
    """The transformed kernel: [n * n, *channels]."""
    matrix = _matrices(size)[1]
    rows = _combine([lax.index_in_dim(w, i, 0, keepdims=False) for i in range(size)], matrix)
    both = [_combine([lax.index_in_dim(row, j, 0, keepdims=False) for j in range(size)], matrix) for row in rows]
    return _stack([e for row in both for e in row], 0)


def _products(a: jax.Array, b: jax.Array, contracted: tuple[int, int], dtype: Any, precision: Any) -> jax.Array:
    numbers = (((contracted[0],), (contracted[1],)), ((0,), (0,)))
    return lax.dot_general(a, b, numbers, precision=precision, preferred_element_type=dtype)


def _combine(terms: Sequence[jax.Array], matrix: Rows) -> list[jax.Array]:
    """The matrix times the vector of arrays; factors 0 and 1 cost nothing."""
    out = []
    for row in matrix:
        scaled = [term if factor == 1 else term * np.asarray(factor, term.dtype) for term, factor in zip(terms, row, strict=True) if factor]
        out.append(reduce(lax.add, scaled))
    return out


def _stack(parts: Sequence[jax.Array], axis: int) -> jax.Array:
    return lax.concatenate([lax.expand_dims(p, [axis]) for p in parts], axis)


def _transposed(matrix: Rows) -> Rows:
    return tuple(zip(*matrix, strict=True))


@cache
def _matrices(size: int) -> tuple[Rows, Rows, Rows]:
    """The transforms of gradient, kernel and input tiles (A, G, B transposed) for a kernel of `size`, after Cook and Toom.

    Column j of A and row j of G evaluate a polynomial at point j, the last at infinity; row j of B is the polynomial that is zero at all other points.
    """
    n = TILE + size - 1
    points = np.asarray(_POINTS[n])
    a, g, b = np.zeros((n, TILE)), np.zeros((n, size)), np.zeros((n, n))
    for j, point in enumerate(points):
        others = np.delete(points, j)
        a[j] = point ** np.arange(TILE)
        g[j] = point ** np.arange(size) / np.prod(point - others)
        b[j, : n - 1] = np.poly(others)[::-1]
    a[-1, -1] = g[-1, -1] = 1
    b[-1] = np.poly(points)[::-1]
    return _rows(a), _rows(g), _rows(b)


def _rows(matrix: np.ndarray[Any, Any]) -> Rows:
    clean = np.where(np.abs(matrix) < 1e-12, 0, matrix)
    return tuple(tuple(float(v) for v in row) for row in clean)
