"""Compiled executions of a model that is not pipelined: every replica has all of it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from openipu.engine.core.accumulation import Accumulation
from openipu.engine.core.enqueued import ignored
from openipu.engine.core.layer_costs import counted, joined, names_of, scaled
from openipu.engine.core.state import State, Step
from openipu.engine.core.state_layout import ReplicaLayout
from openipu.engine.core.trainer import Trainer
from openipu.engine.data.slab import Slab
from openipu.engine.devices.placement import Placement
from openipu.engine.facts.costs import Counted, Part
from openipu.engine.host_io.step_logs import StepLogs
from openipu.engine.types import Array, Tree

import jax
import jax.numpy as jnp

from .arrays import fetch, length, own_column, row
from .compile import Function
from .execution import Layout, run_execution
from .loop import Loop
from .loop_shape import prefers_known_length
from .outfeeds import Specs
from .remainder import Counts, Form, Job


class ReplicaLoop(Loop):
    """Runs slabs of data through a step on every replica."""

    def __init__(
        self,
        name: str,
        step: Step,
        place: Placement,
        accumulation: Accumulation,
        spread: ReplicaLayout,
        live: StepLogs | None = None,
    ) -> None:
        super().__init__(name, step.outcome, place, accumulation, live)
        self._step, self._spread = step, spread

    def _jobs(self, counts: Counts, slab: Slab) -> list[Job]:
        size = self._accumulation.steps
        whole, rest = counts.split(size)
        full = prefers_known_length(self._place.replicas.platform) and whole.steps // size == length(slab.body) // size
        jobs = [Job(Form("all" if full else "any"), whole)] if whole.steps else []
        return [*jobs, *Job.of_rest(rest, slab.tail)]

    def _execution(self, state: State, resident: Tree, body: Tree, job: Job, outfeeds: Specs) -> Function:
        replicas, axes = self._place.replicas, self._spread.axes(state)

        def first(state: State, resident: Tree, body: Tree) -> None:
            assert self._outcome.check is not None
            self._outcome.check(self._spread.own_part(state), fetch(resident, row(row(body, 0), 0)))

        if self._outcome.check is not None and not self.programs and not outfeeds:
            jax.make_jaxpr(replicas.program(first, (axes, None, 1), None))(state, resident, body)
        layout = Layout(job.form, replicas, self._accumulation, self._live, outfeeds)
        run = functools.partial(_on_replica, self._step, layout, self._spread)
        outputs = (1, None) if self._outcome.collect == "all" else None
        return replicas.program(run, (axes, None, 1, None, None), (outputs, axes))

    def _operations(self, state: State, resident: Tree, body: Tree) -> Counted:
        replicas, axes, step = self._place.replicas, self._spread.axes(state), self._step
        names = names_of(state)

        def traced(run: Callable[[State, Tree], Any], part: Part | None = None) -> Counted:
            def first(state: State, resident: Tree, body: Tree) -> Any:
                batch = fetch(resident, row(own_column(body), 0))
                with ignored():
                    result = run(self._spread.own_part(state), batch)
                return jax.tree.map(lambda a: jnp.asarray(a)[None], result)

            program = jax.make_jaxpr(replicas.program(first, (axes, None, 1), 0))(state, resident, body)
            return counted(program, names, part)

        def update(state: State, _batch: Tree) -> Any:
            assert step.update is not None
            # The weights stand in for their gradients, which have the same shapes.
            total = self._accumulation.add(self._accumulation.start(state.trainable), state.trainable, 0)
            return step.update(state, total)

        micro = traced(step.micro)
        if step.update is None:
            return micro
        return joined(micro, scaled(traced(update, "update"), 1 / self._accumulation.steps))


def make_replica_loop(
    name: str, step: Step, place: Placement, trainer: Trainer | None = None, live: StepLogs | None = None
) -> tuple[ReplicaLoop, ReplicaLayout]:
    """The loop for a step, and the layout of its state on the devices. Without a `trainer`, nothing is trained."""
    layout = ReplicaLayout(place.replicas) if trainer is None else trainer.layout
    accumulation = Accumulation() if trainer is None else trainer.accumulation
    return ReplicaLoop(name, step, place, accumulation, layout, live), layout


def _on_replica(
    step: Step,
    layout: Layout,
    spread: ReplicaLayout,
    state: State,
    resident: Tree,
    body: Tree,
    counts: Array,
    tail: Tree,
) -> tuple[Any, State]:
    """A program on one replica. Arrays that are split over replicas arrive with a replica axis of length one."""
    own = spread.own_part(state)
    value, new = run_execution(step, layout, own, resident, own_column(body), Counts.unpack(counts), tail)
    return value, spread.rejoin(new)
