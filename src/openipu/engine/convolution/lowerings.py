"""The same convolution without a convolution: slices, matrix products and sums.

Each lowering takes both operands and the `Geometry` and gives what `lax.conv_general_dilated` gives, to float
tolerance. They differ in what they lay out in memory between; `rule.py` picks the cheapest.

- `gather`: patches of the left operand, then one matrix product. Forward convolutions and weight gradients.
- `gather_narrow`: the same for the weight gradient of a layer with few input channels.
- `scatter`: the matrix product first, then its columns shifted and added. Input gradients and transposed convolutions.
- `gather_right`: patches of the right operand. Weight gradients of transposed convolutions.
- `elementwise`: products and sums tap by tap. Depthwise convolutions and their gradients.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import reduce
from itertools import product
from typing import Any

import jax
from jax import lax

from .arrays import Axes, arrange, contract, merge, pad, window
from .geometry import Geometry, Shape, dilated

Position = tuple[int, ...]


def gather(
    lhs: jax.Array, rhs: jax.Array, geo: Geometry, dtype: Any, precision: Any = None, chunk: int = 0
) -> jax.Array:
    """Patches of the left operand times the right operand.

    Patches are cut along the fewer of kernel positions and output positions. Either way they are the same slices in the
    same order, so that a forward convolution and its weight gradient build one patches array between them (the compiler
    merges equal expressions). `chunk` is the number of positions laid out at once, 0 for all.
    """
    x, x_axes = _split(padded(lhs, geo), _lhs_axes(geo), geo.group_axis, geo.groups)
    w, w_axes = _split(rhs, _rhs_axes(geo), "f", geo.groups)
    spatial = _spatial(geo)
    places = [x_axes.index(s) for s in spatial]
    if _fewer_taps(geo):
        parts = []
        taps = positions(geo.kernel)
        w = arrange(w, w_axes, _rest(w_axes, ("g", *spatial, "c")))
        w_axes = _rest(w_axes, ("g", *spatial, "c"))
        order = tuple(n for n in w_axes if n not in spatial)
        w = lax.reshape(w, _merged_shape(w, w_axes, spatial, geo))
        for first, last in _runs(len(taps), chunk):
            patches = [window(x, places, _times(k, geo.rhs_dilation), geo.strides, geo.out) for k in taps[first:last]]
            block = _cat(patches, x_axes.index("c"))
            c = order.index("c")
            rows = lax.slice_in_dim(w, first * geo.features_in, last * geo.features_in, axis=c)
            parts.append(contract(block, x_axes, rows, order, dtype, precision))
        out, axes = reduce(lax.add, [p for p, _ in parts]), parts[0][1]
    else:
        spots = positions(geo.out)
        blocks = []
        for first, last in _runs(len(spots), chunk):
            patches = [
                window(x, places, _times(o, geo.strides), geo.rhs_dilation, geo.kernel) for o in spots[first:last]
            ]
            blocks.append(contract(_cat(patches, x_axes.index("n")), x_axes, w, w_axes, dtype, precision))
        axes = blocks[0][1]
        out = _cat([b for b, _ in blocks], axes.index("n"))
        out, axes = _unfold(out, axes, "n", geo)
    return _finish(out, axes, geo)


def gather_narrow(
    lhs: jax.Array,
    rhs: jax.Array,
    geo: Geometry,
    dtype: Any,
    precision: Any = None,
    chunk: int = 0,  # noqa: ARG001 - few channels never need to be divided
) -> jax.Array:
    """`gather` for the weight gradient of a layer with few input channels: shifts whole images, gathers no numbers."""
    spatial = _spatial(geo)
    x = arrange(padded(lhs, geo), _lhs_axes(geo), ("n", "c", *spatial))
    for axis in reversed(range(len(spatial))):
        place = x.ndim - len(spatial) + axis
        steps = [(i * geo.strides[axis], geo.rhs_dilation[axis], geo.kernel[axis]) for i in range(geo.out[axis])]
        x = _cat([lax.expand_dims(window(x, [place], [a], [b], [c]), [0]) for a, b, c in steps], 0)
    names = (*(f"o{i}" for i in range(len(spatial))), "n", "c", *spatial)
    out, axes = contract(x, names, rhs, _rhs_axes(geo), dtype, precision)
    return _finish(out, tuple("s" + n[1:] if n[0] == "o" else n for n in axes), geo)


def scatter(
    lhs: jax.Array, rhs: jax.Array, geo: Geometry, dtype: Any, precision: Any = None, chunk: int = 0
) -> jax.Array:
    """The product of every input place with every tap, then each tap's share added where it belongs."""
    spatial = _spatial(geo)
    taps_axes = tuple("k" + s[1:] for s in spatial)
    x, x_axes = _split(lhs, _lhs_axes(geo), geo.group_axis, geo.groups)
    w, w_axes = _split(rhs, _rhs_axes(geo), "f", geo.groups)
    w_axes = tuple("k" + n[1:] if n in spatial else n for n in w_axes)
    wanted = (
        _rest(w_axes, ("g", *taps_axes, "f", "c")) if w_axes[-1] == "c" else _rest(w_axes, ("g", "c", *taps_axes, "f"))
    )
    w, w_axes = arrange(w, w_axes, wanted), wanted
    blocks: list[Axes] = [(n,) for n in w_axes if n in ("g", "c")]
    blocks.insert(len(blocks) if w_axes[-1] == "f" else len(blocks) - 1, (*taps_axes, "f"))
    w = merge(w, w_axes, blocks)
    w_axes = tuple("f" if len(b) > 1 else b[0] for b in blocks)
    taps = positions(geo.kernel)
    shares: list[jax.Array] = []
    axes: Axes = ()
    for first, last in _runs(len(taps), chunk):
        rows = lax.slice_in_dim(w, first * geo.features_out, last * geo.features_out, axis=w_axes.index("f"))
        table, axes = contract(x, x_axes, rows, w_axes, dtype, precision)
        for i, tap in enumerate(taps[first:last]):
            share = lax.slice_in_dim(table, i * geo.features_out, (i + 1) * geo.features_out, axis=axes.index("f"))
            shares.append(shifted(share, [axes.index(s) for s in spatial], tap, geo))
    return _finish(reduce(lax.add, shares), axes, geo)


