"""A table drawn as SVG: one row per device, time to the right, idle time left empty."""

from __future__ import annotations

import colorsys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from html import escape
from itertools import accumulate, pairwise
from typing import Final

from .actions import Action, Kind, Table
from .measures import Costs, Pace, bubble, durations, live_on_devices

_NAME: Final = "openipu-schedule"
"""The class of the picture."""
_SHADES: Final = 8
"""After this many micro-batches, the colours repeat."""
_LEFT, _RIGHT, _TOP, _ROW, _GAP, _BOTTOM = 84, 88, 56, 30, 6, 66
_WIDEST: Final = 30.0
_DIGIT: Final = 6.6
"""The width of one digit of a label."""
_STRIDES: Final = tuple(step * 10**power for power in range(9) for step in (1, 2, 5))
"""Possible numbers of ticks from one label to the next."""


@dataclass(frozen=True, slots=True)
class _Scale:
    """Where times and devices are in the picture."""

    edges: tuple[float, ...]
    """The time at which each tick starts, and the end."""
    unit: float
    """Pixels per unit of time."""
    rows: int

    @property
    def right(self) -> float:
        return self.x(self.edges[-1])

    @property
    def bottom(self) -> int:
        return self.y(self.rows) - _GAP

    def x(self, time: float) -> float:
        return _LEFT + time * self.unit

    def y(self, device: int) -> int:
        return _TOP + device * (_ROW + _GAP)


def svg(table: Table, title: str = "", costs: Pace | None = None, width: int = 1100) -> str:
    """The text of an SVG file about `width` pixels wide. Every action is drawn as long as it takes.

    >>> picture = ipu.schedules.svg(ipu.schedules.Grouped().table(stages=2, micro_batches=4), title="Grouped")
    >>> from pathlib import Path
    >>> written = Path("schedule.svg").write_text(picture)
    """
    costs = costs or Costs()
    edges = tuple(accumulate(durations(table, costs), initial=0.0))
    typical = costs.typical
    unit = min(_WIDEST / typical, max(3 / typical, (width - _LEFT - _RIGHT) / max(edges[-1], typical)))
    scale = _Scale(edges, unit, len(table.cells))
    parts = [*_heading(table, title, costs), *_axis(scale), *_rows(table, scale, costs), *_legend(table, scale)]
    wide, high = round(max(scale.right, _LEFT + 400) + _RIGHT), scale.bottom + _BOTTOM
    size = f"{table.stages} stages, {table.micro_batches} micro-batches, {table.ticks} ticks"
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" class="{_NAME}" width="{wide}" height="{high}" '
            f'viewBox="0 0 {wide} {high}" role="img" '
            f'aria-label="{escape(title or "Schedule")}: {size}">',
            f"<style>{_style()}</style>",
            '<rect width="100%" height="100%" fill="#fff"/>',
            *parts,
            "</svg>\n",
        ]
    )


def _style() -> str:
    rules = [
        "text{font:11px system-ui,sans-serif;fill:#333;text-anchor:middle}",
        ".t{font-size:15px;font-weight:600;fill:#111}",
        ".s{fill:#666}",
        ".l{text-anchor:start}",
        ".d{font-weight:600}",
        ".n text{fill:#111}",
        ".g{stroke:#d8d8de;stroke-width:1}",
        ".i{fill:#f1f1f4}",
        ".o rect{stroke:#111;stroke-width:1.6}",
    ]
    for shade in range(_SHADES):
        rules += [f".{kind.value}{shade}{{fill:{_colour(kind, shade)}}}" for kind in Kind]
    return "".join(f".{_NAME} {rule}" for rule in rules)  # inside a page, they must not reach beyond the picture


def _colour(kind: Kind, shade: int) -> str:
    """Blues for forwards and oranges for backwards. Neighbouring shades differ."""
    along = shade / (_SHADES - 1)
    if kind is Kind.FORWARD:
        hue, light, strength = 198 + 30 * along, 86 - 19 * along, 60 + 18 * along
    else:
        hue, light, strength = 46 - 28 * along, 82 - 16 * along, 90.0
    # As hexadecimal numbers, because some viewers draw other forms black.
    parts = colorsys.hls_to_rgb(hue / 360, light / 100, strength / 100)
    return "#" + "".join(f"{round(255 * part):02x}" for part in parts)


def _heading(table: Table, title: str, costs: Pace) -> Iterator[str]:
    what = (
        f"{table.stages} stages, {table.micro_batches} micro-batches, {table.ticks} ticks, "
        f"bubble {100 * bubble(table, costs):.1f} %"
    )
    pace = f" ({costs.assumption(table.training)})"
    yield f'<text class="t l" x="12" y="22">{escape(title or "Schedule")}</text>'
    yield f'<text class="s l" x="12" y="40">{what}{pace}</text>'


