"""The pictures of operations and memory, as SVG. `Markup.format` escapes words from users."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Final

from openipu.engine.facts.costs import Buffers, Cost, Part, Peak
from openipu.engine.facts.values import RunFacts

from markupsafe import Markup

from .costs import OUTSIDE, main_program
from .summary import quantity, size

KINDS: Final = {
    "weights": "#0072b2",
    "optimizer state": "#56b4e9",
    "other variables": "#785ef0",
    "metrics": "#f0e442",
    "feeds": "#cc79a7",
    "activations": "#009e73",
    "gradients": "#d55e00",
    "temporary": "#e69f00",
    "results": "#882255",
    "program": "#767676",
    "arguments": "#0072b2",
}
"""The colours of Okabe and Ito, and few others: people with any kind of colour vision can tell neighbours apart."""
_MARKS: Final[dict[Part, str]] = {"forward": "#0072b2", "backward": "#d55e00", "update": "#009e73"}
_WIDTH, _HEIGHT, _LEFT, _TOP, _BOTTOM, _RIGHT = 720, 320, 72, 28, 44, 20
_DRAWN, _LEAST = 60, 1e-4
"""How many layers the roofline shows, and the least share of the largest one's operations that they have."""
_Place = Callable[[float, float], tuple[float, float]]


def roofline(run: RunFacts) -> Markup:
    """The layers of a run under the limits of its devices, with double logarithmic axes."""
    program, peak = main_program(run), run.peak
    if program is None or program.counted is None or peak is None:
        return Markup("")
    every = [cost for cost in program.counted.costs if cost.operations and cost.bytes]
    most = max((cost.operations for cost in every), default=0.0)
    costs = sorted((c for c in every if c.operations > _LEAST * most), key=lambda c: -c.operations)[:_DRAWN]
    if not costs:
        return Markup("")
    bound = [(cost.operations / cost.bytes, _attainable(cost.operations / cost.bytes, peak)) for cost in costs]
    whole = _measured(run, every)
    points = [*bound, *([whole] if whole else [])]
    ridge = peak.operations_per_second / peak.bytes_per_second
    xs = _decades([x for x, _ in points] + [ridge])
    ys = _decades([y for _, y in points] + [peak.operations_per_second])
    at = _logarithmic(xs, ys)
    drawn = [*_axes(xs, ys, at), _roof(xs, ys, at, peak)]
    for cost, (x, y) in reversed(list(zip(costs, bound, strict=True))):
        drawn.append(_mark(cost, *at(x, y), 4 + 8 * math.sqrt(cost.operations / most), y))
    if whole is not None:
        x, y = at(*whole)
        drawn.append(
            Markup(
                '<g><title>the whole step, measured: {} GFLOP/s at {} FLOPs per byte</title><path class="measured" '
                'd="M{:.1f} {:.1f}l7 7l-7 7l-7 -7z"/></g>'
            ).format(quantity(1e-9 * whole[1]), quantity(whole[0]), x, y - 7)
        )
    return Markup(
        '<svg class="chart roofline" viewBox="0 0 {} {}" role="img" aria-label="Roofline: {} parts of layers; the '
        'devices do at most {} GFLOP/s and move at most {} GB/s">{}</svg>'
    ).format(
        _WIDTH, _HEIGHT, len(costs), quantity(1e-9 * peak.operations_per_second),
        quantity(1e-9 * peak.bytes_per_second), Markup("").join(drawn),
    )  # fmt: skip


def _attainable(intensity: float, peak: Peak) -> float:
    """Operations per second that the limits of the devices allow."""
    return min(peak.operations_per_second, intensity * peak.bytes_per_second)


def _measured(run: RunFacts, costs: Sequence[Cost]) -> tuple[float, float] | None:
    """Where the whole step lies: its intensity and the operations per second of all devices."""
    program, peak, timed = main_program(run), run.peak, run.timed
    if program is None or peak is None or not program.operations or not timed.steps or timed.seconds <= 0:
        return None
    speed = program.operations * peak.devices * timed.steps / timed.seconds
    return sum(c.operations for c in costs) / sum(c.bytes for c in costs), speed


def _decades(values: Sequence[float]) -> tuple[int, int]:
    return math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)) + 1e-6)


def _logarithmic(xs: tuple[int, int], ys: tuple[int, int]) -> _Place:
    inner, height = _WIDTH - _LEFT - _RIGHT, _HEIGHT - _TOP - _BOTTOM

    def at(x: float, y: float) -> tuple[float, float]:
        right = (math.log10(x) - xs[0]) / (xs[1] - xs[0])
        up = (math.log10(y) - ys[0]) / (ys[1] - ys[0])
        return _LEFT + inner * right, _TOP + height * (1 - up)

    return at


def _axes(xs: tuple[int, int], ys: tuple[int, int], at: _Place) -> list[Markup]:
    drawn = []
    for power in range(ys[0], ys[1] + 1):
        y = at(10.0 ** xs[0], 10.0**power)[1]
        drawn.append(
            Markup('<path class="grid" d="M{} {:.1f}H{}"/><text class="y" x="{}" y="{:.1f}">{}</text>').format(
                _LEFT, y, _WIDTH - _RIGHT, _LEFT - 6, y + 4, f"{10.0 ** (power - 9):g}"
            )
        )
    for power in range(xs[0], xs[1] + 1):
        x = at(10.0**power, 10.0 ** ys[0])[0]
        drawn.append(
            Markup('<path class="grid" d="M{:.1f} {}V{}"/><text class="x" x="{:.1f}" y="{}">{}</text>').format(
                x, _TOP, _HEIGHT - _BOTTOM, x, _HEIGHT - 24, f"{10.0**power:g}"
            )
        )
    drawn.append(
        Markup(
            '<text class="x" x="{}" y="{}">FLOPs per byte</text><text class="y" x="{}" y="{}">GFLOP/s</text>'
        ).format(_WIDTH / 2, _HEIGHT - 6, _LEFT - 6, _TOP - 14)
    )
    return drawn


