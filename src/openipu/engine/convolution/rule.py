"""Which windowed equations are replaced, by what, on which platform.

`plan_convolution(geometry, platform)` and `plan_pooling(windows, platform, primitive)` are pure: sizes in, decision
out. None and False keep the original. The numbers for CPUs were measured with `benchmarks/micro_convolution.py` and
similar scripts, in float32 on one core of an AMD EPYC 9004. Those for GPUs come from one trial: the tutorial CNN on an
H200.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod
from typing import Literal

from .geometry import Geometry, Shape
from .pooling import Windows
from .winograd import transform

Kind = Literal[
    "direct",
    "gather",
    "gather_narrow",
    "gather_right",
    "scatter",
    "elementwise",
    "winograd",
    "winograd_backward",
    "winograd_scatter",
    "winograd_weights",
]


@dataclass(frozen=True, slots=True)
class Choice:
    """A lowering and its settings."""

    kind: Kind
    chunk: int = 0
    """How many kernel or output positions are laid out at once; 0 for all."""
    tile: int = 0
    """The side of a Winograd tile."""
    by_group: bool = False
    """Whether each group is computed as a convolution of its own, one after the other."""
    wall: bool = False
    """Whether the result is computed before anything reads it [Note: a wall XLA:CPU respects]."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Up to which sizes replacing pays on one platform."""

    positions: int
    """How many slices may replace one equation. With more, the program grows too large for the gain."""
    patches: int
    """How many bytes are laid out at once. More are laid out in several parts."""
    multiplications: int | None
    """A convolution with more multiply-adds than this is not replaced; None for no limit."""
    forward_pooling: bool
    """Whether pooling itself is replaced, not only its gradient."""
    groups: int
    """With up to this many groups, each becomes a plain convolution. More become one batch of matrix products."""
    direct: bool
    """Whether XLA's own convolution is used where it is about as fast, because it takes the least time to compile."""
    winograd: bool
    """Whether small kernels may use the Winograd form, which needs matrix products in full float32."""
    walls: bool
    """Whether the compiler has to be kept from repeating work for every reader."""


CPU = Limits(
    positions=256,
    patches=64 << 20,
    multiplications=None,
    forward_pooling=True,
    groups=8,
    direct=True,
    winograd=True,
    walls=True,
)
GPU = Limits(
    positions=64,
    patches=64 << 20,
    multiplications=1 << 28,
    forward_pooling=False,
    groups=1,
    direct=False,
    winograd=False,
    walls=False,
)
LIMITS = {"cpu": CPU, "gpu": GPU, "cuda": GPU, "rocm": GPU}

FEW_PRODUCTS = 32
"""Up to this many products per output are added one by one.

A 3x3 kernel from 28x28x1 to 32 channels takes 0.27 ms that way and 1.06 ms as a matrix product.
"""
FEW_OUTPUTS = 8
"""`FEW_PRODUCTS` applies from this many output channels on: they fill the vector registers."""
FEW_PLACES = 16
"""... and from this many output places on. Weight gradients of small images have fewer."""
CHEAP_PRODUCTS = 12
"""Up to this many products per output are cheaper to repeat for a second reader than to store."""
NARROW = 3
"""With up to this many input channels, a weight gradient shifts whole images.

That takes 0.48 instead of 1.00 ms with one channel, and gains nothing with four.
"""

DIRECT_PLACES = 64
"""From this many output places on, XLA's own convolution is fast.

With 2x2 places and 512 channels, it takes 50 times as long as a matrix product.
"""
DIRECT_PAIRS = 768
"""Below this many pairs of input and output channels, it is as fast as any other form.

With 32 channels on both sides, Winograd makes the whole step of a CIFAR-10 network faster: 30 instead of 40 ms. With 48
and 16, in the largest layer of a U-Net, its step takes 49 instead of 53 ms.
"""
DIRECT_WEIGHTS = (256, 1 << 20)
"""It computes weight gradients as fast up to this many pairs of channels, or for inputs of up to this many bytes."""