def _axis(scale: _Scale) -> Iterator[str]:
    for edge in dict.fromkeys(scale.edges):
        x = scale.x(edge)
        yield f'<path class="g" d="M{x:.1f} {_TOP - 4}V{scale.bottom + 4}"/>'
    y = scale.bottom + 17
    middles = {
        tick: scale.x((start + stop) / 2) for tick, (start, stop) in enumerate(pairwise(scale.edges)) if stop > start
    }
    stride = next(stride for stride in _STRIDES if _fits([tick for tick in middles if tick % stride == 0], middles))
    for tick, middle in middles.items():
        if tick % stride == 0:
            yield f'<text class="s" x="{middle:.1f}" y="{y}">{tick}</text>'
    yield f'<text class="s l" x="12" y="{y}">tick</text>'


def _fits(ticks: list[int], middles: Mapping[int, float]) -> bool:
    """Whether the numbers of these ticks fit next to each other."""
    return all(middles[b] - middles[a] > _DIGIT * (len(str(b)) + 1) for a, b in pairwise(ticks))


def _rows(table: Table, scale: _Scale, costs: Pace) -> Iterator[str]:
    held = live_on_devices(table)
    for device, row in enumerate(table.cells):
        y = scale.y(device)
        stages = [stage for stage, at in enumerate(table.devices) if at == device]
        names = "stage" + ("s " if len(stages) > 1 else " ") + ", ".join(map(str, stages)) if stages else "no stage"
        yield f'<text class="l d" x="12" y="{y + 13}">device {device}</text>'
        yield f'<text class="l s" x="12" y="{y + 26}">{names}</text>'
        yield f'<rect class="i" x="{_LEFT}" y="{y}" width="{scale.right - _LEFT:.1f}" height="{_ROW}"/>'
        yield from _actions(table, scale, costs, device)
        work = sum(costs.of(action) for cell in row for action in cell)
        right = f'class="l s" x="{scale.right + 8:.1f}"'
        yield f'<text {right} y="{y + 13}">busy {100 * work / (scale.edges[-1] or 1):.0f} %</text>'
        if table.training:
            yield f'<text {right} y="{y + 26}">holds {held[device]}</text>'


def _actions(table: Table, scale: _Scale, costs: Pace, device: int) -> Iterator[str]:
    shared = table.devices.count(device) > 1
    for tick, cell in enumerate(table.cells[device]):
        start = scale.edges[tick]
        for action in cell:
            corner = scale.x(start) + 0.5, scale.y(device)
            took = costs.words(action)
            about = f"{action}, tick {tick}" + (f", {took}" if took else "")
            yield _action(action, about, corner, max(0.5, costs.of(action) * scale.unit - 1), shared)
            start += costs.of(action)


def _action(action: Action, about: str, corner: tuple[float, int], width: float, shared: bool) -> str:
    x, y = corner
    label, stage = str(action.micro_batch), f"{action.kind.value}{action.stage}"
    follow = " o" if action.micro_batch == 0 else ""
    parts = [
        f'<g class="n{follow}"><title>{about}</title>',
        f'<rect class="{action.kind.value}{action.micro_batch % _SHADES}" x="{x:.1f}" y="{y}" width="{width:.1f}" '
        f'height="{_ROW}" rx="2"/>',
    ]
    lines = [stage, label] if shared else [label]
    if width >= _DIGIT * max(map(len, lines)) + 1:
        first = y + 19 - (6 if shared else 0)
        parts += [f'<text x="{x + width / 2:.1f}" y="{first + 12 * i}">{line}</text>' for i, line in enumerate(lines)]
    return "".join([*parts, "</g>"])


def _legend(table: Table, scale: _Scale) -> Iterator[str]:
    x, y = float(_LEFT), scale.bottom + 38
    names = {Kind.FORWARD: "forward", Kind.BACKWARD: "backward"}
    for kind in Kind if table.training else [Kind.FORWARD]:
        for shade in range(min(_SHADES, table.micro_batches)):
            yield f'<rect class="{kind.value}{shade}" x="{x:.0f}" y="{y}" width="9" height="12"/>'
            x += 9
        yield f'<text class="l" x="{x + 6:.0f}" y="{y + 10}">{names[kind]}</text>'
        x += 82
    yield f'<rect class="i" x="{x:.0f}" y="{y}" width="18" height="12"/>'
    yield f'<text class="l" x="{x + 24:.0f}" y="{y + 10}">idle</text>'
    yield f'<g class="o"><rect fill="#fff" x="{x + 66:.0f}" y="{y}" width="18" height="12" rx="2"/></g>'
    yield f'<text class="l" x="{x + 90:.0f}" y="{y + 10}">micro-batch 0</text>'