def gather_right(
    lhs: jax.Array, rhs: jax.Array, geo: Geometry, dtype: Any, precision: Any = None, chunk: int = 0
) -> jax.Array:
    """The left operand times patches of the right one, one for each output position; the right one is not dilated."""
    spatial = _spatial(geo)
    x, x_axes = _split(lhs, _lhs_axes(geo), geo.group_axis, geo.groups)
    w, w_axes = _split(rhs, _rhs_axes(geo), "f", geo.groups)
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
        starts = [[a - b for a, b in zip(lows, _times(o, geo.strides), strict=True)] for o in spots[first:last]]
        patches = [window(w, places, start, geo.lhs_dilation, geo.spatial) for start in starts]
        blocks.append(contract(x, x_axes, _cat(patches, w_axes.index("f")), w_axes, dtype, precision))
    axes = blocks[0][1]
    out, axes = _unfold(_cat([b for b, _ in blocks], axes.index("f")), axes, "f", geo)
    return _finish(out, axes, geo)


def elementwise(lhs: jax.Array, rhs: jax.Array, geo: Geometry, dtype: Any) -> jax.Array:
    """Products and sums tap by tap, for so few input channels that a matrix product would mostly move memory."""
    spatial = _spatial(geo)
    w, w_axes = _split(rhs.astype(dtype), _rhs_axes(geo), "f", geo.groups)
    x, x_axes = _split(lhs.astype(dtype), _lhs_axes(geo), geo.group_axis, geo.groups)
    if geo.group_axis == "n":
        return _elementwise_by_output(x, x_axes, w, w_axes, geo)
    if geo.features_out == 1:
        w, w_axes = _drop(w, w_axes, "f")
    names = tuple("f" if n == "c" else n for n in x_axes if n != "c" or geo.features_out > 1)
    undilated = max(geo.lhs_dilation) == 1
    if undilated:
        x = pad(x, 0, _padding(geo, [x_axes.index(s) for s in spatial], x.ndim))
    shares = []
    for *tap, c in positions((*geo.kernel, geo.features_in)):
        weight = _take(w, w_axes, ("c", *spatial), (c, *tap), names)
        if undilated:
            places = [x_axes.index(s) for s in spatial]
            piece = window(x, places, _times(tap, geo.rhs_dilation), geo.strides, geo.out)
            shares.append(_take(piece, x_axes, ("c",), (c,), names) * weight)
        else:
            share = _take(x, x_axes, ("c",), (c,), names) * weight
            shares.append(shifted(share, [names.index(s) for s in spatial], tap, geo))
    return _finish(reduce(lax.add, shares), names, geo)


