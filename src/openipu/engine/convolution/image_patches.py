"""The same convolution without a convolution: slices, matrix products and sums.

Each lowering takes both operands and the `Geometry` and returns what `lax.conv_general_dilated` returns, to float
tolerance. They differ in what they lay out in memory in between; `rule.py` picks the cheapest.

- `gather`: patches of the left operand, then one matrix product. For forward convolutions and weight gradients.
- `gather_narrow`: the same for the weight gradient of a layer with few input channels.
- `scatter`: the matrix product, then its columns shifted and added. For input gradients and transposed convolutions.
- `gather_right`: patches of the right operand. For weight gradients of transposed convolutions.
- `by_group`: one of these for each group.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial, reduce

import jax
from jax import lax
from jax.typing import DTypeLike

from .arrays import Axes, arrange, contract, merge, pad, window
from .geometry import Geometry
from .roles import finish, lhs_axes, padded, positions, rhs_axes, shifted, spatial_axes, split, times

Contraction = Callable[..., tuple[jax.Array, Axes]]


def gather(
    lhs: jax.Array, rhs: jax.Array, geo: Geometry, dtype: DTypeLike, precision: lax.PrecisionLike = None, chunk: int = 0
) -> jax.Array:
    """Patches of the left operand times the right operand.

    Patches are cut along the kernel positions or the output positions, whichever are fewer. Either way they are the
    same slices in the same order, so a forward convolution and its weight gradient share one array of patches (the
    compiler merges equal expressions). `chunk` is the number of positions laid out at once, 0 for all.
    """
    x, x_axes = split(padded(lhs, geo), lhs_axes(geo), geo.group_axis, geo.groups)
    w, w_axes = split(rhs, rhs_axes(geo), "f", geo.groups)
    by = _by_tap if len(positions(geo.kernel)) <= len(positions(geo.out)) else _by_output
    out, axes = by(x, x_axes, w, w_axes, geo, partial(contract, dtype=dtype, precision=precision), chunk)
    return finish(out, axes, geo)


def _by_tap(
    x: jax.Array, x_axes: Axes, w: jax.Array, w_axes: Axes, geo: Geometry, times_: Contraction, chunk: int
) -> tuple[jax.Array, Axes]:
    """Patches with a run of channels for every tap, times the kernel as a matrix. Products of chunks are added up."""
    spatial = spatial_axes(geo)
    taps = positions(geo.kernel)
    blocks = [(n,) for n in ("g",) if n in w_axes] + [(*spatial, "c"), ("f",)]
    w, w_axes = merge(w, w_axes, blocks), tuple(block[-1] for block in blocks)
    places = [x_axes.index(s) for s in spatial]
    parts = []
    axes: Axes = ()
    for first, last in _runs(len(taps), chunk):
        patches = [window(x, places, times(k, geo.rhs_dilation), geo.strides, geo.out) for k in taps[first:last]]
        rows = lax.slice_in_dim(w, first * geo.features_in, last * geo.features_in, axis=w_axes.index("c"))
        part, axes = times_(_cat(patches, x_axes.index("c")), x_axes, rows, w_axes)
        parts.append(part)
    return reduce(lax.add, parts), axes


def _by_output(
    x: jax.Array, x_axes: Axes, w: jax.Array, w_axes: Axes, geo: Geometry, times_: Contraction, chunk: int
) -> tuple[jax.Array, Axes]:
    """Patches with a run of the batch for every output position. Each chunk yields other outputs."""
    spots = positions(geo.out)
    places = [x_axes.index(s) for s in spatial_axes(geo)]
    parts = []
    axes: Axes = ()
    for first, last in _runs(len(spots), chunk):
        patches = [window(x, places, times(o, geo.strides), geo.rhs_dilation, geo.kernel) for o in spots[first:last]]
        part, axes = times_(_cat(patches, x_axes.index("n")), x_axes, w, w_axes)
        parts.append(part)
    return _unfold(_cat(parts, axes.index("n")), axes, "n", geo)


def gather_narrow(
    lhs: jax.Array,
    rhs: jax.Array,
    geo: Geometry,
    dtype: DTypeLike,
    precision: lax.PrecisionLike = None,
    chunk: int = 0,  # noqa: ARG001 - few channels never need chunks
) -> jax.Array:
    """`gather` for the weight gradient of a layer with few input channels. Shifts whole images instead of gathering."""
    spatial = spatial_axes(geo)
    x = arrange(padded(lhs, geo), lhs_axes(geo), ("n", "c", *spatial))
    for axis in reversed(range(len(spatial))):
        place = x.ndim - len(spatial) + axis
        steps = [(i * geo.strides[axis], geo.rhs_dilation[axis], geo.kernel[axis]) for i in range(geo.out[axis])]
        x = _cat([lax.expand_dims(window(x, [place], [a], [b], [c]), [0]) for a, b, c in steps], 0)
    names = (*(f"o{i}" for i in range(len(spatial))), "n", "c", *spatial)
    out, axes = contract(x, names, rhs, rhs_axes(geo), dtype, precision)
    return finish(out, tuple("s" + n[1:] if n[0] == "o" else n for n in axes), geo)


def scatter(
    lhs: jax.Array, rhs: jax.Array, geo: Geometry, dtype: DTypeLike, precision: lax.PrecisionLike = None, chunk: int = 0
) -> jax.Array:
    """The product of every input place with every tap, then each tap's share added to the outputs it belongs to."""
    spatial = spatial_axes(geo)
    x, x_axes = split(lhs, lhs_axes(geo), geo.group_axis, geo.groups)
    w, w_axes = split(rhs, rhs_axes(geo), "f", geo.groups)
    # The contracted features stay on their side, so the kernel of an input gradient needs no transposition.
    matrix: list[Axes] = [(*spatial, "f"), ("c",)] if w_axes[-1] == "c" else [("c",), (*spatial, "f")]
    blocks: list[Axes] = [(n,) for n in ("g",) if n in w_axes] + matrix
    w, w_axes = merge(w, w_axes, blocks), tuple(block[-1] for block in blocks)
    taps = positions(geo.kernel)
    each = geo.features_out
    shares: list[jax.Array] = []
    axes: Axes = ()
    for first, last in _runs(len(taps), chunk):
        rows = lax.slice_in_dim(w, first * each, last * each, axis=w_axes.index("f"))
        table, axes = contract(x, x_axes, rows, w_axes, dtype, precision)
        places = [axes.index(s) for s in spatial]
        for i, tap in enumerate(taps[first:last]):
            share = lax.slice_in_dim(table, i * each, (i + 1) * each, axis=axes.index("f"))
            shares.append(shifted(share, places, tap, geo))
    return finish(reduce(lax.add, shares), axes, geo)


