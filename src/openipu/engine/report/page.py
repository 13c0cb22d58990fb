"""report.html: one page that needs nothing else. The template escapes everything that is not a picture."""

from __future__ import annotations

import time
from functools import cache
from typing import TYPE_CHECKING

from openipu.engine.facts.values import COUNTED, Report, RunFacts
from openipu.engine.schedule.measures import duration

from .costs import texts_of
from .summary import quantity, size

if TYPE_CHECKING:
    from jinja2 import Environment, Template


def page(report: Report) -> str:
    """The text of the page."""
    return _template().render(report=report, counted=COUNTED, written=_date(report.written), texts=texts_of(report))


@cache
def _template() -> Template:
    from . import cost_pictures, costs, pictures, stages, summary

    environment = pages_of("openipu.engine.report")
    environment.filters["date"] = _date
    environment.globals |= {
        "pictures": pictures,
        "parts": summary.parts,
        "headline": summary.headline,
        "advice": summary.advice,
        "colours": pictures.COLOURS,
        "charts": _charts,
        "cost_pictures": cost_pictures,
        "kinds": cost_pictures.KINDS,
        "main_program": costs.main_program,
        "layer_rows": costs.layer_rows,
        "stage_rows": costs.stage_rows,
        "memory_rows": costs.memory_rows,
        "feed_rates": costs.feed_rates,
        "feed_words": costs.feed_words,
        "pipeline_times": stages.pipeline_times,
        "shares": stages.shares,
        "in_flight": stages.in_flight,
    }
    return environment.get_template("report.html")


def pages_of(package: str) -> Environment:
    """Reads the templates of a package. They escape everything, and every name in them must exist."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader(package),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"size": size, "quantity": quantity, "duration": duration}
    return environment


def _charts(run: RunFacts) -> list[tuple[str, list[tuple[float, float | None]]]]:
    """Each loss and metric of a run, over its steps."""
    names = dict.fromkeys(name for logged in run.logged for name in logged.values)
    return [(name, [(logged.step, logged.values.get(name)) for logged in run.logged]) for name in names]


def _date(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))
