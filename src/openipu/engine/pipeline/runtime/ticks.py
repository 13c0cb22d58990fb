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
from openipu.engine.convolution.arrays import settled
from openipu.engine.core.accumulation import Accumulation
from openipu.engine.core.pipelining import Recompute
from openipu.engine.devices.replicas import STAGE_AXIS, Replicas
from openipu.engine.loop.execution import is_float
from openipu.engine.schedule.table_arrays import TableArrays, Work

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .mailbox import Mailbox, Vectors
from .packing import Buffers, Packing, Spec, pack, used
from .stage_function import After, Around, Differentiated, StageFunction, differentiate
from .variable_store import Store

Tree = Any


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

    forward: Work
    backward: Work | None
    exchange: Any
    receive: Any


@dataclass(frozen=True, slots=True)
class Pipeline:
    """Stages, traced for one shape of micro-batch, and the table they follow."""

    table: TableArrays
    stages: tuple[StageFunction, ...]
    derivatives: tuple[Differentiated, ...]
    """Empty where nothing is trained."""
    boundaries: tuple[tuple[Spec, ...], ...]
    """What each stage receives; nothing for the first."""
    changing: tuple[tuple[int, ...], ...]
    """Which of its own state each stage changes; the rest, such as frozen weights, is only read."""
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

    # --- the loop

    def boxes(self) -> Boxes:
        """Room for what is under way on one device."""
        table = self.table
        residuals = self.residuals.zeros(max(1, table.residual_slots)) if self.derivatives else {}
        return Boxes(self.mail.empty(table.trash + 1), self.mail.empty(table.rounds), residuals)

    def run(
        self, weights: Buffers, optimizer: list[Any], carry: TickState, flow: Flow, boxes: Boxes
    ) -> tuple[TickState, Boxes]:
        """Send micro-batches through all stages."""
        table = self.table
        me = lax.axis_index(STAGE_AXIS)
        rows = jax.tree.map(jnp.asarray, _rows_of(table))
        live = _Tick(carry, *boxes)

        def tick(number: Any, live: _Tick) -> _Tick:
            row = jax.tree.map(lambda a: a[number], rows)
            for stage in range(len(self.stages)):
                live = self._forward(stage, row.forward, me, weights, optimizer, flow, live)
            for stage in reversed(range(len(self.derivatives))):
                live = self._backward(stage, row.backward, me, weights, optimizer, flow, live)
            return live._replace(mailbox=self._exchange(row, me, live))

        ends = jnp.asarray(_ends(table))
        done: _Tick = lax.fori_loop(0, ends[flow.most], tick, live)
        return done.carry, Boxes(done.mailbox, done.outbox, done.residuals)

    def _forward(
        self, stage: int, work: Work, me: Any, weights: Buffers, optimizer: list[Any], flow: Flow, live: _Tick
    ) -> _Tick:
        device = self.table.devices[stage]
        function, m = self.stages[stage], work.micro_batch[stage]
        weight_slots = self.weights.slots(device, function.weights)
        state_slots = self.state.slots(device, function.state)
        changing = self.changing[stage]
        changing_slots = [state_slots[i] for i in changing]
        kept_slots = self.residuals.slots[stage] if self.derivatives else ()
        writes: dict[str, Any] = {"state": used(live.carry.state, changing_slots)}
        if self.derivatives:
            writes["residuals"] = used(live.residuals, kept_slots)
        if stage == self.last:
            writes |= {"metrics": live.carry.metrics, "kept": live.carry.kept}
        else:
            writes |= self._post(stage, stage + 1, live)

        def run(writes: dict[str, Any]) -> dict[str, Any]:
            active = m < flow.mine
            boundary = self.mail.get(writes.get("mailbox", live.mailbox), work.input[stage], self.boundaries[stage])
            state = self.state.packing.read(live.carry.state | writes["state"], state_slots)
            around = Around(flow.batch(m), optimizer, active, state, writes.get("metrics", []))
            values = self.weights.packing.read(weights, weight_slots)
            if self.derivatives:
                step = self._fast(self.derivatives[stage].forward)
                out, after, kept = step(values, boundary, around)
                if self.replicas.platform == "cpu":
                    # XLA would compute them again, on one core, in writing them. [Note: a wall XLA:CPU respects]
                    kept = [settled(value) for value in kept]
                writes["residuals"] = self.residuals.write(
                    writes["residuals"], kept_slots, kept, row=work.residual[stage]
                )
            else:
                out, after = self._fast(function.run)(values, boundary, around)
            new = self._if_active(active, after, around, flow.whole, changing)
            writes["state"] = self.state.packing.write(writes["state"], changing_slots, new.state)
            if stage == self.last:
                metrics = _like(new.metrics, writes["metrics"])
                return writes | {"metrics": metrics, "kept": flow.keep(writes["kept"], m, new.result, active, metrics)}
            return writes | self._send(writes, work, stage, out)

        here = (me == device) & (m >= 0) & (m < flow.most)
        return live.written(_only_if(here, run, writes))

    def _backward(
        self, stage: int, work: Work, me: Any, weights: Buffers, optimizer: list[Any], flow: Flow, live: _Tick
    ) -> _Tick:
        device = self.table.devices[stage]
        function, derivative, m = self.stages[stage], self.derivatives[stage], work.micro_batch[stage]
        weight_slots = self.weights.slots(device, function.weights)
        writes: dict[str, Any] = {"total": used(live.carry.total, weight_slots)}
        if stage:
            writes |= self._post(stage, stage - 1, live)

        def run(writes: dict[str, Any]) -> dict[str, Any]:
            mailbox = writes.get("mailbox", live.mailbox)
            boundary = self.mail.get(mailbox, work.input[stage], self.boundaries[stage])
            # The forward has used state and metrics up; what the backward needs of them is among the residuals.
            around = Around(flow.batch(m), optimizer, None, [], [])
            values = self.weights.packing.read(weights, weight_slots)
            kept = self.residuals.read(live.residuals, self.residuals.slots[stage], row=work.residual[stage])
            if stage == self.last:
                gradients: Any = jnp.ones(())
            else:
                specs = [spec for spec in self.boundaries[stage + 1] if is_float(spec)]
                gradients = self.mail.get(mailbox, work.gradient[stage], specs)
            step = self._fast(derivative.backward)
            of_weights, of_boundary = step(values, boundary, around, kept, gradients)
            if function.mapped is not None:
                of_weights = function.mapped(of_weights, values, optimizer)
            # Added as vectors, because XLA adds in place only where nothing changes its shape on the way.
            flat = [slot.flat for slot in weight_slots]
            before = self.weights.packing.read(writes["total"], flat)
            total = self.accumulation.add_scaled(before, [g.reshape(-1) for g in of_weights], flow.scale)
            if self.replicas.count > 1:
                total = jax.tree.map(partial(jnp.where, m < flow.mine), total, before)
            writes["total"] = self.weights.packing.write(writes["total"], flat, total)
            return writes | self._send(writes, work, stage, of_boundary) if stage else writes

        here = (me == device) & (m >= 0) & (m < flow.most)
        return live.written(_only_if(here, run, writes))

    def _fast(self, function: Callable[..., Any]) -> Callable[..., Any]:
        return function if self.as_written else rewrite(function, self.replicas.platform)

    # --- what travels

    def _post(self, stage: int, other: int, live: _Tick) -> dict[str, Any]:
        """Where a stage puts what it sends: the outbox, or the mailbox if the other stage is on the same device."""
        near = self.table.devices[stage] == self.table.devices[other]
        return {"mailbox": live.mailbox} if near else {"outbox": live.outbox}

    def _send(self, writes: dict[str, Any], work: Work, stage: int, arrays: Sequence[Any]) -> dict[str, Any]:
        box, slots = ("mailbox", work.local) if "mailbox" in writes else ("outbox", work.outbox)
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

    def _if_active(self, active: Any, after: After, around: Around, whole: Any, changing: Sequence[int]) -> After:
        """What a stage leaves behind, of its state what changes. Without the micro-batch: what was there before.

        Moving statistics, equal on all replicas before, become those that the active replicas agree on.
        """
        pairs = [(after.state[i], around.state[i]) for i in changing]
        if self.replicas.count == 1:
            return after._replace(state=[new for new, _ in pairs])

        def agreed(new: Any, old: Any) -> Any:
            if not is_float(old):
                return jnp.where(active, new, old)
            return lax.cond(whole, lambda: new, lambda: old + self.replicas.mean_of_active(new - old, active))

        metrics = [jnp.where(active, new, old) for new, old in zip(after.metrics, around.metrics, strict=True)]
        return after._replace(state=[agreed(new, old) for new, old in pairs], metrics=metrics)


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
    works = [work.micro_batch for work in (table.forward, table.backward) if work is not None]
    numbers = np.concatenate(works, axis=1)
    rows = [1 + int(np.nonzero((numbers == m).any(axis=1))[0].max()) for m in range(int(numbers.max()) + 1)]
    return np.maximum.accumulate(np.array([0, *rows], np.int32))


