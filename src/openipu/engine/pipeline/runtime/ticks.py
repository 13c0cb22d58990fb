"""The ticks of a schedule as one loop of a compiled program, the same on every device.

In each row of the compiled table (schedule/table_arrays.py) a device runs its forwards, then its backwards, then all
devices exchange what is to go on. What a device does is chosen by conditionals, one per stage and kind, each of which
returns only what it writes: XLA then changes the large buffers in place instead of copying them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import Any, NamedTuple

from openipu.engine.convolution import rewrite
from openipu.engine.convolution.arrays import computed_once
from openipu.engine.core.accumulation import Accumulation
from openipu.engine.core.pipelining import Recompute
from openipu.engine.devices.replicas import STAGE_AXIS, Replicas
from openipu.engine.loop.arrays import is_float
from openipu.engine.schedule.table_arrays import ActionArrays, TableArrays
from openipu.engine.types import Tree

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .mailbox import Mailbox, Vectors
from .packing import Buffers, Packing, Slot, pack, used
from .stage_function import StageContext, StageFunction, StageResults
from .stage_layout import StageLayout
from .traced_stages import TracedStage, trace_stages
from .variable_store import Store


class TickState(NamedTuple):
    """What changes while micro-batches go through the stages."""

    total: Buffers
    """Gradients so far, where the weights are in their buffers. Empty where nothing is trained."""
    state: Buffers
    metrics: list[Any]
    kept: Tree
    """Results of the last stage."""


class Boxes(NamedTuple):
    """Room for what is under way. What is in there at first does not matter, so every update can use the same."""

    mailbox: Vectors
    outbox: Vectors
    residuals: Buffers


class Flow(NamedTuple):
    """Which micro-batches go through, and how their gradients count."""

    batch: Callable[[Any], Tree]
    """Micro-batch number m."""
    most: Any
    """How many there are on the replica that has the most."""
    mine: Any
    """How many there are on this one."""
    scale: Any
    """How often each gradient counts."""
    whole: Any
    """Whether every replica has all of them."""
    keep: Callable[[Tree, Any, Tree, Any, list[Any]], Tree]
    """`keep(kept, m, result, active, metrics)`: the results with those of micro-batch m."""


class _Row(NamedTuple):
    """A row of the compiled table inside the program."""

    forward: ActionArrays
    backward: ActionArrays | None
    exchange: Any
    receive: Any


class _Fixed(NamedTuple):
    """What one device knows during a run through the table, and no tick changes."""

    me: Any
    """The number of the device within its replica."""
    weights: Buffers
    optimizer: list[Any]
    """The optimizer's variables that belong to no weight."""
    flow: Flow


