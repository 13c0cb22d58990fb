"""Compiled executions of a model whose stages are spread over the devices of each replica."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from openipu.engine.core.accumulation import Accumulation
from openipu.engine.core.operation_count import operations
from openipu.engine.core.state import Outcome, State
from openipu.engine.core.update_rules import round_up
from openipu.engine.data.slab import Slab
from openipu.engine.devices.placement import Placement
from openipu.engine.devices.replicas import REPLICA_AXIS
from openipu.engine.host_io.step_logs import StepLogs
from openipu.engine.loop.arrays import fetch, length, own_column, row, zeros
from openipu.engine.loop.compile import Function
from openipu.engine.loop.loop import Loop
from openipu.engine.loop.remainder import Counts
from openipu.engine.schedule.schedules import Schedule, Sequential
from openipu.engine.schedule.table_arrays import TableArrays, compile_table

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from .stage_function import Around, Recompute, StageFunction, specs_of
from .stage_layout import StageLayout
from .staged_execution import StagedExecution, updated
from .ticks import Pipeline, make_pipeline

Tree = Any


@dataclass(frozen=True, slots=True)
class Staging:
    """How a model is spread over stages: what each of them computes, on which device, in which order."""

    stages: tuple[StageFunction, ...]
    schedule: Schedule
    devices: tuple[int, ...]
    """The device of each stage."""
    micro_batches: int | None
    """Those of one update; None outside of training, where a table takes all of an execution."""
    recompute: Recompute

    def table(self, steps: int) -> TableArrays:
        """The table for one update, or for at least so many steps where nothing is trained."""
        training = self.micro_batches is not None
        count = self.micro_batches or round_up(steps, self._multiple())
        return compile_table(self.schedule.table(len(self.stages), count, self.devices, training))

    def single(self) -> TableArrays:
        """The table for one micro-batch."""
        training = self.micro_batches is not None
        return compile_table(Sequential().table(len(self.stages), 1, self.devices, training))

    def _multiple(self) -> int:
        overlap = getattr(self.schedule, "overlap", None)
        return overlap(len(self.stages), self.devices, False) if overlap else 1


class StageLoop(Loop):
    """Runs slabs of data through the stages of a model."""

    def __init__(
        self,
        name: str,
        outcome: Outcome,
        place: Placement,
        accumulation: Accumulation,
        spread: StageLayout,
        staging: Staging,
        live: StepLogs | None = None,
    ) -> None:
        super().__init__(name, outcome, place, accumulation, live)
        self._spread, self._staging = spread, staging

    def _execution(self, state: State, _resident: Tree, _slab: Slab) -> Function:
        replicas, specs = self._place.replicas, self._spread.specs(state)

        def run(state: State, resident: Tree, body: Tree, counts: Any, tail: Tree) -> tuple[Any, State]:
            mine = own_column(body)
            own = self._spread.own_part(state)
            execution = self._staged(own, resident, mine, tail)
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

    def _operations(self, state: State, resident: Tree, body: Tree) -> float:
        """Those of a micro-batch in all stages, divided by the devices, and each device's share of its update.

        In the program's loop over ticks there is every stage once, and how often it runs is not known to it.
        """
        replicas, specs = self._place.replicas, self._spread.specs(state)

        def traced(run: Callable[[State, Tree, Tree], Any]) -> float:
            on_all = jax.shard_map(
                run, mesh=replicas.mesh, in_specs=(specs, P(), P(None, REPLICA_AXIS)), out_specs=P(), check_vma=False
            )
            return operations(jax.make_jaxpr(on_all)(state, resident, body))

        def execution(state: State, resident: Tree, body: Tree) -> Any:
            own, mine = self._spread.own_part(state), own_column(body)
            counts = Counts(*(jnp.asarray(count) for count in (length(mine), 0, False)))
            staged = self._staged(own, resident, mine, None)
            staged = replace(staged, full=replace(staged.full, as_written=True))
            return staged.run(own, resident, mine, counts, None)

        def update(state: State, _resident: Tree, _body: Tree) -> Any:
            own = self._spread.own_part(state)
            total = self._spread.weights.packing.zeros(dtype=self._accumulation.dtype)
            return updated(self._spread, own, total)

        whole = traced(execution)
        last = traced(update) if self._spread.update is not None else 0.0
        return (whole - last) / replicas.each + last / self._accumulation.steps

    def _staged(self, state: State, resident: Tree, body: Tree, tail: Tree) -> StagedExecution:
        """Everything that is known before compiling, from the shapes of what one device has."""
        staging = self._staging
        table = staging.table(length(body))
        batch = jax.eval_shape(lambda r, b: fetch(r, row(b, 0)), resident, body)
        if self._outcome.check is not None:
            self._outcome.check(zeros(self._spread.whole(state)), zeros(batch))
        full, result = self._pipeline(table, state, batch)
        small, small_result = None, None
        if tail is not None:
            small, small_result = self._pipeline(staging.single(), state, jax.eval_shape(fetch, resident, tail))
        count = staging.micro_batches or int(table.forward.micro_batch.max()) + 1
        return StagedExecution(self._outcome, self._spread, full, small, count, (result, small_result), self._live)

    def _pipeline(self, table: TableArrays, state: State, batch: Tree) -> tuple[Pipeline, Tree]:
        replicas, spread = self._place.replicas, self._spread
        common, active = spread.slots(state)[1], jax.ShapeDtypeStruct((), bool)
        around = Around(batch, specs_of(common), active, [], specs_of(state.metrics))
        return make_pipeline(
            table,
            self._staging.stages,
            spread.weights,
            spread.state,
            self._accumulation,
            around,
            recompute=self._staging.recompute,
            replicas=replicas,
        )