jax.tree_util.register_dataclass(Work, data_fields=[field.name for field in fields(Work)], meta_fields=[])


def _changing(jaxpr: Any, after: After, metrics: int, state: int) -> tuple[int, ...]:
    """Which parts of a traced stage's state are not just handed on. State and metrics are its last arguments."""
    old = jaxpr.invars[len(jaxpr.invars) - metrics - state : len(jaxpr.invars) - metrics]
    rest = len(jax.tree.leaves((after.metrics, after.result)))
    new = jaxpr.outvars[len(jaxpr.outvars) - rest - state : len(jaxpr.outvars) - rest]
    return tuple(i for i, (a, b) in enumerate(zip(old, new, strict=True)) if a is not b)


def make_pipeline(
    table: TableArrays,
    stages: Sequence[StageFunction],
    weights: Store,
    state: Store,
    accumulation: Accumulation,
    around: Around,
    *,
    recompute: Recompute,
    replicas: Replicas,
) -> tuple[Pipeline, Tree]:
    """Trace all stages one after another, and find out what travels between them and what each keeps.

    `around` has the shapes of the micro-batch, of the optimizer's common variables and of the metrics. Gives the
    shapes of the last stage's results too.
    """
    weight_specs, state_specs = weights.specs(), state.specs()
    boundary: list[Any] = []
    boundaries: list[tuple[Spec, ...]] = []
    derivatives: list[Differentiated] = []
    changing: list[tuple[int, ...]] = []
    for number, stage in enumerate(stages):
        values = [weight_specs[i] for i in stage.weights]
        own = around._replace(
            state=[state_specs[i] for i in stage.state], metrics=around.metrics if number == len(stages) - 1 else []
        )
        boundaries.append(tuple(map(Spec.of, boundary)))
        if table.backward is not None:
            # The last stage keeps its values in any case: it goes back as soon as it has gone forward.
            again = recompute if number < len(stages) - 1 else Recompute.NOTHING
            derivatives.append(differentiate(stage, values, boundary, own, again))
        traced, (boundary, after) = jax.make_jaxpr(stage.run, return_shape=True)(values, boundary, own)
        changing.append(_changing(traced.jaxpr, after, len(own.metrics), len(own.state)))
    gradients = [[spec for spec in specs if is_float(spec)] for specs in boundaries]
    pipeline = Pipeline(
        table,
        tuple(stages),
        tuple(derivatives),
        tuple(boundaries),
        tuple(changing),
        weights,
        state,
        Mailbox.for_all([*boundaries, *gradients]),
        pack([d.kept for d in derivatives], table.devices),
        accumulation,
        replicas,
    )
    return pipeline, after.result
