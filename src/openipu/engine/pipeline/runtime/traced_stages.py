"""Traces stages for one shape of micro-batch, to learn what each of them receives, changes and keeps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from openipu.engine.core.enqueued import Enqueued
from openipu.engine.core.pipelining import Recompute
from openipu.engine.types import Tree

import jax
from jax.extend.core import Jaxpr

from .packing import Spec
from .stage_function import Arrays, Differentiated, StageContext, StageFunction, StageResults, differentiate
from .stage_layout import StageLayout


@dataclass(frozen=True, slots=True)
class TracedStage:
    """A stage, and what was learned from its trace."""

    function: StageFunction
    receives: tuple[Spec, ...]
    """The boundary into it; empty for the first stage."""
    changes: tuple[int, ...]
    """Positions in its own state that it changes. The rest, such as frozen weights, is only read."""
    derivative: Differentiated | None
    """None if nothing is trained."""
    enqueued: Enqueued
    """The shapes of what it enqueues into outfeeds."""

    @property
    def kept(self) -> tuple[Spec, ...]:
        """The arrays that it keeps between forward and backward."""
        return () if self.derivative is None else self.derivative.kept


def trace_stages(
    stages: Sequence[StageFunction], layout: StageLayout, context: StageContext, recompute: Recompute | None
) -> tuple[tuple[TracedStage, ...], Tree]:
    """The traced stages, and the shapes of the last one's results.

    Args:
        stages: The stages in their order.
        layout: Has the shapes of their variables.
        context: The shapes of the micro-batch, of the optimizer's common variables and of the metrics.
        recompute: What backwards compute again; None if nothing is trained.
    """
    weights, state = layout.weights.specs(), layout.state.specs()
    boundary: Arrays = []
    traced: list[TracedStage] = []
    for number, stage in enumerate(stages):
        last = number == len(stages) - 1
        values = [weights[i] for i in stage.weights]
        own = context._replace(state=[state[i] for i in stage.state], metrics=context.metrics if last else [])
        receives, derivative = tuple(map(Spec.of, boundary)), None
        if recompute is not None:
            # The last stage always keeps its values, because its backward follows right after its forward.
            again = Recompute.NOTHING if last else recompute
            derivative = differentiate(stage, values, boundary, own, again)
        closed, (boundary, results) = jax.make_jaxpr(stage.run, return_shape=True)(values, boundary, own)
        changes = _changes(closed.jaxpr, results, len(own.metrics), len(own.state))
        traced.append(TracedStage(stage, receives, changes, derivative, results.enqueued))
    return tuple(traced), results.result


def _changes(jaxpr: Jaxpr, results: StageResults, metrics: int, state: int) -> tuple[int, ...]:
    """Positions in a traced stage's state that it does not return unchanged.

    `state` and `metrics` are the numbers of the last arguments of the jaxpr.
    """
    old = jaxpr.invars[len(jaxpr.invars) - metrics - state : len(jaxpr.invars) - metrics]
    rest = len(jax.tree.leaves(results._replace(state=[])))
    new = jaxpr.outvars[len(jaxpr.outvars) - rest - state : len(jaxpr.outvars) - rest]
    return tuple(i for i, (a, b) in enumerate(zip(old, new, strict=True)) if a is not b)