def gather_right(
    lhs: jax.Array, rhs: jax.Array, geo: Geometry, dtype: DTypeLike, precision: lax.PrecisionLike = None, chunk: int = 0
) -> jax.Array:
    """The left operand times patches of the right one, one per output position. The right one must not be dilated."""
    spatial = spatial_axes(geo)
    x, x_axes = split(lhs, lhs_axes(geo), geo.group_axis, geo.groups)
    w, w_axes = split(rhs, rhs_axes(geo), "f", geo.groups)
    places = [w_axes.index(s) for s in spatial]
    config = [(0, 0, 0)] * w.ndim
    lows = []
    for axis, size, count, kernel, stride, (low, _), dilation in zip(
        places, geo.spatial, geo.out, geo.kernel, geo.strides, geo.padding, geo.lhs_dilation, strict=True
    ):
        before = max((count - 1) * stride - low, 0)
        config[axis] = (before, max(low + (size - 1) * dilation - (kernel - 1), 0), 0)
        lows.append(low + before)
    w = pad(w, 0, config)
    spots = positions(geo.out)
    blocks = []
    for first, last in _runs(len(spots), chunk):
        starts = [[a - b for a, b in zip(lows, times(o, geo.strides), strict=True)] for o in spots[first:last]]
        patches = [window(w, places, start, geo.lhs_dilation, geo.spatial) for start in starts]
        blocks.append(contract(x, x_axes, _cat(patches, w_axes.index("f")), w_axes, dtype, precision))
    axes = blocks[0][1]
    out, axes = _unfold(_cat([b for b, _ in blocks], axes.index("f")), axes, "f", geo)
    return finish(out, axes, geo)


def by_group(lhs: jax.Array, rhs: jax.Array, geo: Geometry, one: Callable[..., jax.Array]) -> jax.Array:
    """A grouped convolution as one plain convolution, `one(lhs, rhs, geometry)`, for each group."""
    single = replace(geo, groups=1, group_axis="c")
    axis, count = (geo.lhs_spec[0], geo.batch) if geo.group_axis == "n" else (geo.lhs_spec[1], geo.features_in)
    parts = []
    for i in range(geo.groups):
        a = lax.slice_in_dim(lhs, i * count, (i + 1) * count, axis=axis)
        b = lax.slice_in_dim(rhs, i * geo.features_out, (i + 1) * geo.features_out, axis=geo.rhs_spec[0])
        parts.append(one(a, b, single))
    return _cat(parts, geo.out_spec[1])


def _runs(count: int, chunk: int) -> Iterator[tuple[int, int]]:
    chunk = chunk or count
    return ((first, min(first + chunk, count)) for first in range(0, count, chunk))


def _cat(parts: Sequence[jax.Array], axis: int) -> jax.Array:
    return parts[0] if len(parts) == 1 else lax.concatenate(parts, axis)


def _unfold(out: jax.Array, axes: Axes, name: str, geo: Geometry) -> tuple[jax.Array, Axes]:
    """`out` with the named axis, which holds output positions and then its own index, split into separate axes."""
    at = axes.index(name)
    own = out.shape[at] // len(positions(geo.out))
    out = lax.reshape(out, (*out.shape[:at], *geo.out, own, *out.shape[at + 1 :]))
    return out, (*axes[:at], *spatial_axes(geo), *axes[at:])
