"""What a report says about operations, bytes and memory: sums over the facts, ready to be shown."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from openipu.engine.facts.costs import PARTS, Cost
from openipu.engine.facts.values import ProgramFacts, Report, RunFacts

from markupsafe import escape

MOST_LAYERS: Final = 50
"""How many layers a page lists; the others are added up."""
MOST_TEXT: Final = 1_500_000
"""The most characters of programs in one page, after escaping. So it stays under 5 MB."""
OUTSIDE: Final = "outside of layers"


@dataclass(frozen=True, slots=True)
class LayerRow:
    """The costs of one layer, or of several that are added up."""

    name: str
    stage: int | None
    operations: tuple[float, float, float]
    """Of its forward, its backward and its update."""
    bytes: float

    @property
    def whole(self) -> float:
        """All operations."""
        return sum(self.operations)

    @property
    def intensity(self) -> float:
        """Operations per byte."""
        return self.whole / self.bytes if self.bytes else 0.0


def main_program(run: RunFacts) -> ProgramFacts | None:
    """The program of a run with the most operations, of those that have been counted."""
    counted = [program for program in run.programs if program.own and program.counted is not None]
    return max(counted, key=lambda program: program.operations or 0.0, default=None)


def layer_rows(run: RunFacts) -> list[LayerRow]:
    """The layers of a run, those with the most operations first."""
    program = main_program(run)
    costs = program.counted.costs if program is not None and program.counted is not None else ()
    rows = sorted(_rows(run, costs), key=lambda row: (-row.whole, -row.bytes))
    return [*rows[:MOST_LAYERS], *([_joined(rows[MOST_LAYERS:])] if rows[MOST_LAYERS:] else [])]


def stage_rows(run: RunFacts) -> list[LayerRow]:
    """The stages of a pipeline, each with the costs of its layers. What is in no layer is last."""
    program = main_program(run)
    if run.pipeline is None or program is None or program.counted is None:
        return []
    by_stage: dict[int, list[LayerRow]] = defaultdict(list)
    for row in _rows(run, program.counted.costs):
        by_stage[len(run.pipeline.stages) if row.stage is None else row.stage].append(row)
    return [
        LayerRow(
            OUTSIDE if stage == len(run.pipeline.stages) else f"stage {stage}", None, total.operations, total.bytes
        )
        for stage, rows in sorted(by_stage.items())
        if (total := _joined(rows))
    ]


def _rows(run: RunFacts, costs: tuple[Cost, ...]) -> Iterator[LayerRow]:
    by_layer: dict[str, list[Cost]] = defaultdict(list)
    for cost in costs:
        by_layer[cost.layer].append(cost)
    stages = {name: i for i, stage in enumerate(run.pipeline.stages if run.pipeline else ()) for name in stage.layers}
    for layer, some in by_layer.items():
        stage = next((stages[part] for part in layer.split("/") if part in stages), None)
        forward, backward, update = (sum(c.operations for c in some if c.part == part) for part in PARTS)
        yield LayerRow(layer or OUTSIDE, stage, (forward, backward, update), sum(c.bytes for c in some))


def _joined(rows: list[LayerRow]) -> LayerRow:
    forward, backward, update = (sum(row.operations[i] for row in rows) for i in range(3))
    name = f"{len(rows)} others"
    return LayerRow(name, None, (forward, backward, update), sum(row.bytes for row in rows))


def memory_rows(program: ProgramFacts) -> list[tuple[str, int]]:
    """What fills a device's memory when the program needs the most: kinds and their bytes, which add up."""
    memory, buffers = program.memory, program.buffers
    if buffers is None:
        return [(kind, size) for kind, size in memory.known() if kind != "reused"]
    peak = buffers.peak
    rows = [*buffers.arguments.items(), ("activations", peak.activations), ("gradients", peak.gradients)]
    rest = max((memory.temporary or 0) - peak.activations - peak.gradients, 0)
    new = max((memory.results or 0) - (memory.reused or 0), 0)
    rows += [("temporary", rest), ("results", new), ("program", memory.program or 0)]
    return [(kind, size) for kind, size in rows if size]


def texts_of(report: Report) -> list[list[str | None]]:
    """The texts that the page shows, by run and program; None for those shown before, and if there are too many."""
    left, shown = MOST_TEXT, set[str]()
    found: list[list[str | None]] = []
    for run in report.runs:
        found.append([])
        for program in run.programs:
            length = len(escape(program.hlo))
            fits = program.hlo not in shown and length <= left
            found[-1].append(program.hlo if fits else None)
            shown.add(program.hlo)
            left -= length if fits else 0
    return found


def feed_rates(run: RunFacts) -> list[tuple[str, str, float]]:
    """Samples per second that the host can build and that the devices can take: key, words and rate of each."""
    if not run.samples or not run.feed_seconds or not run.device_seconds:
        return []
    return [
        ("feed", "the host builds", run.samples / run.feed_seconds),
        ("device", "the devices take", run.samples / run.device_seconds),
    ]


def feed_words(run: RunFacts) -> str:
    """Who waits for whom."""
    rates = feed_rates(run)
    if not rates:
        return ""
    host, devices = rates[0][2], rates[1][2]
    if host >= devices:
        return f"The host builds batches {host / devices:.3g} times as fast as the devices take them."
    return f"The devices take batches {devices / host:.3g} times as fast as the host builds them, and wait for it."
