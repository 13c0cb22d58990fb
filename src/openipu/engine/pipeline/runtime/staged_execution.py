"""What one program of a pipelined model computes: updates, each of them one run through the schedule's table.

It counts in the same way as loop/execution.py. Leftover micro-batches go through the same table, which skips the
missing ones. A smaller last batch goes through a table of its own.
"""

from __future__ import annotations

from dataclasses import dataclass

from openipu.engine.core.accumulation import Accumulation
from openipu.engine.core.enqueued import Enqueued, ignored
from openipu.engine.core.state import Outcome, Spot, State
from openipu.engine.devices.replicas import STAGE_AXIS, Replicas
from openipu.engine.facts.layers import ACCUMULATED, IN_FLIGHT
from openipu.engine.host_io.step_logs import StepLogs
from openipu.engine.loop.arrays import fetch, is_float, length, row, rows_of
from openipu.engine.loop.execution import begun
from openipu.engine.loop.outfeeds import Cells, Outfeeds, Specs
from openipu.engine.loop.remainder import Counts, Form, Remainder
from openipu.engine.loop.replica_state import agree
from openipu.engine.loop.results import Collector, Kept
from openipu.engine.types import Array, Tree

import jax
import jax.numpy as jnp
from jax import lax

from .packing import Buffers
from .stage_layout import StageLayout
from .stage_update import UpdateState, from_device
from .tick_state import Boxes, Flow, TickState
from .ticks import Pipeline
from .variable_store import listed, numbered
from .watched_update import enqueued_in

Running = tuple[State, Kept, Boxes | None]
"""What goes from one update to the next."""


@dataclass(frozen=True, slots=True)
class StagedExecution:
    """All that is known about a program before it runs: its pipelines, and what to collect."""

    form: Form
    outcome: Outcome
    spread: StageLayout
    full: Pipeline
    """The pipeline for full micro-batches."""
    tail: Pipeline | None
    """The pipeline for a smaller last batch."""
    micro_batches: int
    """Micro-batches per update."""
    results: Tree
    """Shapes of the last stage's results, for a full micro-batch and for the tail."""
    live: StepLogs | None = None
    """Receives the logs of each step while the execution runs."""
    outfeeds: Specs | None = None
    """The outfeeds that the stages fill."""

    @property
    def replicas(self) -> Replicas:
        """The replicas that it runs on."""
        return self.spread.replicas

    def run(self, state: State, resident: Tree, body: Tree, counts: Counts, tail: Tree) -> tuple[Tree, State]:
        """Run steps of a slab on one device. Returns what the outcome asks for, and the new state."""
        replicas, outcome = self.replicas, self.outcome
        begin = begun(outcome, state, counts)
        strength = self.full.accumulation.strength(replicas.count)
        remainder = Remainder.of(
            counts, self.micro_batches, replicas.count, strength, rows_of(row(body, 0)), rows_of(tail), outcome.adds
        )  # fmt: skip
        outfeeds = Outfeeds(self.outfeeds, replicas)
        collector = Collector(outcome, replicas, self.live, counts.first, counts.batches(replicas.count), outfeeds)
        updates = _Updates(self, resident, body, tail, begin, remainder, collector)

        rows = length(body) if self.form.updates != "none" else self.micro_batches
        kept = collector.start(begin.metrics, self.results[0], self.results[1], rows)
        # The boxes are created once for all updates: filling that much memory with zeros takes as long as some steps.
        with jax.named_scope(IN_FLIGHT):
            running: Running = begin, kept, self.full.boxes() if self.form != Form() else None
        if self.form.updates != "none":
            running = lax.fori_loop(0, remainder.updates + (remainder.samples > 0), updates.run, running)
        else:
            running = updates.run(jnp.asarray(remainder.updates), running)
        state, kept, _ = running
        collector.finish(kept)
        state = self._settle(state, begin)
        return collector.results(state, self._of_last_stage(kept.results)), state

    def _settle(self, state: State, begin: State) -> State:
        """The state with the last stage's metrics on all devices, and moving statistics averaged over replicas."""
        state = agree(self.replicas, state._replace(metrics=self._of_last_stage(state.metrics)), begin)
        # The first replica has the most data, so its seeds have advanced the furthest.
        seeds = [a if is_float(a) else self.replicas.of_first(a) for a in state.non_trainable]
        return state._replace(non_trainable=seeds)

    def _of_last_stage(self, tree: Tree) -> Tree:
        """The values of the last stage's device, on all devices."""
        return from_device(self.full.table.devices[self.full.last], lax.axis_index(STAGE_AXIS), tree)


