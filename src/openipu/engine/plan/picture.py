"""Splits drawn as SVG: one bar each, as long as an update takes, divided by what the time is spent on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import fields
from html import escape
from typing import Final

from openipu.engine.schedule.measures import duration

from .values import Prediction, TimePlan

COLOURS: Final = {
    "work": "#0072b2",
    "bubble": "#d4d4da",
    "exchange": "#e69f00",
    "reduce": "#009e73",
    "update": "#cc79a7",
}
"""By part of the time, in colours that people with any kind of colour vision can tell apart."""
WORDS: Final = {
    "work": "forwards and backwards",
    "bubble": "waiting for other stages",
    "exchange": "transfers between stages",
    "reduce": "gradients of replicas",
    "update": "update of the weights",
}
_LEFT, _WIDTH, _ROW, _TOP = 250, 560, 26, 34


def svg(predictions: Sequence[Prediction], title: str) -> str:
    """The text of an SVG file."""
    longest = max(one.time.total for one in predictions)
    height = _TOP + _ROW * len(predictions) + 40
    rows = [part for number, one in enumerate(predictions) for part in _bar(number, one, _WIDTH / longest)]
    return "\n".join([
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_LEFT + _WIDTH + 110}" height="{height}" '
        f'viewBox="0 0 {_LEFT + _WIDTH + 110} {height}" role="img" aria-label="{escape(title)}">',
        '<rect width="100%" height="100%" fill="#fff"/>',
        '<g font-family="system-ui,sans-serif" font-size="12" fill="#333">',
        f'<text x="12" y="20" font-size="14" font-weight="600">{escape(title)}</text>',
        *rows, *_legend(height - 14), "</g>", "</svg>\n",
    ])  # fmt: skip


def parts(time: TimePlan) -> list[tuple[str, float]]:
    """The parts of the time that take any."""
    return [(field.name, seconds) for field in fields(time) if (seconds := getattr(time, field.name)) > 0]


def _bar(number: int, one: Prediction, scale: float) -> Iterator[str]:
    y, x = _TOP + _ROW * number, float(_LEFT)
    yield f'<text x="12" y="{y + 15}">{escape(str(one.split))}</text>'
    for name, seconds in parts(one.time):
        yield (
            f'<g><title>{WORDS[name]}: {duration(seconds)}</title><rect x="{x:.1f}" y="{y}" '
            f'width="{seconds * scale:.1f}" height="{_ROW - 6}" fill="{COLOURS[name]}"/></g>'
        )
        x += seconds * scale
    yield f'<text x="{x + 6:.1f}" y="{y + 15}">{duration(one.time.total)}</text>'


def _legend(y: int) -> Iterator[str]:
    x = 12
    for name, colour in COLOURS.items():
        yield f'<rect x="{x}" y="{y - 10}" width="12" height="12" fill="{colour}"/>'
        yield f'<text x="{x + 17}" y="{y}">{WORDS[name]}</text>'
        x += 30 + round(6.2 * len(WORDS[name]))