def _roof(xs: tuple[int, int], ys: tuple[int, int], at: _Place, peak: Peak) -> Markup:
    """The two limits: what memory allows, and what arithmetic allows."""
    ridge = peak.operations_per_second / peak.bytes_per_second
    left = max(10.0 ** xs[0], 10.0 ** ys[0] / peak.bytes_per_second)
    corners = [at(x, _attainable(x, peak)) for x in (left, ridge, 10.0 ** xs[1])]
    path = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in corners)
    return Markup(
        "<g><title>measured limits: {} GFLOP/s of matrix products in {}, {} GB/s of memory</title>"
        '<path class="line" d="{}"/></g>'
    ).format(quantity(1e-9 * peak.operations_per_second), peak.dtype, quantity(1e-9 * peak.bytes_per_second), path)


def _mark(cost: Cost, x: float, y: float, radius: float, speed: float) -> Markup:
    """A layer's part: a circle, a square or a triangle, so that they differ without colours, too."""
    shapes = {
        "forward": "M{0:.1f} {1:.1f}m-{2:.1f} 0a{2:.1f} {2:.1f} 0 1 0 {3:.1f} 0a{2:.1f} {2:.1f} 0 1 0 -{3:.1f} 0z",
        "backward": "M{0:.1f} {1:.1f}m-{2:.1f} -{2:.1f}h{3:.1f}v{3:.1f}h-{3:.1f}z",
        "update": "M{0:.1f} {1:.1f}m0 -{2:.1f}l{2:.1f} {3:.1f}h-{3:.1f}z",
    }
    path = shapes[cost.part].format(x, y, radius, 2 * radius)
    return Markup(
        '<g><title>{}, {}: {} FLOPs, {}, {} FLOPs per byte, at most {} GFLOP/s</title>'
        '<path class="mark" d="{}" fill="{}"/></g>'
    ).format(
        cost.layer or OUTSIDE, cost.part, quantity(cost.operations), size(int(cost.bytes)),
        quantity(cost.operations / cost.bytes), quantity(1e-9 * speed), path, _MARKS[cost.part],
    )  # fmt: skip


def memory_over_time(buffers: Buffers, limit: int | None) -> Markup:
    """The memory of a device over the order of a program: what stays at the bottom, and what comes and goes above."""
    base = sum(buffers.arguments.values())
    top = max(base + buffers.peak.whole, 1)
    if limit is not None and limit < 4 * top:
        top = max(top, limit)
    moments = buffers.moments
    inner, height = _WIDTH - _LEFT - _RIGHT, _HEIGHT - _TOP - _BOTTOM
    layers: list[tuple[str, list[float]]] = [(kind, [n] * len(moments)) for kind, n in buffers.arguments.items()]
    layers += [(kind, [getattr(m, kind) for m in moments]) for kind in ("activations", "gradients", "temporary")]
    below, drawn = [0.0] * len(moments), []
    for share in (0, 0.25, 0.5, 0.75, 1):
        y = _TOP + height * (1 - share)
        drawn.append(
            Markup('<path class="grid" d="M{} {:.1f}H{}"/><text class="y" x="{}" y="{:.1f}">{}</text>').format(
                _LEFT, y, _WIDTH - _RIGHT, _LEFT - 6, y + 4, size(int(share * top))
            )
        )
    for kind, values in layers:
        above = [a + b for a, b in zip(below, values, strict=True)]
        if any(values):
            forth = _steps(above, top, inner, height)
            back = list(reversed(_steps(below, top, inner, height)))
            drawn.append(
                Markup('<g><title>{}: at most {}</title><path class="area" d="M{}z" fill="{}"/></g>').format(
                    kind, size(int(max(values))), "L".join(f"{x:.1f} {y:.1f}" for x, y in [*forth, *back]), KINDS[kind]
                )
            )
        below = above
    if limit is not None and limit <= top:
        y = _TOP + height * (1 - limit / top)
        drawn.append(Markup('<path class="line" d="M{} {:.1f}H{}"/>').format(_LEFT, y, _WIDTH - _RIGHT))
    drawn.append(
        Markup('<text class="x" x="{}" y="{}">the program from start to end; loop bodies once</text>').format(
            _LEFT + inner / 2, _HEIGHT - 12
        )
    )
    return Markup(
        '<svg class="chart" viewBox="0 0 {} {}" role="img" aria-label="Memory of one device over a program: {} at '
        'most, of which {} stay">{}</svg>'
    ).format(_WIDTH, _HEIGHT, size(base + buffers.peak.whole), size(base), Markup("").join(drawn))


def _steps(values: Sequence[float], top: float, inner: float, height: float) -> list[tuple[float, float]]:
    """The corners of a line that stays level from one moment to the next."""
    width = inner / max(len(values), 1)
    corners = []
    for number, value in enumerate(values):
        y = _TOP + height * (1 - value / top)
        corners += [(_LEFT + width * number, y), (_LEFT + width * (number + 1), y)]
    return corners
