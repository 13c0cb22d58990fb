"""Pooling and its gradients without windowed primitives: slices, maxima and sums.

The windows of a pooling are read as one strided slice per window position. The gradient of max pooling finds the first
maximum in each window, with the same comparison as XLA's select-and-scatter, so ties (and NaN) go to the same element.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import reduce
from itertools import product
from math import prod
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.typing import ArrayLike, DTypeLike

from .arrays import computed_once, pad, window
from .geometry import Shape, dilated, output_size

Binary = Callable[[jax.Array, jax.Array], jax.Array]


@dataclass(frozen=True, slots=True)
class Windows:
    """Where the windows of one pooling lie; one number per axis of the operand."""

    shape: Shape
    size: Shape
    strides: Shape
    padding: tuple[tuple[int, int], ...]
    base_dilation: Shape
    dilation: Shape

    @classmethod
    def of(cls, params: Mapping[str, Any], shape: Shape) -> Windows:
        """The windows of one reduce-window or select-and-scatter equation."""
        ones = (1,) * len(shape)
        return cls(
            shape=tuple(shape),
            size=tuple(params["window_dimensions"]),
            strides=tuple(params["window_strides"]),
            padding=tuple((int(low), int(high)) for low, high in params["padding"]),
            base_dilation=tuple(params.get("base_dilation") or ones),
            dilation=tuple(params.get("window_dilation") or ones),
        )

    @property
    def out(self) -> Shape:
        """How many windows there are along each axis."""
        steps = zip(self.shape, self.size, self.strides, self.padding, self.base_dilation, self.dilation, strict=True)
        return tuple(output_size(*step) for step in steps)

    @property
    def plain(self) -> bool:
        """Whether the windows lie side by side: no overlap, no gap, no padding, no dilation."""
        flat = not any(map(any, self.padding)) and max(self.base_dilation + self.dilation) == 1
        return flat and self.size == self.strides

    @property
    def positions(self) -> int:
        """The number of elements in a window."""
        return prod(self.size)

    @property
    def empty(self) -> bool:
        """Whether there is nothing to pool."""
        return not prod(self.shape + self.size + self.out)

    def padded(self, x: jax.Array, value: ArrayLike) -> jax.Array:
        """`x` with padding and base dilation written out."""
        return pad(x, value, [(*p, d - 1) for p, d in zip(self.padding, self.base_dilation, strict=True)])

    def slices(self, x: jax.Array) -> Iterator[jax.Array]:
        """For each position in a window, row by row, the element there in every window of the padded `x`."""
        axes = range(x.ndim)
        for position in product(*map(range, self.size)):
            start = [p * d for p, d in zip(position, self.dilation, strict=True)]
            yield window(x, axes, start, self.strides, self.out)


def reduce_windows(x: jax.Array, windows: Windows, combine: Binary, init: ArrayLike) -> jax.Array:
    """What `lax.reduce_window` returns for max, min or add with its neutral `init`."""
    if windows.plain:
        return _reduce_blocks(x, windows, combine)
    x = windows.padded(x, init)
    for axis, one in enumerate(_separated(windows, x.shape)):
        if windows.size[axis] > 1 or windows.strides[axis] > 1:
            x = reduce(combine, one.slices(x))
    return x


def scatter_windows(
    source: jax.Array, operand: jax.Array, windows: Windows, prefer: Binary, wall: bool = False
) -> jax.Array:
    """The gradient of max pooling: the `source` of each window goes to the first element that `prefer` keeps."""
    chosen = _choose(operand, windows, prefer)
    if wall:  # both are read once per window position [Note: a wall XLA:CPU respects]
        source, chosen = computed_once(source), computed_once(chosen)
    if windows.plain:
        return _spread_blocks(source, chosen, windows)
    zero = lax.full_like(source, 0)
    total = [
        _placed(lax.select(lax.eq(chosen, lax.full_like(chosen, i)), source, zero), windows, position)
        for i, position in enumerate(product(*map(range, windows.size)))
    ]
    return reduce(lax.add, total)


def gather_windows(tangents: jax.Array, operand: jax.Array, windows: Windows, prefer: Binary) -> jax.Array:
    """The forward derivative of max pooling: from each window, the tangent of the element that `prefer` keeps."""
    best: jax.Array | None = None
    kept: jax.Array | None = None
    pairs = zip(
        windows.slices(windows.padded(operand, worst(operand.dtype, prefer))),
        windows.slices(windows.padded(tangents, 0)),
        strict=True,
    )
    for value, tangent in pairs:
        if best is None or kept is None:
            best, kept = value, tangent
        else:
            keep = prefer(best, value)
            best, kept = lax.select(keep, best, value), lax.select(keep, kept, tangent)
    assert kept is not None
    return kept


def worst(dtype: DTypeLike, prefer: Binary) -> float:
    """The value that is never preferred. Padding is filled with it."""
    low = prefer is lax.ge or prefer is lax.max
    if np.issubdtype(dtype, np.integer):
        info = np.iinfo(dtype)
        return info.min if low else info.max
    return -np.inf if low else np.inf


def _separated(windows: Windows, padded: Shape) -> Iterator[Windows]:
    """The same windows, one axis at a time: max and sum over a box can be taken axis by axis."""
    ones, none = (1,) * len(padded), ((0, 0),) * len(padded)
    shape = list(padded)
    for axis in range(len(shape)):
        size, strides, dilation = list(ones), list(ones), list(ones)
        size[axis], strides[axis], dilation[axis] = windows.size[axis], windows.strides[axis], windows.dilation[axis]
        one = Windows(tuple(shape), tuple(size), tuple(strides), none, ones, tuple(dilation))
        shape = list(one.out)
        yield one


def _blocked(windows: Windows) -> tuple[list[int], list[int]]:
    """The shape with every pooled axis split into two, (windows, size), and the numbers of the size axes."""
    shape: list[int] = []
    inner = []
    for count, size in zip(windows.out, windows.size, strict=True):
        shape.append(count)
        if size > 1:
            inner.append(len(shape))
            shape.append(size)
    return shape, inner


def _reduce_blocks(x: jax.Array, windows: Windows, combine: Binary) -> jax.Array:
    shape, inner = _blocked(windows)
    x = window(x, range(x.ndim), [0] * x.ndim, [1] * x.ndim, dilated_counts(windows))
    x = lax.reshape(x, shape)
    return _REDUCE[combine](x, inner)


def dilated_counts(windows: Windows) -> list[int]:
    """How many elements along each axis lie in some window, for windows side by side."""
    return [count * size for count, size in zip(windows.out, windows.size, strict=True)]


def _choose(operand: jax.Array, windows: Windows, prefer: Binary) -> jax.Array:
    """For every window, the number of the position that `prefer` keeps."""
    slices = windows.slices(windows.padded(operand, worst(operand.dtype, prefer)))
    best = next(slices)
    chosen = lax.full(best.shape, 0, np.int32)
    for i, value in enumerate(slices, 1):
        keep = prefer(best, value)
        best, chosen = lax.select(keep, best, value), lax.select(keep, chosen, lax.full_like(chosen, i))
    return chosen


def _spread_blocks(source: jax.Array, chosen: jax.Array, windows: Windows) -> jax.Array:
    """`source` at the chosen place of each block, zero elsewhere: one pass over the result."""
    shape, inner = _blocked(windows)
    outer = [i for i in range(len(shape)) if i not in inner]
    wide = lax.broadcast_in_dim(source, shape, outer)
    place = lax.broadcast_in_dim(chosen, shape, outer)
    here = lax.full(shape, 0, np.int32)
    sizes = [shape[axis] for axis in inner]
    for i, axis in enumerate(inner):
        here = here + lax.broadcasted_iota(np.int32, shape, axis) * prod(sizes[i + 1 :])
    out = lax.select(lax.eq(place, here), wide, lax.full_like(wide, 0))
    out = lax.reshape(out, dilated_counts(windows))
    return pad(out, 0, [(0, full - used, 0) for full, used in zip(windows.shape, out.shape, strict=True)])


def _placed(share: jax.Array, windows: Windows, position: Shape) -> jax.Array:
    """The share of one window position, moved to its places in the operand. What falls on padding is cut off."""
    config = []
    for p, size, stride, (low, _), count in zip(
        position, windows.shape, windows.strides, windows.padding, windows.out, strict=True
    ):
        before = p - low
        config.append((before, size - before - dilated(count, stride), stride - 1))
    return pad(share, 0, config)


def _max(x: jax.Array, axes: list[int]) -> jax.Array:
    return x.max(axes)


def _min(x: jax.Array, axes: list[int]) -> jax.Array:
    return x.min(axes)


def _sum(x: jax.Array, axes: list[int]) -> jax.Array:
    return x.sum(axes, dtype=x.dtype)


_REDUCE: dict[Binary, Callable[[jax.Array, list[int]], jax.Array]] = {lax.max: _max, lax.min: _min, lax.add: _sum}
