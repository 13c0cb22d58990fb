"""What a run comes down to: a few lines for people, numbers to compare runs by, and what could be better."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Final

from openipu.engine.facts.values import RunFacts, TimeParts

from .stages import costs_of, stage_advice

WAITS: Final = 0.1
"""Devices that wait longer than this share of the time are worth a word."""
PARTS: Final = {
    "device": "devices compute",
    "plan": "plan",
    "trace": "trace",
    "lower": "lower",
    "compile": "compile",
    "feed": "wait for data",
    "callbacks": "wait for callbacks",
    "state": "wait for the model's state",
    "checkpoint": "wait for checkpoints",
    "reporting": "wait for this report",
    "other": "other",
}
"""The parts of the time, in the words of a report."""


@dataclass(frozen=True, slots=True)
class Measure:
    """A number by which runs are compared."""

    name: str
    value: float
    unit: str
    less_is_better: bool | None
    """None if it is neither good nor bad."""

    def text(self) -> str:
        """The number and its unit."""
        if self.unit == "bytes":
            return size(int(self.value))
        if self.unit == "%":
            return f"{100 * self.value:.1f} %"
        return f"{quantity(self.value)} {self.unit}".strip()


def parts(run: RunFacts) -> list[tuple[str, str, float]]:
    """Where the time went: key, words and seconds of each part that took any."""
    return [
        (field.name, PARTS[field.name], seconds)
        for field in fields(TimeParts)
        if (seconds := getattr(run.parts, field.name)) > 0
    ]


def headline(run: RunFacts) -> list[tuple[str, str]]:
    """The first lines about a run."""
    lines = [("call", f"{run.name} of {run.model}")]
    place = run.place
    if place is not None:
        stages = f" x {len(run.pipeline.stages)} stages" if run.pipeline else ""
        count = place.replicas * place.devices
        lines.append(("devices", f"{count} x {place.device} ({place.platform})"))
        lines.append(("plan", f"{_many(place.replicas, 'replica')}{stages}"))
        if run.pipeline is not None:
            plan = run.pipeline
            lines.append(("schedule", f"{plan.schedule}, {plan.micro_batches} micro-batches, {plan.ticks} ticks"))
        if place.batch_size:
            factors = f"{place.batch_size} x {place.accumulation} accumulated x {_many(place.replicas, 'replica')}"
            lines.append(("effective batch", f"{place.effective_batch} samples ({factors})"))
    return lines + [(measure.name, measure.text()) for measure in measures(run)]


def measures(run: RunFacts) -> list[Measure]:
    """The numbers by which runs are compared."""
    return list(_measures(run))


def _measures(run: RunFacts) -> Iterator[Measure]:
    timed, place = run.timed, run.place
    if timed.seconds > 0 and timed.steps:
        if timed.samples:
            yield Measure("throughput", timed.samples / timed.seconds, "samples/s", False)
        yield Measure("time per step", 1e6 * timed.seconds / timed.steps, "µs", True)
    if run.first_step_seconds is not None:
        yield Measure("time to the first step", run.first_step_seconds, "s", True)
    yield Measure("whole time", run.seconds, "s", True)
    yield Measure("trace, lower, compile", run.parts.compiling, "s", True)
    yield Measure("launches", run.launches, "", None)
    yield Measure("steps", run.steps, "", None)
    running = run.seconds - run.parts.compiling
    if running > 0 and run.launches:
        yield Measure("devices compute", run.parts.device / running, "%", False)
        yield Measure("devices wait for data", run.parts.feed / running, "%", True)
        yield Measure("devices wait for callbacks", run.parts.callbacks / running, "%", True)
    if run.pipeline is not None:
        yield Measure("planned bubble", run.pipeline.bubble, "%", True)
        if run.pipeline.measured is not None:
            yield Measure("measured bubble", run.pipeline.measured.bubble, "%", True)
            yield Measure("stage balance", costs_of(run.pipeline.measured).balance(), "%", False)
    counted = [program.operations for program in run.programs if program.own and program.operations]
    if counted and place is not None:
        yield Measure("operations per step and device", max(counted), "", None)
        if timed.seconds > 0 and timed.steps:
            yield Measure("speed of a device", 1e-9 * max(counted) * timed.steps / timed.seconds, "GFLOP/s", False)
            if run.peak is not None:
                speed = max(counted) * run.peak.devices * timed.steps / timed.seconds
                yield Measure("share of the measured peak", speed / run.peak.operations_per_second, "%", False)
    needed = [_needed(program.memory.known()) for program in run.programs]
    if needed:
        yield Measure("memory of a device", max(needed), "bytes", True)


def _needed(memory: list[tuple[str, int]]) -> int:
    """The bytes that a program needs at one time: results that take the place of arguments count once."""
    return sum(-bytes if kind == "reused" else bytes for kind, bytes in memory)


def advice(run: RunFacts) -> list[str]:
    """What could be better, with a remedy for each."""
    found = []
    running = run.seconds - run.parts.compiling
    if running > 0 and run.launches > 1:
        if run.parts.feed > WAITS * running:
            found.append(
                f"The devices wait for data {100 * run.parts.feed / running:.0f} % of the time. Give arrays that fit "
                "on the device, prepare batches in parallel (tf.data or grain), or set a larger `prefetch_depth`."
            )
        if run.parts.callbacks > WAITS * running:
            found.append(
                f"The devices wait for callbacks {100 * run.parts.callbacks / running:.0f} % of the time. Use a larger "
                "`steps_per_execution`, or callbacks that do less in each batch."
            )
        if run.parts.checkpoint > WAITS * running:
            found.append(
                f"The devices wait for checkpoints {100 * run.parts.checkpoint / running:.0f} % of the time. Save less "
                "often."
            )
    return [*found, *stage_advice(run)]


def quantity(value: float) -> str:
    """A number with about four digits."""
    if value == int(value) and abs(value) < 1e6:
        return f"{int(value):,}"
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e9 else f"{value:.4g}"


def size(count: int) -> str:
    """A number of bytes, in a unit in which it is short."""
    amount = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(amount) < 1024:
            return f"{amount:.0f} {unit}" if unit == "B" else f"{amount:.1f} {unit}"
        amount /= 1024
    return f"{amount:.1f} TiB"


def _many(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