WINOGRAD_PLACES = 16
"""From this many output places on, Winograd is worth the time that it takes to compile."""
WINOGRAD_GAIN = 1.5
"""Winograd has to save multiplications by at least this factor."""
WINOGRAD_CHANNELS = 8
"""From this many channels on either side, the transforms are cheap compared with the products."""
WINOGRAD_PAIRS = {2: 1024, 3: 256, 4: 256, 5: 256}
"""For each kernel size, the least product of input and output channels."""
WINOGRAD_WEIGHTS = (2, 3, 4)
"""Kernel sizes whose weight gradients keep their precision [Note: rounding of Winograd]."""
WINOGRAD_TILES = {6: 64, 4: 4096}
"""For each tile size, the most channels with which it keeps its precision."""
WINOGRAD_FEWER = 0.7
"""Tiles of its input are used for an input gradient if there are at most so many for each tile of its output.

Adding them up where they overlap takes longer to compile. An 11x11 gradient of a 13x13 input has 9 instead of 16.
"""


def plan_convolution(geo: Geometry, platform: str) -> Choice | None:
    """The cheapest lowering of a convolution, or None to keep the original."""
    limits = LIMITS.get(platform)
    if limits is None or geo.empty:
        return None
    if limits.multiplications is not None and geo.multiplications > limits.multiplications:
        return None
    by_group = 1 < geo.groups <= limits.groups and not _single_channel(geo)
    if by_group:
        geo = replace(geo, groups=1, group_axis="c")
    if limits.direct and is_direct(geo):
        choice: Choice | None = Choice("direct")
    else:
        choice = (plan_winograd(geo) if limits.winograd else None) or _plan_slices(geo, limits)
    if choice is None:
        return None
    return replace(choice, by_group=by_group, wall=limits.walls and _repeats(choice, geo))


