"""The ticks of a schedule as one loop of a compiled program, the same on every device.

In each row of the compiled table (schedule/table_arrays.py), a device runs its forwards and then its backwards. Then
all devices exchange what they have to send. Conditionals, one per stage and kind, choose what a device does. Each of
them returns only what it writes, so that XLA changes the large buffers in place instead of copying them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from openipu.engine.convolution import rewrite
from openipu.engine.convolution.arrays import computed_once
from openipu.engine.core.accumulation import Accumulation
from openipu.engine.core.enqueued import IN_STAGES, refused
from openipu.engine.core.pipelining import Recompute
from openipu.engine.devices.replicas import STAGE_AXIS, Replicas
from openipu.engine.loop.arrays import is_float, row
from openipu.engine.loop.replica_state import mean_where_changed
from openipu.engine.schedule.table_arrays import ActionArrays, TableArrays
from openipu.engine.shapes import has_gradient
from openipu.engine.types import Array, Scalar, Tree

import jax
import jax.numpy as jnp
from jax import lax

from .mailbox import Mailbox, Vectors
from .packing import Buffers, Packing, Slot, pack, used
from .stage_function import StageContext, StageFunction, StageResults
from .stage_layout import StageLayout
from .table_rows import TableRow, exchange, rows_needed, rows_of
from .tick_state import Boxes, Fixed, Flow, Tick, TickState, Writes
from .traced_stages import TracedStage, trace_stages
from .variable_store import Store


@dataclass(frozen=True, slots=True)
class Pipeline:
    """Stages that are traced for one shape of micro-batch, and the table they follow."""

    table: TableArrays
    stages: tuple[TracedStage, ...]
    weights: Store
    state: Store
    mail: Mailbox
    residuals: Packing
    """One group per stage, and one row per slot."""
    accumulation: Accumulation
    replicas: Replicas
    as_written: bool = False
    """Whether convolutions are not rewritten, so that operations can be counted."""

    @property
    def last(self) -> int:
        """The number of the last stage."""
        return len(self.stages) - 1

    @property
    def training(self) -> bool:
        """Whether there are backwards."""
        return self.table.backward is not None

    # --- the loop

    def boxes(self) -> Boxes:
        """Memory for what is in flight on one device."""
        table = self.table
        residuals = self.residuals.zeros(max(1, table.residual_slots)) if self.training else {}
        return Boxes(self.mail.empty(table.trash + 1), self.mail.empty(table.rounds), residuals)

    def run(
        self, weights: Buffers, optimizer: list[Array], carry: TickState, flow: Flow, boxes: Boxes
    ) -> tuple[TickState, Boxes]:
        """Run micro-batches through all stages. Returns what they have changed, and the boxes for the next run."""
        fixed = Fixed(lax.axis_index(STAGE_AXIS), weights, optimizer, flow)
        rows = jax.tree.map(jnp.asarray, rows_of(self.table))
        needed = jnp.asarray(rows_needed(self.table))
        return self.follow(lambda number: row(rows, number), needed[flow.most], fixed, carry, boxes)

    def follow(
        self, row_at: Callable[[Array], TableRow], count: Array, fixed: Fixed, carry: TickState, boxes: Boxes
    ) -> tuple[TickState, Boxes]:
        """Run `count` rows: `row_at(number)` is row number `number`."""

        def tick(number: Array, live: Tick) -> Tick:
            now = row_at(number)
            for stage in range(len(self.stages)):
                live = self._forward(stage, now.forward, fixed, live)
            if now.backward is not None:
                for stage in reversed(range(len(self.stages))):
                    live = self._backward(stage, now.backward, fixed, live)
            return live._replace(mailbox=exchange(self.table, now, fixed.me, live.mailbox, live.outbox))

        done: Tick = lax.fori_loop(0, count, tick, Tick(carry, *boxes))
        return done.carry, Boxes(done.mailbox, done.outbox, done.residuals)

    def _forward(self, stage: int, actions: ActionArrays, fixed: Fixed, live: Tick) -> Tick:
        """Run the forward of a stage, on the stage's device and if it is due."""
        traced, device, flow = self.stages[stage], self.table.devices[stage], fixed.flow
        function, m = traced.function, actions.micro_batch[stage]
        weight_slots = self.weights.slots(device, function.weights)
        state_slots = self.state.slots(device, function.state)
        changing_slots = [state_slots[i] for i in traced.changes]
        writes: Writes = {"state": used(live.carry.state, changing_slots)}
        if self.training:
            writes["residuals"] = used(live.residuals, self.residuals.slots[stage])
        if stage == self.last:
            writes |= {"metrics": live.carry.metrics, "kept": live.carry.kept}
        else:
            writes |= self._box(stage, stage + 1, live)
        if traced.enqueued.outfeeds:
            writes["cells"] = live.carry.kept.cells

        def run(writes: Writes) -> Writes:
            active = m < flow.mine
            boundary = self.mail.get(writes.get("mailbox", live.mailbox), actions.input[stage], traced.receives)
            state = self.state.packing.read(live.carry.state | writes["state"], state_slots)
            context = StageContext(flow.batch(m), fixed.optimizer, active, state, writes.get("metrics", []), flow.spot)
            values = self.weights.packing.read(fixed.weights, weight_slots)
            if traced.derivative is not None:
                out, results, kept = self._fast(traced.derivative.forward)(values, boundary, context)
                writes["residuals"] = self._keep(writes["residuals"], stage, kept, actions.residual[stage])
            else:
                out, results = self._fast(function.run)(values, boundary, context)
            new = self._if_active(results, context, flow.whole, traced.changes)
            writes["state"] = self.state.packing.write(writes["state"], changing_slots, new.state)
            if "cells" in writes:
                writes["cells"] = flow.put(writes["cells"], m, new.enqueued)
            if stage == self.last:
                metrics = _like(new.metrics, writes["metrics"])
                return writes | {"metrics": metrics, "kept": flow.keep(writes["kept"], m, new.result, active, metrics)}
            return writes | self._send(writes, actions, stage, out)

        return live.written(_only_if(self._is_due(stage, m, fixed), run, writes))

    def _backward(self, stage: int, actions: ActionArrays, fixed: Fixed, live: Tick) -> Tick:
        """Run the backward of a stage, on the stage's device and if it is due."""
        traced, device, flow = self.stages[stage], self.table.devices[stage], fixed.flow
        function, derivative, m = traced.function, traced.derivative, actions.micro_batch[stage]
        assert derivative is not None
        weight_slots = self.weights.slots(device, function.weights)
        writes: Writes = {"total": used(live.carry.total, weight_slots)}
        if stage:
            writes |= self._box(stage, stage - 1, live)

        def run(writes: Writes) -> Writes:
            mailbox = writes.get("mailbox", live.mailbox)
            boundary = self.mail.get(mailbox, actions.input[stage], traced.receives)
            # State and metrics have changed since the forward; what the backward needs of them is in the residuals.
            context = StageContext(flow.batch(m), fixed.optimizer, None, [], [])
            values = self.weights.packing.read(fixed.weights, weight_slots)
            kept = self.residuals.read(live.residuals, self.residuals.slots[stage], row=actions.residual[stage])
            gradients = self._gradients(stage, mailbox, actions.gradient[stage])
            step = self._fast(derivative.backward)
            of_weights, of_boundary = step(values, boundary, context, kept, gradients)
            if function.map_gradients is not None:
                with refused(IN_STAGES):
                    of_weights = function.map_gradients(of_weights, values, fixed.optimizer)
            writes["total"] = self._add(writes["total"], weight_slots, of_weights, m, flow)
            return writes | self._send(writes, actions, stage, of_boundary) if stage else writes

        return live.written(_only_if(self._is_due(stage, m, fixed), run, writes))

    def _is_due(self, stage: int, m: Array, fixed: Fixed) -> Array:
        """Whether this device runs the stage now, for micro-batch m."""
        return (fixed.me == self.table.devices[stage]) & (m >= 0) & (m < fixed.flow.most)

    def _keep(self, residuals: Buffers, stage: int, kept: list[Array], row: Array) -> Buffers:
        """The residuals with those of a forward in their row."""
        if self.replicas.platform == "cpu":
            # XLA would compute them again while it writes them, on one core. [Note: a wall XLA:CPU respects]
            kept = [computed_once(value) for value in kept]
        return self.residuals.write(residuals, self.residuals.slots[stage], kept, row=row)

    def _gradients(self, stage: int, mailbox: Vectors, slot: Array) -> Tree:
        """The gradients of what a stage sends or, for the last stage, of the loss."""
        if stage == self.last:
            return jnp.ones(())
        return self.mail.get(mailbox, slot, [spec for spec in self.stages[stage + 1].receives if has_gradient(spec)])

    def _add(self, total: Buffers, slots: Sequence[Slot], gradients: Sequence[Array], m: Array, flow: Flow) -> Buffers:
        """The accumulated gradients plus those of micro-batch m."""
        # Gradients are added as vectors, because XLA only adds in place if nothing is reshaped in between.
        flat = [slot.flat for slot in slots]
        before = self.weights.packing.read(total, flat)
        after = self.accumulation.add_scaled(before, [g.reshape(-1) for g in gradients], flow.scale)
        if self.replicas.count > 1:
            after = jax.tree.map(partial(jnp.where, m < flow.mine), after, before)
        return self.weights.packing.write(total, flat, after)

    def _fast(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function with its convolutions rewritten for this platform."""
        return function if self.as_written else rewrite(function, self.replicas.platform)

    # --- what stages send and leave behind

    def _box(self, stage: int, other: int, live: Tick) -> Writes:
        """Where a stage puts what it sends: the outbox, or the mailbox if the other stage is on the same device."""
        near = self.table.devices[stage] == self.table.devices[other]
        return {"mailbox": live.mailbox} if near else {"outbox": live.outbox}

    def _send(self, writes: Writes, actions: ActionArrays, stage: int, arrays: Sequence[Array]) -> Writes:
        """The box among `writes` with the arrays that a stage sends."""
        box, slots = ("mailbox", actions.local) if "mailbox" in writes else ("outbox", actions.outbox)
        return {box: self.mail.put(writes[box], slots[stage], arrays)}

    def _if_active(
        self, results: StageResults, context: StageContext, whole: Scalar, changes: Sequence[int]
    ) -> StageResults:
        """What a stage leaves behind, with only that part of its state that changes.

        A replica without a micro-batch keeps what was there before. Moving statistics change by the mean over the
        active replicas, so that they stay equal on all of them.
        """
        active, pairs = context.active, [(results.state[i], context.state[i]) for i in changes]
        if self.replicas.count == 1:
            return results._replace(state=[new for new, _ in pairs])

        def agreed(new: Array, old: Array) -> Array:
            if not is_float(old):
                return jnp.where(active, new, old)

            def settled() -> Array:
                return mean_where_changed(self.replicas, [new], [old], active)[0]

            value: Array = lax.cond(whole, lambda: new, settled)
            return value

        metrics = [jnp.where(active, new, old) for new, old in zip(results.metrics, context.metrics, strict=True)]
        return results._replace(state=[agreed(new, old) for new, old in pairs], metrics=metrics)


def _only_if(condition: Array, run: Callable[[Writes], Writes], writes: Writes) -> Writes:
    """What `run` makes of `writes` if the condition holds, else `writes`."""
    new: Writes = lax.cond(condition, lambda w: run(dict(w)), lambda w: w, writes)
    return new


def _like(new: list[Array], old: list[Array]) -> list[Array]:
    """The new arrays in the dtypes of the old ones."""
    return [jnp.asarray(a, b.dtype) for a, b in zip(new, old, strict=True)]


def make_pipeline(
    table: TableArrays,
    stages: Sequence[StageFunction],
    layout: StageLayout,
    accumulation: Accumulation,
    context: StageContext,
    recompute: Recompute,
) -> tuple[Pipeline, Tree]:
    """The pipeline for one shape of micro-batch, and the shapes of the last stage's results.

    `context` has the shapes of the micro-batch, of the optimizer's common variables and of the metrics.
    """
    traced, result = trace_stages(stages, layout, context, None if table.backward is None else recompute)
    boundaries = [stage.receives for stage in traced]
    gradients = [[spec for spec in specs if has_gradient(spec)] for specs in boundaries]
    mail = Mailbox.for_all([*boundaries, *gradients])
    residuals = pack([stage.kept for stage in traced], table.devices)
    pipeline = Pipeline(table, traced, layout.weights, layout.state, mail, residuals, accumulation, layout.replicas)
    return pipeline, result
