"""The pictures of a report, as SVG. Words from users come in as arguments of `Markup.format`, which escapes them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

from openipu.engine.facts.values import PipelineFacts, RunFacts
from openipu.engine.schedule.actions import Table
from openipu.engine.schedule.picture import svg

from markupsafe import Markup

from .cost_pictures import KINDS
from .stages import costs_of
from .summary import parts, quantity, size

# The colours of Okabe and Ito, which people with any kind of colour vision can tell apart, and few others.
COLOURS: Final = {
    "device": "#0072b2",
    "plan": "#785ef0",
    "trace": "#f0e442",
    "lower": "#e69f00",
    "compile": "#d55e00",
    "feed": "#cc79a7",
    "callbacks": "#009e73",
    "state": "#882255",
    "checkpoint": "#56b4e9",
    "reporting": "#767676",
    "other": "#b8b8b8",
    **KINDS,
}
_WIDTH, _HEIGHT, _LEFT, _TOP, _BOTTOM, _RIGHT = 720, 220, 64, 12, 40, 16
_MARKS: Final = 60
"""With more points than this, a line has no dots: they would hide it. So many places still tell their numbers."""


def time_bar(run: RunFacts) -> Markup:
    """One bar for the whole time of a run, divided by what it was spent on."""
    return bar([(key, words, seconds, f"{seconds:.3f} s") for key, words, seconds in parts(run)], "Where the time went")


def memory_bar(memory: Sequence[tuple[str, int]], limit: int | None) -> Markup:
    """The memory of a program, against that of the device if it is known."""
    used = [(kind, kind, float(count), size(count)) for kind, count in memory if kind != "reused" and count]
    return bar(used, "Memory of one device", limit)


def bar(pieces: Sequence[tuple[str, str, float, str]], label: str, limit: float | None = None) -> Markup:
    """A horizontal bar of pieces: a colour's key, words, a length and the length in words."""
    whole = max(limit or 0.0, sum(length for _, _, length, _ in pieces)) or 1.0
    x, drawn = 0.0, []
    for key, words, length, text in pieces:
        width = _WIDTH * length / whole
        drawn.append(
            Markup('<g><title>{}: {}</title><rect x="{:.2f}" y="0" width="{:.2f}" height="32" fill="{}"/></g>').format(
                words, text, x, width, COLOURS[key]
            )
        )
        x += width
    said = "; ".join(f"{words} {text}" for _, words, _, text in pieces)
    return Markup(
        '<svg class="bar" viewBox="0 0 {} 32" preserveAspectRatio="none" role="img" aria-label="{}: {}">'
        '<rect class="empty" width="{}" height="32"/>{}</svg>'
    ).format(_WIDTH, label, said, _WIDTH, Markup("").join(drawn))


def line(points: Sequence[tuple[float, float | None]], x_name: str, y_name: str) -> Markup:
    """A line through points. Where there is no number, the line has a gap."""
    known = [(x, y) for x, y in points if y is not None]
    if not known:
        return Markup("<p>{}: no numbers.</p>").format(y_name)
    across, up = _range([x for x, _ in points]), _range([y for _, y in known])
    xs, ys = _ticks(*across), _ticks(*up)
    inner, height = _WIDTH - _LEFT - _RIGHT, _HEIGHT - _TOP - _BOTTOM

    def at(x: float, y: float) -> tuple[float, float]:
        right, top = (x - xs[0]) / ((xs[-1] - xs[0]) or 1), (ys[-1] - y) / ((ys[-1] - ys[0]) or 1)
        return _LEFT + inner * right, _TOP + height * top

    drawn = [
        Markup('<path class="grid" d="M{} {:.1f}H{}"/><text class="y" x="{}" y="{:.1f}">{}</text>').format(
            _LEFT, at(xs[0], y)[1], _WIDTH - _RIGHT, _LEFT - 6, at(xs[0], y)[1] + 4, quantity(y)
        )
        for y in ys
    ]
    drawn += [
        Markup('<text class="x" x="{:.1f}" y="{}">{}</text>').format(at(x, ys[0])[0], _HEIGHT - 22, quantity(x))
        for x in xs
    ]
    path, pen = "", "M"
    for x, y in points:
        pen, path = ("M", path) if y is None else ("L", f"{path}{pen}{at(x, y)[0]:.1f} {at(x, y)[1]:.1f}")
    drawn.append(Markup('<path class="line" d="{}"/>').format(path))
    kind = "dot" if len(known) <= _MARKS else "hit"
    drawn += [
        Markup('<circle class="{}" cx="{:.1f}" cy="{:.1f}" r="{}"><title>{} {}: {}</title></circle>').format(
            kind, *at(x, y), 3.5 if kind == "dot" else 7, x_name, quantity(x), quantity(y)
        )
        for x, y in known[:: -(-len(known) // _MARKS)]
    ]
    drawn.append(Markup('<text class="x" x="{}" y="{}">{}</text>').format(_LEFT + inner / 2, _HEIGHT - 4, x_name))
    return Markup(
        '<figure tabindex="0"><figcaption>{}</figcaption><svg class="chart" viewBox="0 0 {} {}" role="img" '
        'aria-label="{} over {}: from {} to {}, between {} and {}">{}</svg></figure>'
    ).format(
        y_name,
        _WIDTH,
        _HEIGHT,
        y_name,
        x_name,
        *map(quantity, (known[0][1], known[-1][1], *up)),
        Markup("").join(drawn),
    )


def gantt(plan: PipelineFacts, measured: bool = False) -> Markup:
    """The table of a pipeline's schedule, as planned or with measured times.

    Its text is made of numbers and of the schedule's name, which is escaped.
    """
    times = costs_of(plan.measured) if measured and plan.measured is not None else None
    return Markup(svg(_table(plan), plan.schedule, times))


def schedule_text(plan: PipelineFacts) -> str:
    """The same table as text, for people who cannot see or point at the picture."""
    return str(_table(plan))


def _table(plan: PipelineFacts) -> Table:
    return Table.parse(plan.table, [stage.device for stage in plan.stages], plan.training, one_at_a_time=False)


def _range(values: Sequence[float]) -> tuple[float, float]:
    return min(values), max(values)


def _ticks(low: float, high: float) -> list[float]:
    """Round numbers that cover a range: about five of them."""
    if high <= low:
        high = low + (abs(low) or 1.0) * 0.1
    rough = (high - low) / 4
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [number * step for number in range(first, last + 1)]
