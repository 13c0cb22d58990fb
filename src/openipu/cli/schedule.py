"""`openipu schedule`: the table of a schedule, its bubble, its memory, and a picture."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from openipu import schedules

from rich.console import Console
from rich.table import Table as Columns
from rich.text import Text

from .terminal import make_console

_MOST_STAGES: Final = 128
_MOST_ACTIONS: Final = 20_000
_MOST_CELLS: Final = 200_000
_ACTION: Final = re.compile(r"([FB])\d+:(\d+)")
_COLOURS: Final = {"F": (117, 75, 69, 33), "B": (222, 215, 208, 202)}
"""Terminal colours (of 256) by micro-batch: blue for forward passes, orange for backward passes."""


@dataclass(frozen=True, slots=True)
class Options:
    """The options of the command."""

    name: str
    stages: int
    micro_batches: int
    devices: str | None
    training: bool
    svg: Path | None


def run(options: Options, console: Console | None = None) -> None:
    """Print everything about one table, and write a picture if requested."""
    console = console or make_console()
    schedule = schedules.by_name(options.name)
    devices = None if options.devices is None else parse_devices(options.devices)
    check_size(schedule, options, devices)
    table = schedules.validate(schedule.table(options.stages, options.micro_batches, devices, options.training))
    # Lines in a file or a pipe are not cut, so that other programs can read them.
    for line in schedules.render(table, width=console.width if console.is_terminal else None):
        console.print(coloured(line) if console.color_system else Text(line), soft_wrap=True)
    console.print()
    console.print(_summary(table), soft_wrap=True)
    console.print()
    console.print(_by_device(table))
    if options.svg is not None:
        title = type(schedule).__name__ + ("" if options.training else ", inference")
        options.svg.write_text(schedules.svg(table, title), encoding="utf-8")
        console.print(f"\nPicture: {options.svg}", soft_wrap=True)


def check_size(schedule: schedules.Schedule, options: Options, devices: Sequence[int] | None) -> None:
    """Raise if a table is too large to be made and read within a second or two. It would only repeat itself."""
    stages, micro_batches = options.stages, options.micro_batches
    rows = max(devices or [stages - 1]) + 1
    if max(stages, rows) > _MOST_STAGES:
        raise ValueError(
            f"A table of {stages} stages on {rows} devices is too large to show. Use at most {_MOST_STAGES} of each."
        )
    actions = stages * micro_batches * (2 if options.training else 1)
    if actions > _MOST_ACTIONS or _cells(schedule, options, devices, rows, actions) > _MOST_CELLS:
        raise ValueError(
            f"{stages} stages and {micro_batches} micro-batches make a table of {actions} actions, which is too large "
            "to show. Use fewer micro-batches: the pattern repeats."
        )


def _cells(
    schedule: schedules.Schedule, options: Options, devices: Sequence[int] | None, rows: int, actions: int
) -> int:
    """About how many cells a table has, empty ones included."""
    if isinstance(schedule, schedules.Grouped | schedules.Interleaved | schedules.Sequential):
        return rows * actions // schedule.overlap(options.stages, devices, options.training)
    return actions


def parse_devices(text: str) -> list[int]:
    """The device of each stage, from a comma-separated list."""
    try:
        return [int(device) for device in text.split(",")]
    except ValueError:
        raise ValueError(
            f"--devices {text} is not a list of devices. Give the device of each stage: --devices 0,1,1,0"
        ) from None


def coloured(line: str) -> Text:
    """A line of a table, with each action in the colour of its kind and micro-batch."""
    text = Text(line, style="bold" if line.startswith("tick") else "")
    for found in _ACTION.finditer(line):
        colours = _COLOURS[found[1]]
        text.stylize(f"color({colours[int(found[2]) % len(colours)]})", *found.span())
    return text


def _summary(table: schedules.Table) -> str:
    measures = schedules.measure(table)
    pace = "a forward takes 1, a backward 2" if table.training else "a forward takes 1"
    return f"{measures.ticks} ticks, time {measures.time:g} ({pace}), bubble {100 * measures.bubble:.1f} %"


def _by_device(table: schedules.Table) -> Columns:
    columns = Columns(box=None, padding=(0, 3, 0, 0), header_style="bold")
    for name in ("device", "stages", "busy", *(("live", "stash") if table.training else ())):
        columns.add_column(name, justify="left" if name == "stages" else "right")
    costs, stash = schedules.Costs(), schedules.stash(table)
    whole = schedules.total_time(table, costs)
    for device, held in enumerate(schedules.live_on_devices(table)):
        stages = [stage for stage, at in enumerate(table.devices) if at == device]
        busy = sum(costs.of(action) for cell in table.cells[device] for action in cell) / whole
        kept = "+".join(str(stash[stage]) for stage in stages) or "-"
        memory = (str(held), kept) if table.training else ()
        columns.add_row(str(device), ", ".join(map(str, stages)) or "-", f"{100 * busy:.0f} %", *memory)
    return columns
