"""`openipu schedule`: the table of a schedule, its bubble, its memory, and a picture."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from openipu import schedules

from rich.console import Console
from rich.table import Table as Columns
from rich.text import Text

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
    console = console or Console(highlight=False)
    schedule = schedules.by_name(options.name)
    devices = None if options.devices is None else parse_devices(options.devices)
    table = schedules.validate(schedule.table(options.stages, options.micro_batches, devices, options.training))
    # Lines in a file or a pipe are not cut, so that other programs can read them.
    for line in schedules.render(table, width=console.width if console.is_terminal else None):
        console.print(coloured(line), soft_wrap=True)
    console.print()
    console.print(_summary(table), soft_wrap=True)
    console.print()
    console.print(_by_device(table))
    if options.svg is not None:
        title = type(schedule).__name__ + ("" if options.training else ", inference")
        options.svg.write_text(schedules.svg(table, title), encoding="utf-8")
        console.print(f"\nPicture: {options.svg}", soft_wrap=True)


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
