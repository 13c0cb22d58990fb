"""Which windowed equations are replaced, by what, on which platform.

`plan_convolution(geometry, platform)` and `plan_pooling(windows, platform, primitive)` are pure: sizes in, decision out. `None` keeps the original.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Literal

from .geometry import Geometry, Shape
from .pooling import Windows
from .winograd import transform

Kind = Literal["gather", "gather_narrow", "scatter", "gather_right", "elementwise", "winograd", "winograd_scatter", "winograd_weights"]


@dataclass(frozen=True, slots=True)
class Choice:
    """A lowering, how many positions it lays out at once (0: all), and the tile of a Winograd form."""

    kind: Kind
    chunk: int = 0
    tile: int = 0


@dataclass(frozen=True, slots=True)
class Limits:
    """Up to where the replacement is worth it on one platform."""

    positions: int
    """Slices one equation may become; beyond, the program grows faster than it gains."""
    patches: int
    """Bytes laid out at once; more are laid out in several parts."""
    multiplications: int | None
    """Multiply-adds of one convolution up to which it is replaced; None: any number."""
    forward_pooling: bool
    """Whether pooling itself is replaced, not only its gradient."""
    winograd: bool
    """Whether 3x3 convolutions may be done with fewer multiplications (needs float32 products that are not rounded to less)."""


WINOGRAD_CHANNELS = 16
WINOGRAD_GAIN = 1.5
WINOGRAD_KERNELS = (2, 3, 4, 5)
WINOGRAD_WEIGHTS = (2, 3, 4)
WINOGRAD_TILES = {6: 64, 4: 4096}
NARROW = 4
FEW_PRODUCTS = 32
FEW_OUTPUTS = 8
CPU = Limits(positions=256, patches=256 << 20, multiplications=None, forward_pooling=True, winograd=True)
GPU = Limits(positions=64, patches=64 << 20, multiplications=1 << 28, forward_pooling=False, winograd=False)
LIMITS = {"cpu": CPU, "gpu": GPU, "cuda": GPU, "rocm": GPU}


def plan_convolution(geo: Geometry, platform: str) -> Choice | None:
    """The cheapest lowering of a convolution, or None where the original is kept."""
    limits = LIMITS.get(platform)
    if limits is None or geo.empty:
        return None
    if limits.multiplications is not None and geo.multiplications > limits.multiplications:
        return None
    tiled = plan_winograd(geo) if limits.winograd else None
    if tiled is not None:
        return tiled
    sizes = costs(geo)
    counts = slices(geo)
    fitting = [kind for kind in sizes if counts[kind] <= limits.positions]
    if not fitting:
        return None
    kind = min(fitting, key=lambda k: sizes[k])
    per_slice = sizes[kind] // counts[kind]
    chunk = max(limits.patches // max(per_slice, 1), 1)
    return Choice(kind, 0 if chunk >= counts[kind] else chunk)


def plan_winograd(geo: Geometry) -> Choice | None:
    """The Winograd form of a convolution, if it has one that pays."""
    steps = geo.strides + geo.lhs_dilation + geo.rhs_dilation
    if len(geo.spatial) != 2 or geo.groups != 1 or max(steps) > 1 or geo.itemsize != 4:
        return None
    if geo.kernel[0] == geo.kernel[1] and geo.kernel[0] in WINOGRAD_KERNELS:
        # Equal sizes on both sides say nothing; an input gradient reads a kernel whose features stand the other way round.
        gradient = geo.spatial < geo.out or (geo.spatial == geo.out and geo.rhs_spec[0] < geo.rhs_spec[1])
        kind, area = ("winograd_scatter", geo.spatial) if gradient else ("winograd", geo.out)
        return _tiled(kind, geo.kernel[0], area, (geo.features_in, geo.features_out))
    if geo.out[0] == geo.out[1] and geo.out[0] in WINOGRAD_WEIGHTS:
        return _tiled("winograd_weights", geo.out[0], geo.kernel, (geo.batch, geo.features_out))
    return None


def _tiled(kind: Kind, size: int, area: Shape, channels: tuple[int, int]) -> Choice | None:
    """The tile with the fewest multiplications that keeps rounding small [Note: rounding of Winograd]."""
    if min(channels) < WINOGRAD_CHANNELS:
        return None
    sizes = [n for n, most in WINOGRAD_TILES.items() if max(channels) <= most and n > size]
    costs = {n: n * n * prod(transform(n, size).grid(area)) for n in sizes}
    tile = min(costs, key=lambda n: costs[n], default=0)
    worth = tile and costs[tile] * WINOGRAD_GAIN <= size * size * prod(area)
    return Choice(kind, tile=tile) if worth else None


def costs(geo: Geometry) -> dict[Kind, int]:
    """Bytes each possible lowering lays out between reading its operands and writing its result."""
    taps, places, spots = prod(geo.kernel), prod(geo.spatial), prod(geo.out)
    unit = geo.itemsize * geo.groups
    if _single_channel(geo) or _few_products(geo):
        return {"elementwise": 0}
    if geo.groups == 1 and geo.batch <= NARROW and spots < taps:
        return {"gather_narrow": unit * geo.batch * spots * taps * geo.features_in}
    kinds: dict[Kind, int] = {"gather": unit * geo.batch * spots * taps * geo.features_in}
    if taps == 1 and max(geo.strides + geo.lhs_dilation) == 1:
        return kinds
    if max(geo.lhs_dilation) > 1:
        kinds["gather"] *= 4  # zeros would be multiplied too
    kinds["scatter"] = unit * geo.batch * places * taps * geo.features_out
    if max(geo.strides) > 1:
        kinds["scatter"] *= 4  # products would be thrown away
    if max(geo.rhs_dilation) == 1 and max(geo.lhs_dilation) > 1:
        kinds["gather_right"] = unit * spots * places * geo.features_in * geo.features_out
    return kinds


def slices(geo: Geometry) -> dict[Kind, int]:
    """Slices each lowering cuts."""
    taps, spots = prod(geo.kernel), prod(geo.out)
    by_output = geo.group_axis == "n"
    per_tap = 1 if by_output else geo.features_in
    return {
        "gather": min(taps, spots),
        "gather_narrow": spots,
        "scatter": taps,
        "gather_right": spots,
        "elementwise": per_tap * (spots if by_output else taps),
    }


def _single_channel(geo: Geometry) -> bool:
    inner = geo.batch if geo.group_axis == "n" else geo.features_in
    return geo.groups > 1 and inner == 1


def _few_products(geo: Geometry) -> bool:
    """Whether each output is a sum of so few products, and there are so many outputs, that adding them up one by one is faster."""
    products = prod(geo.kernel) * geo.features_in
    wide = geo.features_out >= FEW_OUTPUTS and prod(geo.out) >= prod(geo.kernel)
    return geo.groups == 1 and 1 < products <= FEW_PRODUCTS and wide and max(geo.lhs_dilation) == 1


def plan_pooling(windows: Windows, platform: str, primitive: str) -> bool:
    """Whether a pooling or its gradient is replaced."""
    limits = LIMITS.get(platform)
    if limits is None or windows.empty:
        return False
    gradient = primitive.startswith("select_and")
    count = windows.positions if gradient else sum(windows.size)
    return count <= limits.positions and (gradient or limits.forward_pooling)
