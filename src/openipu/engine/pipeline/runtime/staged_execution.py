"""What one execution of a pipelined model computes: updates, each of them a run through the schedule's table.

The same counts and rules as in loop/execution.py. Micro-batches that do not fill an update go through the same table,
in which those that are missing are skipped; a smaller last batch goes through a table of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

from openipu.engine.core.accumulation import Accumulation
from openipu.engine.core.state import State, Step
from openipu.engine.devices.replicas import STAGE_AXIS, Replicas
from openipu.engine.host_io.step_logs import StepLogs
from openipu.engine.loop.execution import (  # fmt: skip
    Counts,
    Kept,
    agree,
    fetch,
    is_float,
    keep,
    logs_of,
    nothing_told,
    results_of,
    room,
    row,
    rows_of,
)

import jax
import jax.numpy as jnp
from jax import lax

from .stage_layout import StageLayout
from .stage_update import from_device
from .ticks import Boxes, Flow, Pipeline, TickState
from .variable_store import listed, numbered

Tree = Any


@dataclass(frozen=True, slots=True)
class StagedExecution:
    """The static part of an execution: pipelines for full micro-batches and for the tail, and what is collected."""

    step: Step
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
        """Run a slab on one device; gives what the step collects, and the new state."""
        replicas, size = self.replicas, self.micro_batches
        accumulation = self.full.accumulation
        training = self.spread.update is not None
        begin = state = self.step.begin(state) if self.step.begin is not None else state
        batches = counts.steps * replicas.count + counts.extra
        updates = counts.steps // size
        left = counts.steps - updates * size
        mine_left = left + (replicas.index() < counts.extra)
        most_left = left + (counts.extra > 0)
        rows, tail_rows = rows_of(row(body, 0)), rows_of(tail)
        samples = rows * (left * replicas.count + counts.extra) + tail_rows * counts.has_tail
        of_tail = replicas.index() == counts.extra if self.step.collect != "all" else True

        def one_update(number: Any, live: tuple[State, Tree, Boxes]) -> tuple[State, Tree, Boxes]:
            state, kept, boxes = live
            whole = number < updates
            weights, optimizer = numbered(state.trainable), self.spread.slots(state)[1]

            def share(rows: int) -> Any:
                rest = rows * accumulation.strength(replicas.count) / jnp.maximum(samples, 1)
                return jnp.where(whole, _full_scale(accumulation), rest)

            if replicas.count > 1:
                state = lax.cond(whole, lambda s: s, lambda s: agree(replicas, s, begin), state)
            total = self.full.weights.packing.zeros(dtype=accumulation.dtype) if training else {}
            carry = TickState(total, numbered(state.non_trainable), state.metrics, kept)
            flow = Flow(
                lambda m: fetch(resident, row(body, number * size + m)),
                jnp.where(whole, size, most_left),
                jnp.where(whole, size, mine_left),
                share(rows),
                whole,
                partial(self._keep, batches, number * size),
            )
            carry, boxes = self.full.run(weights, optimizer, carry, flow, boxes)
            if self.tail is not None:
                mine = jnp.asarray(of_tail, jnp.int32)
                of_last = partial(self._keep, batches, None)
                once = Flow(lambda _: fetch(resident, tail), 1, mine, share(tail_rows), False, of_last)
                run = partial(self._tail_of, self.tail, weights, optimizer, once)
                carry = lax.cond(counts.has_tail & ~whole, run, lambda c: c, carry)
            state = state._replace(non_trainable=listed(carry.state), metrics=carry.metrics)
            return (updated(self.spread, state, carry.total) if training else state), carry.kept, boxes

        told = nothing_told(self.live, self.step, replicas, state.metrics, self.results[0])
        kept = Kept(room(self.step, self.results[0], self.results[1], size_of(body)), told)
        # Made once for all updates: filling so much memory with zeros takes as long as some steps.
        first = (state, kept, self.full.boxes())
        state, kept, _ = lax.fori_loop(0, updates + (samples > 0), one_update, first)
        if self.live is not None:
            self.live.outlet.flush(kept.told, replicas.index(), replicas.is_first())
        state = self._settle(state, begin)
        return self._results(state, kept.results), state

    def _tail_of(self, tail: Pipeline, weights: Any, optimizer: list[Any], flow: Flow, carry: TickState) -> TickState:
        return tail.run(weights, optimizer, carry, flow, tail.boxes())[0]

    # --- results

    def _keep(
        self, batches: Any, first: Any, kept: Kept, m: Any, result: Tree, active: Any, metrics: list[Any]
    ) -> Kept:
        """The results with those of micro-batch m, on the device of the last stage. The tail has no `first`."""
        step, replicas, told = self.step, self.replicas, kept.told
        index = None if first is None else first + m
        if self.live is not None and not (index is None and step.collect == "all"):
            done = batches + 1 if index is None else jnp.minimum((index + 1) * replicas.count, batches)
            logs = logs_of(step, replicas, metrics, result, active)
            told = self.live.outlet.put(told, (done, logs), replicas.index(), replicas.is_first())
        return Kept(keep(step, kept.results, index, result, active), told)

    def _settle(self, state: State, begin: State) -> State:
        """Metrics as the last stage counted them, on all devices; moving statistics averaged over replicas."""
        last = self.full.table.devices[self.full.last]
        metrics = from_device(last, lax.axis_index(STAGE_AXIS), state.metrics)
        state = agree(self.replicas, state._replace(metrics=metrics), begin)
        # Seeds have gone on as far as the first replica has data, which is the one that has most.
        seeds = [a if is_float(a) else self.replicas.of_first(a) for a in state.non_trainable]
        return state._replace(non_trainable=seeds)

    def _results(self, state: State, kept: Tree) -> Tree:
        last = self.full.table.devices[self.full.last]
        kept = from_device(last, lax.axis_index(STAGE_AXIS), kept)
        if self.step.collect != "all":
            return results_of(self.step, self.replicas, state, kept)
        body, tail = kept
        return jax.tree.map(lambda a: a[:, None], body), tail


def updated(spread: StageLayout, state: State, total: Any) -> State:
    """The state after an update with these gradients."""
    assert spread.update is not None
    slots, common = spread.slots(state)
    weights, slots, common = spread.update.apply(numbered(state.trainable), slots, common, total)
    return spread.with_optimizer(state._replace(trainable=listed(weights)), slots, common)


def _full_scale(accumulation: Accumulation) -> float:
    """How often a gradient counts in a full update: a mean is built from scaled summands."""
    return accumulation.strength(1) / accumulation.steps


def size_of(body: Tree) -> int:
    """Batches in a slab's body."""
    return int(jax.tree.leaves(body)[0].shape[0])
