"""`openipu report`: the summary of a report in the terminal, and two reports side by side."""

from __future__ import annotations

from itertools import zip_longest
from pathlib import Path
from typing import Final

from openipu import _validate as validate
from openipu.engine.facts.values import PipelineFacts, Report, RunFacts
from openipu.engine.report.files import PAGE, read
from openipu.engine.report.summary import Measure, advice, headline, measures, parts

from rich.console import Console
from rich.table import Table
from rich.text import Text

from .terminal import make_console

SAME: Final = 0.02
"""Numbers that differ by a smaller share are the same, for all that one measurement tells."""


def show(folder: Path, console: Console | None = None) -> None:
    """Print the summary of each run."""
    console = console or make_console()
    report = read(folder)
    _print(console, report.title, "bold")
    _state(console, report)
    for run in report.runs:
        console.print()
        _run(console, run)
    page = folder / PAGE if folder.is_dir() else folder.with_name(PAGE)
    console.print()
    _print(console, f"Page: {page}")


def compare(first: Path, second: Path, console: Console | None = None) -> None:
    """Print what differs between two reports, run by run."""
    console = console or make_console()
    before, after = read(first), read(second)
    for a, b in zip_longest(before.runs, after.runs):
        if a is None or b is None:
            run, where = (a, first) if b is None else (b, second)
            _print(console, f"{run.name} of {run.model}: only in {where}", "bold")
            continue
        _print(console, f"{a.name} of {a.model}, {b.name} of {b.model}" if _other(a, b) else _title(a), "bold")
        for line in changes(a, b):
            _print(console, f"  {line}", "yellow")
        console.print(_compared(a, b, str(first), str(second)))
        console.print()


def changes(a: RunFacts, b: RunFacts) -> list[str]:
    """What has changed in the plan, in words."""
    return [
        f"{name}: {before} -> {after}"
        for name, before, after in zip(("place", "pipeline"), _plan(a), _plan(b), strict=True)
        if before != after
    ]


def judgement(a: Measure, b: Measure) -> str:
    """How a number has changed, in words."""
    if a.value == b.value:
        return "same"
    if a.value == 0:
        return "new"
    change = b.value / a.value - 1
    if abs(change) < SAME:
        return "same"
    text = f"{100 * change:+.1f} %"
    if a.less_is_better is None:
        return text
    return f"{text}, {'better' if (change < 0) == a.less_is_better else 'worse'}"


def _compared(a: RunFacts, b: RunFacts, first: str, second: str) -> Table:
    table = Table(box=None, padding=(0, 3, 0, 0), header_style="bold")
    table.add_column("")
    for name in (first, second):
        table.add_column(Text(name), justify="right")
    table.add_column("change")
    later = {measure.name: measure for measure in measures(b)}
    for measure in measures(a):
        if (other := later.pop(measure.name, None)) is None:
            table.add_row(measure.name, measure.text(), "-", "")
            continue
        words = judgement(measure, other)
        style = "green" if words.endswith("better") else "red" if words.endswith("worse") else ""
        table.add_row(measure.name, measure.text(), other.text(), Text(words, style))
    for measure in later.values():
        table.add_row(measure.name, "-", measure.text(), "")
    return table


def _run(console: Console, run: RunFacts) -> None:
    _print(console, _title(run), "bold")
    if run.failure:
        _print(console, f"It failed: {run.failure}", "bold red")
    elif not run.ended:
        _print(console, "It had not ended when the report was written.", "bold red")
    table = Table(box=None, padding=(0, 3, 0, 0), show_header=False)
    for name, value in headline(run)[1:]:
        table.add_row(Text(name), Text(value))
    console.print(table)
    times = Table(box=None, padding=(0, 3, 0, 0), header_style="bold")
    times.add_column("where the time went")
    times.add_column("seconds", justify="right")
    times.add_column("share", justify="right")
    for _, words, seconds in parts(run):
        times.add_row(words, f"{seconds:.3f}", f"{100 * seconds / (run.seconds or 1):.1f} %")
    console.print(times)
    for words in (*advice(run), *run.warnings):
        _print(console, words, "yellow")


def _state(console: Console, report: Report) -> None:
    if report.failure:
        _print(console, f"The recording was ended by {report.failure}", "bold red")
    elif not report.ended:
        _print(console, "The report was written while the recording went on.", "bold red")
    if not report.runs:
        _print(console, "Nothing was run.")


def _plan(run: RunFacts) -> tuple[str, str]:
    place, pipeline = run.place, run.pipeline
    where = (
        "nothing launched"
        if place is None
        else f"{validate.counted(place.replicas, 'replica')} of {place.devices} x {place.device}, "
        f"effective batch {place.effective_batch} ({place.batch_size} x {place.accumulation} x {place.replicas})"
    )
    return where, _schedule(pipeline)


def _schedule(plan: PipelineFacts | None) -> str:
    if plan is None:
        return "none"
    return f"{plan.schedule}, {len(plan.stages)} stages, {plan.micro_batches} micro-batches, {plan.ticks} ticks"


def _title(run: RunFacts) -> str:
    return f"{run.name} of {run.model}"


def _other(a: RunFacts, b: RunFacts) -> bool:
    return (a.name, a.model) != (b.name, b.model)


def _print(console: Console, line: str, style: str = "") -> None:
    console.print(Text(line, style), soft_wrap=True)
