"""Stages for one shape of micro-batch: traced one after another, to learn what each receives, changes and keeps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from openipu.engine.core.pipelining import Recompute
from openipu.engine.types import Tree

import jax

from .packing import Spec
from .stage_function import Differentiated, StageContext, StageFunction, StageResults, differentiate
from .stage_layout import StageLayout


@dataclass(frozen=True, slots=True)
class TracedStage:
    """A stage, and what its trace shows."""

    function: StageFunction
    receives: tuple[Spec, ...]
    """The boundary into it; nothing for the first stage."""
    changes: tuple[int, ...]
    """Which of its own state it changes; the rest, such as frozen weights, is only read."""
    derivative: Differentiated | None
    """None where nothing is trained."""

    @property
    def kept(self) -> tuple[Spec, ...]:
        """What it keeps between forward and backward."""
        return () if self.derivative is None else self.derivative.kept


def trace_stages(
    stages: Sequence[StageFunction], layout: StageLayout, context: StageContext, recompute: Recompute | None
) -> tuple[tuple[TracedStage, ...], Tree]:
    """The traced stages, and the shapes of the last one's results.

    Args:
        stages: What to trace.
        layout: Has the shapes of their variables.
        context: The shapes of the micro-batch, of the optimizer's common variables and of the metrics.
        recompute: What backwards compute again; None where nothing is trained.
    """
    weights, state = layout.weights.specs(), layout.state.specs()
    boundary: list[Any] = []
    traced: list[TracedStage] = []
    for number, stage in enumerate(stages):
        last = number == len(stages) - 1
        values = [weights[i] for i in stage.weights]
        own = context._replace(state=[state[i] for i in stage.state], metrics=context.metrics if last else [])
        receives, derivative = tuple(map(Spec.of, boundary)), None
        if recompute is not None:
            # The last stage keeps its values in any case: it goes back as soon as it has gone forward.
            again = Recompute.NOTHING if last else recompute
            derivative = differentiate(stage, values, boundary, own, again)
        closed, (boundary, results) = jax.make_jaxpr(stage.run, return_shape=True)(values, boundary, own)
        changes = _changes(closed.jaxpr, results, len(own.metrics), len(own.state))
        traced.append(TracedStage(stage, receives, changes, derivative))
    return tuple(traced), results.result


def _changes(jaxpr: Any, results: StageResults, metrics: int, state: int) -> tuple[int, ...]:
    """Which parts of a traced stage's state are not just handed on. State and metrics are its last arguments."""
    old = jaxpr.invars[len(jaxpr.invars) - metrics - state : len(jaxpr.invars) - metrics]
    rest = len(jax.tree.leaves((results.metrics, results.result)))
    new = jaxpr.outvars[len(jaxpr.outvars) - rest - state : len(jaxpr.outvars) - rest]
    return tuple(i for i, (a, b) in enumerate(zip(old, new, strict=True)) if a is not b)
