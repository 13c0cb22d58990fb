"""`openipu plan`: the best splits of a script's model over devices that need not be there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Final

from openipu.engine.core.pipelining import Pipelining
from openipu.engine.plan import picture
from openipu.engine.plan.counts import Counter
from openipu.engine.plan.first_fit import FirstFit, ScriptError, first_fit
from openipu.engine.plan.page import Plan, page
from openipu.engine.plan.search import Wanted, search
from openipu.engine.plan.speed import measured_speed
from openipu.engine.plan.units import parse, rate
from openipu.engine.plan.values import Machine, Prediction
from openipu.engine.report.summary import quantity, size
from openipu.engine.schedule.measures import duration
from openipu.engine.schedule.schedules import by_name

from rich.table import Table
from rich.text import Text

from .terminal import make_console

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["Options", "Plan", "ScriptError", "run"]

SHOWN: Final = 10
"""How many splits are shown."""


@dataclass(frozen=True, slots=True)
class Options:
    """The options of the command."""

    script: Path
    arguments: tuple[str, ...]
    devices: int
    memory: str | None = None
    link: str | None = None
    speed: str | None = None
    stages: int | None = None
    schedule: str | None = None
    effective_batch: int | None = None
    output: Path | None = None


def run(options: Options, console: Console | None = None) -> Plan:
    """Print the best splits, and draw them if requested."""
    console = console or make_console()
    memory = None if options.memory is None else int(parse("--memory", options.memory, "B"))
    link = None if options.link is None else parse("--link", options.link, "B/s")
    speed = None if options.speed is None else parse("--speed", options.speed, "FLOP/s")
    if options.schedule is not None:
        by_name(options.schedule)
    if options.output is not None and options.output.suffix not in (".html", ".svg"):
        raise ValueError(f"--output {options.output} has to end in .html (a page) or .svg (a picture).")
    found = first_fit(options.script, options.arguments)
    plan = make_plan(found, options, memory, link, speed)
    _print(console, plan, found)
    if options.output is not None:
        drawn = page(plan) if options.output.suffix == ".html" else picture.svg(plan.best, plan.title)
        options.output.write_text(drawn, encoding="utf-8")
        console.print(f"\nDrawn: {options.output}", soft_wrap=True)
    return plan


def make_plan(found: FirstFit, options: Options, memory: int | None, link: float | None, speed: float | None) -> Plan:
    """The best splits of what a script is about to train."""
    recompute = (found.options.pipelining or Pipelining()).recompute(found.place.recompute)
    cut_into = cache(Counter(found.model, found.batch, found.place, recompute).cut_into)
    measured = speed is None
    rate_of_one = measured_speed(found, cut_into(1)) if speed is None else speed
    machine = Machine(options.devices, rate_of_one, memory, link)
    count = micro_batches(found, options.effective_batch)
    wanted = Wanted(count, options.stages, options.schedule, found.options.updates.shard_optimizer)
    result = search(machine, wanted, cut_into)
    best = result.best[:SHOWN]
    return Plan(found.model.name, machine, measured, best, result.reasons, cut_into(best[0].split.stages))


def micro_batches(found: FirstFit, effective_batch: int | None) -> int:
    """Micro-batches of all replicas in one update."""
    if effective_batch is None:
        return found.micro_batches
    if effective_batch % found.batch_size:
        raise ValueError(
            f"--effective-batch is {effective_batch}, which is not a multiple of the script's batch size of "
            f"{found.batch_size}. Give a multiple of it."
        )
    return effective_batch // found.batch_size


def _print(console: Console, plan: Plan, found: FirstFit) -> None:
    machine, first = plan.machine, plan.best[0]
    how = "measured here with this model" if plan.measured else "given"
    lines = [
        f"{plan.model}: micro-batches of {found.batch_size} samples, effective batch {first.samples}",
        f"{machine.devices} devices of {rate(machine.speed, 'FLOP/s')} ({how}), "
        f"memory {'without limit' if machine.memory is None else size(machine.memory)}, "
        f"links {'that take no time' if machine.link is None else 'of ' + rate(machine.link, 'B/s')}",
    ]
    for line in lines:
        console.print(Text(line), soft_wrap=True)
    console.print()
    console.print(_table(plan.best))
    for reason in plan.reasons:
        console.print(Text(f"Not considered: {reason}", "yellow"), soft_wrap=True)


def _table(best: Sequence[Prediction]) -> Table:
    """The splits, narrow enough for a terminal of 80 columns."""
    table = Table(box=None, padding=(0, 1, 0, 0), header_style="bold")
    table.add_column("replicas x stages\nx accumulation", no_wrap=True)
    table.add_column("schedule", no_wrap=True)
    for name in ("update", "samples\nper s", "bubble", "bytes per\nstage link", "bytes per\nreplica", "memory"):
        table.add_column(name, justify="right", no_wrap=True)
    for one in best:
        split = one.split
        table.add_row(
            f"{split.replicas} x {split.stages} x {split.accumulation}", split.schedule or "-",
            duration(one.time.total), quantity(one.throughput), f"{100 * one.bubble:.1f} %", size(one.stage_bytes),
            size(one.replica_bytes), size(one.memory.total),
        )  # fmt: skip
    return table