@dataclass(frozen=True, slots=True)
class _Updates:
    """The updates of one execution on one device. The last of them may be incomplete."""

    of: StagedExecution
    resident: Tree
    body: Tree
    tail: Tree
    begin: State
    remainder: Remainder
    collector: Collector

    def run(self, number: Array, running: Running) -> Running:
        """Run update number `number`, counted from 0."""
        spread, full, replicas = self.of.spread, self.of.full, self.of.replicas
        state, kept, boxes = running
        whole = number < self.remainder.updates
        weights, optimizer = numbered(state.trainable), spread.slots(state)[1]
        if replicas.count > 1:
            state = lax.cond(whole, lambda s: s, lambda s: agree(replicas, s, self.begin), state)
        training = spread.update is not None
        with jax.named_scope(ACCUMULATED):
            total = full.weights.packing.zeros(dtype=full.accumulation.dtype) if training else {}
        carry = TickState(total, numbered(state.non_trainable), state.metrics, kept)
        if boxes is not None:
            carry, boxes = full.run(weights, optimizer, carry, self._flow(number, whole), boxes)
        if self.of.tail is not None:
            tail = self.of.tail
            if self.of.outcome.collect == "all":
                carry = carry._replace(state=self._tail_seeds(carry.state))
            carry, _ = tail.run(weights, optimizer, carry, self._tail_flow(whole), tail.boxes())
        state = state._replace(non_trainable=listed(carry.state), metrics=carry.metrics)
        if not training:
            return state, carry.kept, boxes
        kept = carry.kept
        if self.of.outfeeds:
            first = lax.axis_index(STAGE_AXIS) == 0
            cells = self.collector.outfeeds.put(kept.cells, watched(spread, state, carry.total), first)
            kept = kept._replace(cells=cells)
        return updated(spread, state, carry.total), kept, boxes

    def _flow(self, number: Array, whole: Array) -> Flow:
        """The full micro-batches of an update; `whole` says whether the update is complete."""
        remainder, size = self.remainder, self.of.micro_batches
        first = self.collector.first + number * size

        def keep(kept: Kept, m: Array, result: Tree, active: Array, metrics: list[Array]) -> Kept:
            return self.collector.add(kept, first + m, result, active, metrics)

        def put(cells: Cells, m: Array, enqueued: Enqueued) -> Cells:
            return self.collector.outfeeds.put(cells, enqueued, m < jnp.where(whole, size, remainder.left))

        return Flow(
            lambda m: fetch(self.resident, row(self.body, first + m)),
            jnp.where(whole, size, remainder.turns),
            jnp.where(whole, size, remainder.turns_of(self.of.replicas.index())),
            self._share(whole, remainder.rows),
            whole,
            keep,
            put,
        )

    def _tail_flow(self, whole: Array) -> Flow:
        """The tail, which one replica has. All replicas compute its predictions, because the first one returns them."""

        def keep(kept: Kept, _m: Array, result: Tree, active: Array, metrics: list[Array]) -> Kept:
            return self.collector.add(kept, None, result, active, metrics)

        def put(cells: Cells, _m: Array, enqueued: Enqueued) -> Cells:
            return self.collector.outfeeds.put(cells, enqueued, self.of.replicas.count == 1)

        everywhere = self.of.outcome.collect == "all"
        mine = jnp.asarray(self.remainder.takes_tail(self.of.replicas.index()) | everywhere, jnp.int32)
        share = self._share(whole, self.remainder.tail_rows)
        return Flow(lambda _: fetch(self.resident, self.tail), 1, mine, share, False, keep, put, self._tail_spot())

    def _tail_spot(self) -> Spot | None:
        """The tail comes after the micro-batches of the `extra` replicas, as it would in one batch."""
        remainder = self.remainder
        if remainder.replicas == 1:
            return None
        first = jnp.asarray(remainder.extra * remainder.rows, jnp.int32)
        return Spot(first, remainder.replicas * remainder.rows)

    def _tail_seeds(self, state: Buffers) -> Buffers:
        """The state with the seeds of the replica that has the tail, for when all replicas compute it.

        That one had no micro-batch in the step of the `extra` replicas, so its seeds are the ones that they used.
        """
        replicas = self.of.replicas
        if replicas.count == 1:
            return state
        mine = self.remainder.takes_tail(replicas.index())
        return {n: a if is_float(a) else replicas.sum(jnp.where(mine, a, jnp.zeros_like(a))) for n, a in state.items()}

    def _share(self, whole: Array, rows: int) -> Array:
        """How often each gradient of a micro-batch with `rows` rows counts."""
        return jnp.where(whole, _full_scale(self.of.full.accumulation), self.remainder.share(rows))


def watched(spread: StageLayout, state: State, total: Buffers) -> Enqueued:
    """What the optimizer enqueues in an update with these gradients."""
    assert spread.update is not None
    return enqueued_in(spread.update, UpdateState(numbered(state.trainable), *spread.slots(state)), total)


def updated(spread: StageLayout, state: State, total: Buffers) -> State:
    """The state after an update with these gradients."""
    assert spread.update is not None
    slots, common = spread.slots(state)
    with ignored():  # what the optimizer enqueues is in `watched`
        weights, slots, common = spread.update.apply(numbered(state.trainable), slots, common, total)
    return spread.with_optimizer(state._replace(trainable=listed(weights)), slots, common)


def _full_scale(accumulation: Accumulation) -> float:
    """How often a gradient counts in a full update. A mean is a sum of scaled gradients."""
    return accumulation.strength(1) / accumulation.steps