def _take(x: jax.Array, axes: Axes, taken: Axes, at: Sequence[int], names: Axes) -> jax.Array:
    """One index along each of the axes `taken`, the rest spread out over `names`."""
    ones = [1] * len(taken)
    x = window(x, [axes.index(n) for n in taken], at, ones, ones)
    for name in taken:
        x, axes = _drop(x, axes, name)
    return _spread(x, axes, names)


def _elementwise_by_output(x: jax.Array, x_axes: Axes, w: jax.Array, w_axes: Axes, geo: Geometry) -> jax.Array:
    """The weight gradient of a depthwise convolution: one sum over batch and places per kernel position and channel."""
    spatial = _spatial(geo)
    x, x_axes = _drop(x, x_axes, "n")
    names = (*x_axes, "f") if geo.features_out > 1 else x_axes
    if geo.features_out == 1:
        w, w_axes = _drop(w, w_axes, "f")
    x = pad(x, 0, _padding(geo, [x_axes.index(s) for s in spatial], x.ndim))
    places = [x_axes.index(s) for s in spatial]
    w = _spread(w, w_axes, names)
    summed = [names.index(n) for n in ("c", *spatial)]
    rows = []
    for spot in positions(geo.out):
        piece = window(x, places, _times(spot, geo.strides), geo.rhs_dilation, geo.kernel)
        rows.append((_spread(piece, x_axes, names) * w).sum(summed))
    kept = tuple(n for n in names if n not in ("c", *spatial))
    out = lax.reshape(lax.concatenate([lax.expand_dims(r, [0]) for r in rows], 0), (*geo.out, *rows[0].shape))
    return _finish(out, (*spatial, *kept), geo)


def padded(lhs: jax.Array, geo: Geometry) -> jax.Array:
    """The left operand with its padding and dilation written out."""
    return pad(lhs, 0, _padding(geo, geo.lhs_spec[2:], lhs.ndim))


def shifted(share: jax.Array, places: Sequence[int], tap: Sequence[int], geo: Geometry) -> jax.Array:
    """One tap's products, moved to the output positions they add to."""
    config = [(0, 0, 0)] * share.ndim
    for axis, k, size, count, stride, (low, _), base, by in zip(
        places, tap, geo.spatial, geo.out, geo.strides, geo.padding, geo.lhs_dilation, geo.rhs_dilation, strict=True
    ):
        before = low - k * by
        config[axis] = (before, dilated(count, stride) - before - dilated(size, base), base - 1)
    return window(pad(share, 0, config), places, [0] * len(places), geo.strides, geo.out)


def positions(shape: Shape) -> list[Position]:
    """Every index into `shape`, last axis fastest."""
    return list(product(*map(range, shape)))


