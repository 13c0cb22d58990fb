"""A plan as a page that needs nothing else. The template escapes everything that is not a picture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from openipu.engine.report.page import pages_of
from openipu.engine.schedule import picture as schedule_picture
from openipu.engine.schedule.measures import StageCosts
from openipu.engine.schedule.schedules import by_name

from .picture import svg
from .predict import table_costs
from .units import rate
from .values import Cut, Machine, Prediction

SHOWN = 4000
"""The most cells of a schedule that is drawn."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The best splits of a model, and what they rest on."""

    model: str
    machine: Machine
    measured: bool
    """Whether the speed was measured here."""
    best: Sequence[Prediction]
    reasons: Sequence[str]
    cut: Cut
    """That of the best split."""

    @property
    def title(self) -> str:
        """What it is about, in a line."""
        return f"{self.model} on {self.machine.devices} devices: replicas x stages x accumulation"


def page(plan: Plan) -> str:
    """The text of the page."""
    from markupsafe import Markup

    environment = pages_of("openipu.engine.plan")
    environment.filters["rate"] = rate
    gantt = schedule_of(plan)
    return environment.get_template("plan.html").render(
        plan=plan, machine=plan.machine, bars=Markup(svg(plan.best, plan.title)),
        gantt=None if gantt is None else Markup(gantt),
    )  # fmt: skip


def schedule_of(plan: Plan) -> str | None:
    """The schedule of the best split as SVG; None if it has no stages or is too long."""
    split, speed = plan.best[0].split, plan.machine.speed
    if split.stages == 1 or 2 * split.stages * (split.accumulation + split.stages) > SHOWN:
        return None
    stages = plan.cut.stages
    costs = StageCosts(
        tuple(s.forward / speed for s in stages), tuple(s.backward / speed for s in stages), source="predicted"
    )
    known = table_costs(split.schedule, costs, split.accumulation)
    costs = replace(costs, exchange=known.rounds / known.rows * plan.machine.transfer(plan.cut.boundary))
    table = by_name(split.schedule).table(split.stages, split.accumulation)
    return schedule_picture.svg(table, f"{split.schedule}, one of {split.replicas} replicas", costs)
