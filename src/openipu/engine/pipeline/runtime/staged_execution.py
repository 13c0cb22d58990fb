"""What one execution of a pipelined model computes: updates, each of them a run through the schedule's table.

The same counts and rules as in loop/execution.py. Micro-batches that are left over go through the same table, in which
those that are missing are skipped; a smaller last batch goes through a table of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

from openipu.engine.core.accumulation import Accumulation
from openipu.engine.core.state import Outcome, State
from openipu.engine.devices.replicas import STAGE_AXIS, Replicas
from openipu.engine.host_io.step_logs import StepLogs
from openipu.engine.loop.arrays import fetch, is_float, length, row, rows_of
from openipu.engine.loop.remainder import Counts, Remainder
from openipu.engine.loop.replica_state import agree
from openipu.engine.loop.results import Collector, Kept
from openipu.engine.types import Tree

import jax.numpy as jnp
from jax import lax

from .stage_layout import StageLayout
from .stage_update import from_device
from .ticks import Boxes, Flow, Pipeline, TickState
from .variable_store import listed, numbered

Running = tuple[State, Kept, Boxes]


@dataclass(frozen=True, slots=True)
class StagedExecution:
    """The static part of an execution: pipelines for full micro-batches and for the tail, and what is collected."""

    outcome: Outcome
    spread: StageLayout
    full: Pipeline
    tail: Pipeline | None
    micro_batches: int
    """Those of one update."""
    results: Tree
    """Shapes of the last stage's results, for a full micro-batch and for the tail."""
    live: StepLogs | None = None
    """Who is told about each step while the execution runs."""

    @property
    def replicas(self) -> Replicas:
        """Where it runs."""
        return self.spread.replicas

    def run(self, state: State, resident: Tree, body: Tree, counts: Counts, tail: Tree) -> tuple[Any, State]:
        """Run a slab on one device; gives what the outcome asks for, and the new state."""
        replicas, outcome = self.replicas, self.outcome
        begin = outcome.begin(state) if outcome.begin is not None else state
        strength = self.full.accumulation.strength(replicas.count)
        remainder = Remainder.of(
            counts, self.micro_batches, replicas.count, strength, rows_of(row(body, 0)), rows_of(tail)
        )  # fmt: skip
        collector = Collector(outcome, replicas, self.live, counts.batches(replicas.count))
        updates = _Updates(self, resident, body, tail, begin, remainder, collector)

        kept = collector.start(begin.metrics, self.results[0], self.results[1], length(body))
        # Boxes are made once for all updates: filling so much memory with zeros takes as long as some steps.
        first = begin, kept, self.full.boxes()
        state, kept, _ = lax.fori_loop(0, remainder.updates + (remainder.samples > 0), updates.run, first)
        collector.finish(kept)
        state = self._settle(state, begin)
        return collector.results(state, self._of_last_stage(kept.results)), state

    def _settle(self, state: State, begin: State) -> State:
        """Metrics as the last stage counted them, on all devices; moving statistics averaged over replicas."""
        state = agree(self.replicas, state._replace(metrics=self._of_last_stage(state.metrics)), begin)
        # Seeds have advanced as far as the first replica has data, which is the one that has most.
        seeds = [a if is_float(a) else self.replicas.of_first(a) for a in state.non_trainable]
        return state._replace(non_trainable=seeds)

    def _of_last_stage(self, tree: Tree) -> Tree:
        """What the device of the last stage has, on all devices."""
        return from_device(self.full.table.devices[self.full.last], lax.axis_index(STAGE_AXIS), tree)


@dataclass(frozen=True, slots=True)
class _Updates:
    """The updates of one execution on one device, the last of them perhaps incomplete."""

    of: StagedExecution
    resident: Tree
    body: Tree
    tail: Tree
    begin: State
    remainder: Remainder
    collector: Collector

    def run(self, number: Any, running: Running) -> Running:
        """Update number `number`."""
        spread, full, replicas = self.of.spread, self.of.full, self.of.replicas
        state, kept, boxes = running
        whole = number < self.remainder.updates
        weights, optimizer = numbered(state.trainable), spread.slots(state)[1]
        if replicas.count > 1:
            state = lax.cond(whole, lambda s: s, lambda s: agree(replicas, s, self.begin), state)
        training = spread.update is not None
        total = full.weights.packing.zeros(dtype=full.accumulation.dtype) if training else {}
        carry = TickState(total, numbered(state.non_trainable), state.metrics, kept)
        carry, boxes = full.run(weights, optimizer, carry, self._flow(number, whole), boxes)
        if self.of.tail is not None:
            run = partial(_run_once, self.of.tail, weights, optimizer, self._tail_flow(whole))
            carry = lax.cond(self.remainder.has_tail & ~whole, run, lambda c: c, carry)
        state = state._replace(non_trainable=listed(carry.state), metrics=carry.metrics)
        return (updated(spread, state, carry.total) if training else state), carry.kept, boxes

    def _flow(self, number: Any, whole: Any) -> Flow:
        """The full micro-batches of an update."""
        remainder, size = self.remainder, self.of.micro_batches
        first = number * size

        def keep(kept: Kept, m: Any, result: Tree, active: Any, metrics: list[Any]) -> Kept:
            return self.collector.add(kept, first + m, result, active, metrics)

        return Flow(
            lambda m: fetch(self.resident, row(self.body, first + m)),
            jnp.where(whole, size, remainder.turns),
            jnp.where(whole, size, remainder.turns_of(self.of.replicas.index())),
            self._share(whole, remainder.rows),
            whole,
            keep,
        )

    def _tail_flow(self, whole: Any) -> Flow:
        """The tail, which one replica has. All compute a prediction, because it leaves the program from the first."""

        def keep(kept: Kept, _m: Any, result: Tree, active: Any, metrics: list[Any]) -> Kept:
            return self.collector.add(kept, None, result, active, metrics)

        everywhere = self.of.outcome.collect == "all"
        mine = jnp.asarray(self.remainder.takes_tail(self.of.replicas.index()) | everywhere, jnp.int32)
        share = self._share(whole, self.remainder.tail_rows)
        return Flow(lambda _: fetch(self.resident, self.tail), 1, mine, share, False, keep)

    def _share(self, whole: Any, rows: int) -> Any:
        """How often each gradient of a micro-batch of so many rows counts."""
        return jnp.where(whole, _full_scale(self.of.full.accumulation), self.remainder.share(rows))


def _run_once(pipeline: Pipeline, weights: Any, optimizer: list[Any], flow: Flow, carry: TickState) -> TickState:
    return pipeline.run(weights, optimizer, carry, flow, pipeline.boxes())[0]


def updated(spread: StageLayout, state: State, total: Any) -> State:
    """The state after an update with these gradients."""
    assert spread.update is not None
    slots, common = spread.slots(state)
    weights, slots, common = spread.update.apply(numbered(state.trainable), slots, common, total)
    return spread.with_optimizer(state._replace(trainable=listed(weights)), slots, common)


def _full_scale(accumulation: Accumulation) -> float:
    """How often a gradient counts in a full update: a mean is built from scaled summands."""
    return accumulation.strength(1) / accumulation.steps