def _padding(geo: Geometry, places: Sequence[int], ndim: int) -> list[tuple[int, int, int]]:
    config = [(0, 0, 0)] * ndim
    for axis, (low, high), dilation in zip(places, geo.padding, geo.lhs_dilation, strict=True):
        config[axis] = (low, high, dilation - 1)
    return config


def _fewer_taps(geo: Geometry) -> bool:
    return len(positions(geo.kernel)) <= len(positions(geo.out))


def _spatial(geo: Geometry) -> Axes:
    return tuple(f"s{i}" for i in range(len(geo.spatial)))


def _named(spec: Shape, first: str, second: str) -> Axes:
    names = [""] * len(spec)
    for axis, name in zip(spec, (first, second, *(f"s{i}" for i in range(len(spec) - 2))), strict=True):
        names[axis] = name
    return tuple(names)


def _lhs_axes(geo: Geometry) -> Axes:
    return _named(geo.lhs_spec, "n", "c")


def _rhs_axes(geo: Geometry) -> Axes:
    return _named(geo.rhs_spec, "f", "c")


def _split(x: jax.Array, axes: Axes, name: str, groups: int) -> tuple[jax.Array, Axes]:
    """The named axis as two: groups "g" and what is in one group."""
    if groups == 1:
        return x, axes
    at = axes.index(name)
    shape = (*x.shape[:at], groups, x.shape[at] // groups, *x.shape[at + 1 :])
    return lax.reshape(x, shape), (*axes[:at], "g", *axes[at:])


def _drop(x: jax.Array, axes: Axes, name: str) -> tuple[jax.Array, Axes]:
    at = axes.index(name)
    return lax.squeeze(x, [at]), axes[:at] + axes[at + 1 :]


def _spread(x: jax.Array, axes: Axes, names: Axes) -> jax.Array:
    """`x` with its axes in the order of `names`, those it lacks of size 1."""
    x = arrange(x, axes, tuple(n for n in names if n in axes))
    return lax.expand_dims(x, [i for i, n in enumerate(names) if n not in axes])


def _rest(axes: Axes, first: Axes) -> Axes:
    """`first` as far as they occur, then the other axes in their order."""
    return (*(n for n in first if n in axes), *(n for n in axes if n not in first))


def _merged_shape(w: jax.Array, axes: Axes, spatial: Axes, geo: Geometry) -> list[int]:
    taps = len(positions(geo.kernel))
    return [w.shape[axes.index(n)] * (taps if n == "c" else 1) for n in axes if n not in spatial]


def _times(position: Sequence[int], step: Shape) -> Position:
    return tuple(p * s for p, s in zip(position, step, strict=True))


def _runs(count: int, chunk: int) -> Iterator[tuple[int, int]]:
    chunk = chunk or count
    return ((first, min(first + chunk, count)) for first in range(0, count, chunk))


def _cat(parts: Sequence[jax.Array], axis: int) -> jax.Array:
    return parts[0] if len(parts) == 1 else lax.concatenate(parts, axis)


def _unfold(out: jax.Array, axes: Axes, name: str, geo: Geometry) -> tuple[jax.Array, Axes]:
    """The named axis, which holds output positions and then its own index, as separate axes."""
    at = axes.index(name)
    own = out.shape[at] // len(positions(geo.out))
    out = lax.reshape(out, (*out.shape[:at], *geo.out, own, *out.shape[at + 1 :]))
    return out, (*axes[:at], *_spatial(geo), *axes[at:])


def _finish(out: jax.Array, axes: Axes, geo: Geometry) -> jax.Array:
    """The result in the layout the equation promised."""
    wanted = _named(geo.out_spec, "n", "f")
    sizes = {"n": geo.batch, "f": geo.features_out * geo.groups} | dict(zip(_spatial(geo), geo.out, strict=True))
    present = {*axes}
    order: list[str] = []
    for name in wanted:
        order += [n for n in (("g", "f") if name == "f" else (name,)) if n in present]
    return lax.reshape(arrange(out, axes, tuple(order)), [sizes[n] for n in wanted])
