"""The loop over executions of a pipelined model, whose stages are spread over the devices of each replica."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from openipu.engine.core.accumulation import Accumulation
from openipu.engine.core.enqueued import Enqueued
from openipu.engine.core.layer_costs import counted, joined, scaled, without
from openipu.engine.core.pipelining import Pipelining
from openipu.engine.core.state import Outcome, Spot, State
from openipu.engine.data.slab import Slab
from openipu.engine.devices.placement import Placement
from openipu.engine.devices.replicas import REPLICA_AXIS
from openipu.engine.facts.costs import Counted, Part
from openipu.engine.facts.recorder import StageTiming
from openipu.engine.facts.values import MeasuredStages, PipelineFacts, StageFacts
from openipu.engine.host_io.step_logs import StepLogs
from openipu.engine.loop.arrays import fetch, length, own_column, row, rows_of, zeros
from openipu.engine.loop.compile import Function
from openipu.engine.loop.loop import Loop
from openipu.engine.loop.outfeeds import Outfeeds, Specs
from openipu.engine.loop.remainder import Counts, Form, Job
from openipu.engine.schedule.measures import live_on_devices, measure
from openipu.engine.schedule.table_arrays import TableArrays, compile_table
from openipu.engine.shapes import specs_of
from openipu.engine.types import Array, Tree

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from .stage_function import StageContext, StageFunction
from .stage_layout import StageLayout
from .stage_timing import TimedStages
from .staged_execution import StagedExecution, updated, watched
from .ticks import Pipeline, make_pipeline

LONGEST_TABLE = 4000
"""The most cells of a table that a report shows. Longer ones only repeat themselves."""


class StageLoop(Loop):
    """Runs slabs of data through the stages of a model."""

    def __init__(
        self,
        name: str,
        outcome: Outcome,
        place: Placement,
        spread: StageLayout,
        stages: tuple[StageFunction, ...],
        pipelining: Pipelining,
        live: StepLogs | None = None,
    ) -> None:
        accumulation = pipelining.updates.accumulation if pipelining.training else Accumulation()
        super().__init__(name, outcome, place, accumulation, live)
        self._spread, self._stages, self._pipelining = spread, stages, pipelining

    def _jobs(self, counts: Counts, slab: Slab) -> list[Job]:
        """Everything but a tail in one program, because an incomplete update needs no second copy of the stages."""
        everything = Form("any", turns=True)
        if slab.tail is None:
            return [Job(everything, counts)]
        whole, rest = counts.split(self._accumulation.steps)
        jobs = [Job(everything, whole)] if whole.steps else []
        return [*jobs, *Job.of_rest(rest, slab.tail)]

    def _execution(self, state: State, _resident: Tree, _body: Tree, job: Job, outfeeds: Specs) -> Function:
        replicas, specs = self._place.replicas, self._spread.specs(state)

        def run(state: State, resident: Tree, body: Tree, counts: Array, tail: Tree) -> tuple[Tree, State]:
            mine = own_column(body)
            own = self._spread.own_part(state)
            execution = self._staged(job.form, own, resident, mine, tail, outfeeds)
            value, new = execution.run(own, resident, mine, Counts.unpack(counts), tail)
            return value, self._spread.rejoin(new)

        value = (P(None, REPLICA_AXIS), P()) if self._outcome.collect == "all" else P()
        return jax.shard_map(
            run,
            mesh=replicas.mesh,
            in_specs=(specs, P(), P(None, REPLICA_AXIS), P(), P()),
            out_specs=(value, specs),
            check_vma=False,
        )

    def _operations(self, state: State, resident: Tree, body: Tree) -> Counted:
        """Costs per micro-batch. The operations are those of one device: its share of all stages, and of the update.

        The traced loop over ticks contains every stage once, whatever the number of ticks. So a trace counts one
        micro-batch.
        """
        replicas, specs = self._place.replicas, self._spread.specs(state)

        def traced(run: Callable[[State, Tree, Tree], Tree], part: Part | None = None) -> Counted:
            on_all = jax.shard_map(
                run, mesh=replicas.mesh, in_specs=(specs, P(), P(None, REPLICA_AXIS)), out_specs=P(), check_vma=False
            )
            return counted(jax.make_jaxpr(on_all)(state, resident, body), (), part)

        def execution(state: State, resident: Tree, body: Tree) -> Tree:
            own, mine = self._spread.own_part(state), own_column(body)
            counts = Counts(*map(jnp.asarray, (0, length(mine), 0)))
            staged = self._staged(Form("any", turns=True), own, resident, mine, None)
            staged = replace(staged, full=replace(staged.full, as_written=True))
            return staged.run(own, resident, mine, counts, None)

        def update(state: State, _resident: Tree, _body: Tree) -> State:
            own = self._spread.own_part(state)
            total = self._spread.weights.packing.zeros(dtype=self._accumulation.dtype)
            return updated(self._spread, own, total)

        whole = traced(execution)
        if self._spread.update is not None:  # each device updates its own weights
            last = traced(update, "update")
            whole = joined(without(whole, last), scaled(last, replicas.each / self._accumulation.steps))
        return replace(whole, operations=whole.operations / replicas.each)

    def pipeline_facts(self, steps: int) -> PipelineFacts:
        """The plan of the pipeline. Without training, it depends on the number of steps in a slab."""
        pipelining, specs = self._pipelining, self._spread.weights.specs()
        table = pipelining.table(steps)
        measures = measure(table)
        stages = tuple(
            StageFacts(device, stage.layers, sum(math.prod(specs[n].shape) for n in stage.weights))
            for device, stage in zip(pipelining.devices, self._stages, strict=True)
        )
        short = table.ticks * len(table.cells) <= LONGEST_TABLE
        rows = tuple(" ".join(",".join(map(str, cell)) or "-" for cell in row) for row in table.cells) if short else ()
        return PipelineFacts(
            type(pipelining.schedule).__name__, stages, table.micro_batches, table.ticks, measures.bubble,
            live_on_devices(table), table.training, rows,
        )  # fmt: skip

    def stage_timing(self, state: State, resident: Tree, body: Tree) -> StageTiming | None:
        """How to time the stages after the run. Not with several instances, which would have to do it together."""
        if self._place.compile_only or not self._place.replicas.is_local:
            return None
        return partial(self._timed, *specs_of((state, resident, body)))

    def _timed(self, state: State, resident: Tree, body: Tree) -> MeasuredStages:
        """The times of all actions, for a state and data of these shapes."""
        table = self._pipelining.table(length(body))
        arrays = compile_table(table)
        batch = jax.eval_shape(lambda r, b: fetch(r, row(row(b, 0), 0)), resident, body)
        make = partial(self._pipeline, arrays)
        return TimedStages(f"{self._name}_stages", self._place, self._spread, table, arrays, make).measure(state, batch)

    def _staged(
        self, form: Form, state: State, resident: Tree, body: Tree, tail: Tree, outfeeds: Specs | None = None
    ) -> StagedExecution:
        """The execution, made from the shapes of what one device has."""
        pipelining = self._pipelining
        table = compile_table(pipelining.table(length(body)))
        batch = jax.eval_shape(lambda r, b: fetch(r, row(b, 0)), resident, body)
        if self._outcome.check is not None and not self.programs and not outfeeds:
            self._outcome.check(zeros(self._spread.whole(state)), zeros(batch))
        full, result = self._pipeline(table, state, batch)
        enqueued = [stage.enqueued for stage in full.stages]
        if self._spread.update is not None:
            total = self._spread.weights.packing.zeros(dtype=self._accumulation.dtype)
            enqueued.append(jax.eval_shape(partial(watched, self._spread), state, total))
        Outfeeds(outfeeds, self._place.replicas).foresee(Enqueued.joined(enqueued).specs())
        small, small_result = None, None
        if tail is not None:
            count = self._place.replicas.count
            spot = Spot(jnp.int32(0), count * rows_of(row(body, 0))) if count > 1 else None
            small, small_result = self._pipeline(
                compile_table(pipelining.single_table()), state, jax.eval_shape(fetch, resident, tail), spot
            )
        count = pipelining.updates.steps if pipelining.training else int(table.forward.micro_batch.max()) + 1
        if form == Form():
            result = None
        results = (result, small_result)
        return StagedExecution(form, self._outcome, self._spread, full, small, count, results, self._live, outfeeds)

    def _pipeline(
        self, table: TableArrays, state: State, batch: Tree, spot: Spot | None = None
    ) -> tuple[Pipeline, Tree]:
        """The pipeline for one table and one shape of micro-batch, and the shapes of the last stage's results."""
        spread = self._spread
        common, active = spread.slots(state)[1], jax.ShapeDtypeStruct((), bool)
        context = StageContext(batch, specs_of(common), active, [], specs_of(state.metrics), spot)
        recompute = self._pipelining.recompute(self._place.recompute)
        return make_pipeline(table, self._stages, spread, self._accumulation, context, recompute)