@dataclass(frozen=True, slots=True)
class Pipeline:
    """Stages, traced for one shape of micro-batch, and the table they follow."""

    table: TableArrays
    stages: tuple[TracedStage, ...]
    weights: Store
    state: Store
    mail: Mailbox
    residuals: Packing
    """One group per stage, one row per slot."""
    accumulation: Accumulation
    replicas: Replicas
    as_written: bool = False
    """Whether convolutions stay as they are, for those who count operations."""

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
        """Room for what is under way on one device."""
        table = self.table
        residuals = self.residuals.zeros(max(1, table.residual_slots)) if self.training else {}
        return Boxes(self.mail.empty(table.trash + 1), self.mail.empty(table.rounds), residuals)

    def run(
        self, weights: Buffers, optimizer: list[Any], carry: TickState, flow: Flow, boxes: Boxes
    ) -> tuple[TickState, Boxes]:
        """Send micro-batches through all stages."""
        table = self.table
        fixed = _Fixed(lax.axis_index(STAGE_AXIS), weights, optimizer, flow)
        rows = jax.tree.map(jnp.asarray, _rows_of(table))
        live = _Tick(carry, *boxes)

        def tick(number: Any, live: _Tick) -> _Tick:
            row = jax.tree.map(lambda a: a[number], rows)
            for stage in range(len(self.stages)):
                live = self._forward(stage, row.forward, fixed, live)
            for stage in reversed(range(len(self.stages))) if self.training else ():
                live = self._backward(stage, row.backward, fixed, live)
            return live._replace(mailbox=self._exchange(row, fixed.me, live))

        ends = jnp.asarray(_ends(table))
        done: _Tick = lax.fori_loop(0, ends[flow.most], tick, live)
        return done.carry, Boxes(done.mailbox, done.outbox, done.residuals)

    def _forward(self, stage: int, actions: ActionArrays, fixed: _Fixed, live: _Tick) -> _Tick:
        traced, device, flow = self.stages[stage], self.table.devices[stage], fixed.flow
        function, m = traced.function, actions.micro_batch[stage]
        weight_slots = self.weights.slots(device, function.weights)
        state_slots = self.state.slots(device, function.state)
        changing_slots = [state_slots[i] for i in traced.changes]
        writes: dict[str, Any] = {"state": used(live.carry.state, changing_slots)}
        if self.training:
            writes["residuals"] = used(live.residuals, self.residuals.slots[stage])
        if stage == self.last:
            writes |= {"metrics": live.carry.metrics, "kept": live.carry.kept}
        else:
            writes |= self._post(stage, stage + 1, live)

        def run(writes: dict[str, Any]) -> dict[str, Any]:
            active = m < flow.mine
            boundary = self.mail.get(writes.get("mailbox", live.mailbox), actions.input[stage], traced.receives)
            state = self.state.packing.read(live.carry.state | writes["state"], state_slots)
            context = StageContext(flow.batch(m), fixed.optimizer, active, state, writes.get("metrics", []))
            values = self.weights.packing.read(fixed.weights, weight_slots)
            if traced.derivative is not None:
                out, results, kept = self._fast(traced.derivative.forward)(values, boundary, context)
                writes["residuals"] = self._keep(writes["residuals"], stage, kept, actions.residual[stage])
            else:
                out, results = self._fast(function.run)(values, boundary, context)
            new = self._if_active(results, context, flow.whole, traced.changes)
            writes["state"] = self.state.packing.write(writes["state"], changing_slots, new.state)
            if stage == self.last:
                metrics = _like(new.metrics, writes["metrics"])
                return writes | {"metrics": metrics, "kept": flow.keep(writes["kept"], m, new.result, active, metrics)}
            return writes | self._send(writes, actions, stage, out)

        return live.written(_only_if(self._is_due(stage, m, fixed), run, writes))

    def _backward(self, stage: int, actions: ActionArrays, fixed: _Fixed, live: _Tick) -> _Tick:
        traced, device, flow = self.stages[stage], self.table.devices[stage], fixed.flow
        function, derivative, m = traced.function, traced.derivative, actions.micro_batch[stage]
        assert derivative is not None
        weight_slots = self.weights.slots(device, function.weights)
        writes: dict[str, Any] = {"total": used(live.carry.total, weight_slots)}
        if stage:
            writes |= self._post(stage, stage - 1, live)

        def run(writes: dict[str, Any]) -> dict[str, Any]:
            mailbox = writes.get("mailbox", live.mailbox)
            boundary = self.mail.get(mailbox, actions.input[stage], traced.receives)
            # The forward has used state and metrics up; what the backward needs of them is among the residuals.
            context = StageContext(flow.batch(m), fixed.optimizer, None, [], [])
            values = self.weights.packing.read(fixed.weights, weight_slots)
            kept = self.residuals.read(live.residuals, self.residuals.slots[stage], row=actions.residual[stage])
            gradients = self._gradients(stage, mailbox, actions.gradient[stage])
            step = self._fast(derivative.backward)
            of_weights, of_boundary = step(values, boundary, context, kept, gradients)
            if function.map_gradients is not None:
                of_weights = function.map_gradients(of_weights, values, fixed.optimizer)
            writes["total"] = self._add(writes["total"], weight_slots, of_weights, m, flow)
            return writes | self._send(writes, actions, stage, of_boundary) if stage else writes

        return live.written(_only_if(self._is_due(stage, m, fixed), run, writes))

    def _is_due(self, stage: int, m: Any, fixed: _Fixed) -> Any:
        """Whether this device runs the stage now, for micro-batch m."""
        return (fixed.me == self.table.devices[stage]) & (m >= 0) & (m < fixed.flow.most)

    def _keep(self, residuals: Buffers, stage: int, kept: list[Any], row: Any) -> Buffers:
        """The residuals with those of a forward."""
        if self.replicas.platform == "cpu":
            # XLA would compute them again, on one core, in writing them. [Note: a wall XLA:CPU respects]
            kept = [computed_once(value) for value in kept]
        return self.residuals.write(residuals, self.residuals.slots[stage], kept, row=row)

    def _gradients(self, stage: int, mailbox: Vectors, slot: Any) -> Any:
        """Those of what a stage sends; of the last stage: that of the loss."""
        if stage == self.last:
            return jnp.ones(())
        return self.mail.get(mailbox, slot, [spec for spec in self.stages[stage + 1].receives if is_float(spec)])

    def _add(self, total: Buffers, slots: Sequence[Slot], gradients: Sequence[Any], m: Any, flow: Flow) -> Buffers:
        """The accumulated gradients with those of micro-batch m."""
        # Added as vectors, because XLA adds in place only where nothing changes its shape on the way.
        flat = [slot.flat for slot in slots]
        before = self.weights.packing.read(total, flat)
        after = self.accumulation.add_scaled(before, [g.reshape(-1) for g in gradients], flow.scale)
        if self.replicas.count > 1:
            after = jax.tree.map(partial(jnp.where, m < flow.mine), after, before)
        return self.weights.packing.write(total, flat, after)

    def _fast(self, function: Callable[..., Any]) -> Callable[..., Any]:
        return function if self.as_written else rewrite(function, self.replicas.platform)

    # --- what travels

    def _post(self, stage: int, other: int, live: _Tick) -> dict[str, Any]:
        """Where a stage puts what it sends: the outbox, or the mailbox if the other stage is on the same device."""
        near = self.table.devices[stage] == self.table.devices[other]
        return {"mailbox": live.mailbox} if near else {"outbox": live.outbox}

    def _send(self, writes: dict[str, Any], actions: ActionArrays, stage: int, arrays: Sequence[Any]) -> dict[str, Any]:
        box, slots = ("mailbox", actions.local) if "mailbox" in writes else ("outbox", actions.outbox)
        return {box: self.mail.put(writes[box], slots[stage], arrays)}

    def _exchange(self, row: _Row, me: Any, live: _Tick) -> Vectors:
        def through(rounds: Any) -> Callable[[Vectors], Vectors]:
            def exchange(mailbox: Vectors) -> Vectors:
                new = dict(mailbox)
                for turn, permutation in enumerate(rounds):
                    slot = row.receive[turn, me]
                    for name in mailbox:
                        arrived = lax.ppermute(live.outbox[name][turn], STAGE_AXIS, permutation)
                        new[name] = new[name].at[slot].set(arrived, mode="promise_in_bounds")
                return new

            return exchange

        if self.table.rounds == 0:
            return live.mailbox
        mailbox: Vectors = lax.switch(row.exchange, [through(rounds) for rounds in self.table.exchanges], live.mailbox)
        return mailbox

    def _if_active(
        self, results: StageResults, context: StageContext, whole: Any, changes: Sequence[int]
    ) -> StageResults:
        """What a stage leaves behind, of its state what changes. Without the micro-batch: what was there before.

        Moving statistics, equal on all replicas before, become those that the active replicas agree on.
        """
        active, pairs = context.active, [(results.state[i], context.state[i]) for i in changes]
        if self.replicas.count == 1:
            return results._replace(state=[new for new, _ in pairs])

        def agreed(new: Any, old: Any) -> Any:
            if not is_float(old):
                return jnp.where(active, new, old)
            return lax.cond(whole, lambda: new, lambda: old + self.replicas.mean_of_active(new - old, active))

        metrics = [jnp.where(active, new, old) for new, old in zip(results.metrics, context.metrics, strict=True)]
        return results._replace(state=[agreed(new, old) for new, old in pairs], metrics=metrics)


