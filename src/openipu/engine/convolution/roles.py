"""What every lowering needs: the axes of a convolution by role, groups as an axis, results in the right layout.

The roles are "n" (batch), "c" (input features, summed over), "f" (output features), "s0", "s1", ... (places) and "g"
(groups).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import jax
from jax import lax

from .arrays import Axes, arrange, pad, window
from .geometry import Geometry, Shape, dilated

Position = tuple[int, ...]


def padded(lhs: jax.Array, geo: Geometry) -> jax.Array:
    """The left operand with its padding and dilation written out."""
    return pad(lhs, 0, padding(geo, geo.lhs_spec[2:], lhs.ndim))


def shifted(share: jax.Array, places: Sequence[int], tap: Sequence[int], geo: Geometry) -> jax.Array:
    """The products of one tap, moved to the output positions that they are added to."""
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


def padding(geo: Geometry, places: Sequence[int], ndim: int) -> list[tuple[int, int, int]]:
    """The configuration with which `lax.pad` pads and dilates the axes `places` as the equation says."""
    config = [(0, 0, 0)] * ndim
    for axis, (low, high), dilation in zip(places, geo.padding, geo.lhs_dilation, strict=True):
        config[axis] = (low, high, dilation - 1)
    return config


def spatial_axes(geo: Geometry) -> Axes:
    """The names of the spatial axes."""
    return tuple(f"s{i}" for i in range(len(geo.spatial)))


def named(spec: Shape, first: str, second: str) -> Axes:
    """The names of the axes in memory order. `spec` lists their numbers: two roles, then the spatial axes."""
    names = [""] * len(spec)
    for axis, name in zip(spec, (first, second, *(f"s{i}" for i in range(len(spec) - 2))), strict=True):
        names[axis] = name
    return tuple(names)


def lhs_axes(geo: Geometry) -> Axes:
    """The names of the left operand's axes."""
    return named(geo.lhs_spec, "n", "c")


def rhs_axes(geo: Geometry) -> Axes:
    """The names of the right operand's axes."""
    return named(geo.rhs_spec, "f", "c")


def split(x: jax.Array, axes: Axes, name: str, groups: int) -> tuple[jax.Array, Axes]:
    """`x` with the named axis split into two: the groups "g" and what is in one group."""
    if groups == 1:
        return x, axes
    at = axes.index(name)
    shape = (*x.shape[:at], groups, x.shape[at] // groups, *x.shape[at + 1 :])
    return lax.reshape(x, shape), (*axes[:at], "g", *axes[at:])


def drop(x: jax.Array, axes: Axes, name: str) -> tuple[jax.Array, Axes]:
    """`x` without the named axis, which has size 1."""
    at = axes.index(name)
    return lax.squeeze(x, [at]), axes[:at] + axes[at + 1 :]


def spread(x: jax.Array, axes: Axes, names: Axes) -> jax.Array:
    """`x` with its axes in the order of `names`. Those it lacks have size 1."""
    x = arrange(x, axes, tuple(n for n in names if n in axes))
    return lax.expand_dims(x, [i for i, n in enumerate(names) if n not in axes])


def times(position: Sequence[int], step: Shape) -> Position:
    """The position, scaled axis by axis."""
    return tuple(p * s for p, s in zip(position, step, strict=True))


def finish(out: jax.Array, axes: Axes, geo: Geometry) -> jax.Array:
    """The result in the layout that the equation asks for."""
    wanted = named(geo.out_spec, "n", "f")
    sizes = {"n": geo.batch, "f": geo.features_out * geo.groups} | dict(zip(spatial_axes(geo), geo.out, strict=True))
    present = {*axes}
    order: list[str] = []
    for name in wanted:
        order += [n for n in (("g", "f") if name == "f" else (name,)) if n in present]
    return lax.reshape(arrange(out, axes, tuple(order)), [sizes[n] for n in wanted])