def _plan_slices(geo: Geometry, limits: Limits) -> Choice | None:
    sizes, counts = costs(geo), slices(geo)
    fitting = [kind for kind in sizes if counts[kind] <= limits.positions]
    if not fitting:
        return None
    kind = min(fitting, key=lambda k: sizes[k])
    per_slice = sizes[kind] // counts[kind]
    chunk = max(limits.patches // max(per_slice, 1), 1)
    return Choice(kind, chunk=0 if chunk >= counts[kind] else chunk)


def is_direct(geo: Geometry) -> bool:
    """Whether XLA's own convolution is about as fast as any other form."""
    if geo.groups > 1 or geo.itemsize != 4 or max(geo.lhs_dilation) > 1 or len(geo.spatial) > 3:
        return False
    if min(low for pair in geo.padding for low in pair) < 0:
        return False  # XLA:CPU's own results are wrong for some of these
    if 1 in (prod(geo.kernel), prod(geo.out)) or not {"gather", "scatter"} & costs(geo).keys():
        return False
    if geo.is_weight_gradient:  # the batch has the place of the input channels
        pairs, size = DIRECT_WEIGHTS
        size_of_input = geo.itemsize * geo.batch * prod(geo.spatial) * geo.features_in
        return geo.batch * geo.features_out <= pairs or size_of_input <= size
    return prod(geo.out) >= DIRECT_PLACES and geo.features_in * geo.features_out < DIRECT_PAIRS


def _repeats(choice: Choice, geo: Geometry) -> bool:
    """Whether a lowering ends with a sum of many terms, which the compiler would repeat for each reader."""
    if choice.kind == "elementwise":
        return prod(geo.kernel) * geo.features_in > CHEAP_PRODUCTS and geo.group_axis == "c"
    return choice.kind in ("scatter", "winograd", "winograd_backward", "winograd_scatter")


def plan_winograd(geo: Geometry) -> Choice | None:
    """The Winograd form of a convolution, if it has one that pays."""
    steps = geo.strides + geo.lhs_dilation + geo.rhs_dilation
    if len(geo.spatial) != 2 or geo.groups != 1 or max(steps) > 1 or geo.itemsize != 4:
        return None
    if geo.kernel[0] == geo.kernel[1] and geo.kernel[0] in WINOGRAD_PAIRS:
        # An input gradient has the larger output. If sizes are equal, its kernel has its features in the other order.
        gradient = geo.spatial < geo.out or (geo.spatial == geo.out and geo.rhs_spec[0] < geo.rhs_spec[1])
        channels = geo.features_in, geo.features_out
        if gradient and (by_input := _tiled("winograd_scatter", geo.kernel[0], geo.spatial, channels)) is not None:
            grid = transform(by_input.tile, geo.kernel[0]).grid
            if prod(grid(geo.spatial)) <= WINOGRAD_FEWER * prod(grid(geo.out)):
                return by_input
        return _tiled("winograd_backward" if gradient else "winograd", geo.kernel[0], geo.out, channels)
    if geo.out[0] == geo.out[1] and geo.out[0] in WINOGRAD_WEIGHTS:
        return _tiled("winograd_weights", geo.out[0], geo.kernel, (geo.batch, geo.features_out))
    return None


def _tiled(kind: Kind, size: int, area: Shape, channels: tuple[int, int]) -> Choice | None:
    """The tile with the fewest multiplications that keeps rounding errors small [Note: rounding of Winograd]."""
    if min(channels) < WINOGRAD_CHANNELS or prod(channels) < WINOGRAD_PAIRS[size] or prod(area) < WINOGRAD_PLACES:
        return None
    tiles = [n for n, most in WINOGRAD_TILES.items() if max(channels) <= most and n > size]
    cost = {n: n * n * prod(transform(n, size).grid(area)) for n in tiles}
    tile = min(cost, key=lambda n: cost[n], default=0)
    worth = tile and cost[tile] * WINOGRAD_GAIN <= size * size * prod(area)
    return Choice(kind, tile=tile) if worth else None


def costs(geo: Geometry) -> dict[Kind, int]:
    """The bytes that each suitable lowering would lay out between reading its operands and writing its result."""
    taps, places, spots = prod(geo.kernel), prod(geo.spatial), prod(geo.out)
    unit = geo.itemsize * geo.groups
    patches = unit * geo.batch * spots * taps * geo.features_in
    if _single_channel(geo) or _few_products(geo):
        return {"elementwise": 0}
    if geo.groups == 1 and geo.batch <= NARROW and spots < taps and spots <= FEW_PRODUCTS:
        return {"gather_narrow": patches}
    if taps == 1 and max(geo.strides + geo.lhs_dilation) == 1:
        return {"gather": patches}
    # `gather` would multiply the zeros of a dilated input, and `scatter` would drop products that a stride skips.
    kinds: dict[Kind, int] = {
        "gather": patches * (4 if max(geo.lhs_dilation) > 1 else 1),
        "scatter": unit * geo.batch * places * taps * geo.features_out * (4 if max(geo.strides) > 1 else 1),
    }
    if max(geo.rhs_dilation) == 1 and max(geo.lhs_dilation) > 1:
        kinds["gather_right"] = unit * spots * places * geo.features_in * geo.features_out
    return kinds


def slices(geo: Geometry) -> dict[Kind, int]:
    """The number of slices that each lowering cuts."""
    taps, spots = prod(geo.kernel), prod(geo.out)
    one_by_one = spots if geo.group_axis == "n" else taps * geo.features_in
    return {
        "gather": min(taps, spots),
        "gather_narrow": spots,
        "gather_right": spots,
        "scatter": taps,
        "elementwise": one_by_one,
    }


def _single_channel(geo: Geometry) -> bool:
    inner = geo.batch if geo.group_axis == "n" else geo.features_in
    return geo.groups > 1 and inner == 1


def _few_products(geo: Geometry) -> bool:
    """Whether an output is a sum of so few products that adding them one by one beats a matrix product."""
    products = prod(geo.kernel) * geo.features_in
    if prod(geo.kernel) == 1 and products > NARROW:
        return False  # a matrix product as it is
    wide = geo.features_out >= FEW_OUTPUTS and prod(geo.out) >= max(prod(geo.kernel), FEW_PLACES)
    return geo.groups == 1 and 1 < products <= FEW_PRODUCTS and wide and max(geo.lhs_dilation) == 1


def plan_pooling(windows: Windows, platform: str, primitive: str) -> bool:
    """Whether a pooling or its gradient is replaced."""
    limits = LIMITS.get(platform)
    if limits is None or windows.empty:
        return False
    gradient = primitive.startswith("select_and")
    count = windows.positions if gradient else sum(windows.size)
    return count <= limits.positions and (gradient or limits.forward_pooling)