class _Tick(NamedTuple):
    """Everything that a tick changes."""

    carry: TickState
    mailbox: Vectors
    outbox: Vectors
    residuals: Buffers

    def written(self, new: dict[str, Any]) -> _Tick:
        """With what a conditional has written in place of what was there."""
        carry = self.carry._replace(
            total=self.carry.total | new.get("total", {}),
            state=self.carry.state | new.get("state", {}),
            metrics=new.get("metrics", self.carry.metrics),
            kept=new.get("kept", self.carry.kept),
        )
        return _Tick(
            carry,
            new.get("mailbox", self.mailbox),
            new.get("outbox", self.outbox),
            self.residuals | new.get("residuals", {}),
        )


def _only_if(condition: Any, run: Callable[[dict[str, Any]], dict[str, Any]], writes: dict[str, Any]) -> dict[str, Any]:
    new: dict[str, Any] = lax.cond(condition, lambda w: run(dict(w)), lambda w: w, writes)
    return new


def _like(new: list[Any], old: list[Any]) -> list[Any]:
    return [jnp.asarray(a, b.dtype) for a, b in zip(new, old, strict=True)]


def _rows_of(table: TableArrays) -> _Row:
    # Not an array of size 0, on which the partitioner of JAX 0.11 fails.
    receive = table.receive if table.rounds else None
    return _Row(table.forward, table.backward, table.exchange, receive)


def _ends(table: TableArrays) -> np.ndarray:
    """For 0, 1, 2, ... micro-batches, how many rows they take."""
    present = [actions.micro_batch for actions in (table.forward, table.backward) if actions is not None]
    numbers = np.concatenate(present, axis=1)
    rows = [1 + int(np.nonzero((numbers == m).any(axis=1))[0].max()) for m in range(int(numbers.max()) + 1)]
    return np.maximum.accumulate(np.array([0, *rows], np.int32))


jax.tree_util.register_dataclass(
    ActionArrays, data_fields=[field.name for field in fields(ActionArrays)], meta_fields=[]
)


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
    gradients = [[spec for spec in specs if is_float(spec)] for specs in boundaries]
    mail = Mailbox.for_all([*boundaries, *gradients])
    residuals = pack([stage.kept for stage in traced], table.devices)
    pipeline = Pipeline(table, traced, layout.weights, layout.state, mail, residuals, accumulation, layout.replicas)
    return pipeline, result
