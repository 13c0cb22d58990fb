"""What is known about the stages of a pipeline, in words and numbers for people."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from openipu.engine.facts.values import MeasuredStages, PipelineFacts, RunFacts
from openipu.engine.schedule.measures import StageCosts, duration

BUBBLE: Final = 0.3
"""A larger share of the time in which devices wait is worth a word."""
BALANCE: Final = 0.7
"""So is a smaller balance."""


def costs_of(measured: MeasuredStages) -> StageCosts:
    """The measured times of a pipeline's actions."""
    return StageCosts(measured.forward, measured.backward, measured.exchange)


def shares(measured: MeasuredStages) -> list[float]:
    """The share of each stage in the work for one micro-batch."""
    times = costs_of(measured).of_stages()
    return [time / (sum(times) or 1.0) for time in times]


def update_seconds(run: RunFacts) -> float | None:
    """How long an update took in the run; None if nothing was timed."""
    timed, plan = run.timed, run.pipeline
    return None if plan is None or not timed.steps else plan.micro_batches * timed.seconds / timed.steps


def pipeline_times(run: RunFacts) -> list[tuple[str, str]]:
    """The measured times of a pipeline, as lines of a list."""
    return list(_times(run))


def _times(run: RunFacts) -> Iterator[tuple[str, str]]:
    plan, whole = run.pipeline, update_seconds(run)
    if plan is None or plan.measured is None:
        return
    measured = plan.measured
    yield "bubble, planned", f"{100 * plan.bubble:.1f} %"
    yield "bubble, by measured times", f"{100 * measured.bubble:.1f} %"
    balance = costs_of(measured).balance()
    yield "stage balance", f"{100 * balance:.0f} % (mean stage time / slowest stage time)"
    what = "an update" if plan.training else f"{plan.micro_batches} micro-batches"
    yield f"{what}, by measured times", duration(measured.seconds)
    if whole is not None:
        yield f"{what}, in the run", duration(whole)
    yield "exchange after a tick", duration(measured.exchange)
    if plan.training:
        yield "update of the weights", duration(measured.update)


def stage_advice(run: RunFacts) -> Iterator[str]:
    """What could be better in a pipeline, with a remedy for each."""
    plan = run.pipeline
    if plan is None:
        return
    if plan.bubble > BUBBLE:
        yield (
            f"By its schedule, each device of the pipeline waits {100 * plan.bubble:.0f} % of the time. Use more "
            f"micro-batches in an update than {plan.micro_batches}, or fewer stages than {len(plan.stages)}."
        )
    if plan.measured is not None and costs_of(plan.measured).balance() < BALANCE:
        part = shares(plan.measured)
        slowest = part.index(max(part))
        yield (
            f"Stage {slowest} does {100 * part[slowest]:.0f} % of the work, where {100 / len(part):.0f} % would be "
            f"even, and the others wait for it. Set the stages by hand, with fewer layers in stage {slowest}; or, if "
            f'you have done that, let `set_pipeline_stage_assignment("auto", stages={len(part)})` find a cut.'
        )


def in_flight(plan: PipelineFacts) -> list[tuple[int, int | None]]:
    """Per device, the most micro-batches between their forward and their backward, and the bytes that they take.

    The bytes are None if the stages have not been timed. With several stages, all count like the largest.
    """
    found: list[tuple[int, int | None]] = []
    for device, count in enumerate(plan.live):
        mine = [number for number, stage in enumerate(plan.stages) if stage.device == device]
        kept = None if plan.measured is None else max((plan.measured.kept[number] for number in mine), default=0)
        found.append((count, None if kept is None else count * kept))
    return found
