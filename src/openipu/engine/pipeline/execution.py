"""What one execution of a pipelined model computes: updates, each of them a run through the schedule's table.

The same counts and rules as in engine/execution.py. Micro-batches that do not fill an update go through the same table,
in which those that are missing are skipped; a smaller last batch goes through a table of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from openipu.engine.accumulate import Accumulation
from openipu.engine.execution import Counts, agree, as_before, fetch, row, rows_of, zeros
from openipu.engine.live import Live
from openipu.engine.replicate import STAGE_AXIS, Replicas
from openipu.engine.state import State, Step

import jax
import jax.numpy as jnp
from jax import lax

from .execute import Carry, Flow, Pipeline
from .spread import StageSpread
from .stages import is_float
from .store import listed, numbered
from .update import from_device

Tree = Any


@dataclass(frozen=True, slots=True)
class StagedExecution:
    """The static part of an execution: pipelines for full micro-batches and for the tail, and what is collected."""

    step: Step
    spread: StageSpread
    full: Pipeline
    tail: Pipeline | None
    micro_batches: int
    """Those of one update."""
    results: Tree
    """Shapes of the last stage's results, for a full micro-batch and for the tail."""
    live: Live | None = None
    """Who is told the logs after each update while the execution runs."""

    @property
    def replicas(self) -> Replicas:
        """Where it runs."""
        return self.spread.replicas

    def run(self, state: State, resident: Tree, body: Tree, counts: Counts, tail: Tree) -> tuple[Any, State]:
        """Run a slab on one device; gives what the step collects, and the new state."""
        replicas, size = self.replicas, self.micro_batches
        accumulation = self.full.accumulation
        training = self.spread.update is not None
        begin = state
        updates = counts.steps // size
        left = counts.steps - updates * size
        mine_left = left + (replicas.index() < counts.extra)
        most_left = left + (counts.extra > 0)
        rows, tail_rows = rows_of(row(body, 0)), rows_of(tail)
        samples = rows * (left * replicas.count + counts.extra) + tail_rows * counts.has_tail
        of_tail = replicas.index() == counts.extra if self.step.collect != "all" else True

        def one_update(number: Any, carried: tuple[State, Tree, Tree]) -> tuple[State, Tree, Tree]:
            state, kept, told = carried
            whole = number < updates
            weights, optimizer = numbered(state.trainable), self.spread.slots(state)[1]

            def share(rows: int) -> Any:
                rest = rows * accumulation.strength(replicas.count) / jnp.maximum(samples, 1)
                return jnp.where(whole, _full_scale(accumulation), rest)

            if replicas.count > 1:
                state = lax.cond(whole, lambda s: s, lambda s: agree(replicas, s, begin), state)
            total = self.full.weights.packing.zeros(dtype=accumulation.dtype) if training else {}
            carry = Carry(total, numbered(state.non_trainable), state.metrics, kept[0])
            flow = Flow(
                lambda m: fetch(resident, row(body, number * size + m)),
                jnp.where(whole, size, most_left),
                jnp.where(whole, size, mine_left),
                share(rows),
                whole,
                self._keeper(number * size),
            )
            carry = self.full.run(weights, optimizer, carry, flow)
            kept = (carry.kept, kept[1])
            if self.tail is not None:
                once = Flow(
                    lambda _: fetch(resident, tail), 1, jnp.asarray(of_tail, jnp.int32), share(tail_rows),
                    False, self._keeper(0),
                )  # fmt: skip
                separate = self.step.collect == "all"
                carry = carry._replace(kept=kept[1]) if separate else carry
                run = partial(self.tail.run, weights, optimizer, flow=once)
                carry = lax.cond(counts.has_tail & ~whole, run, lambda c: c, carry)
                kept = (kept[0], carry.kept) if separate else (carry.kept, kept[1])
            state = state._replace(non_trainable=listed(carry.state), metrics=carry.metrics)
            batches = counts.steps * replicas.count + counts.extra + counts.has_tail
            told = self._tell(told, jnp.where(whole, (number + 1) * size * replicas.count, batches), state, kept)
            return (self._updated(state, carry.total) if training else state), kept, told

        kept = (self._room(self.results[0], size_of(body)), self._room(self.results[1], 1))
        start = (state, kept, self._nothing_told(state, kept))
        state, kept, told = lax.fori_loop(0, updates + (samples > 0), one_update, start)
        if self._tells:
            self.live.outlet.flush(told, replicas.index(), self._is_first)  # type: ignore[union-attr]
        state = self._settle(state, begin)
        return self._results(state, kept), state

    def _updated(self, state: State, total: Any) -> State:
        assert self.spread.update is not None
        slots, common = self.spread.slots(state)
        weights, slots, common = self.spread.update.apply(numbered(state.trainable), slots, common, total)
        return self.spread.with_optimizer(state._replace(trainable=listed(weights)), slots, common)

    # --- what leaves the program while it runs

    @property
    def _tells(self) -> bool:
        return self.live is not None and self.step.collect != "all"

    @property
    def _is_first(self) -> Any:
        """Whether this device speaks for all."""
        return (self.replicas.index() == 0) & (lax.axis_index(STAGE_AXIS) == 0)

    def _nothing_told(self, state: State, kept: Tree) -> Tree:
        if self.live is None or not self._tells:
            return ()
        logs = jax.eval_shape(self._logs, state, kept)
        self.live.describe(logs)
        return self.live.outlet.start((jax.ShapeDtypeStruct((), jnp.int32), logs))

    def _tell(self, told: Tree, done: Any, state: State, kept: Tree) -> Tree:
        if self.live is None or not self._tells:
            return ()
        logs = (jnp.asarray(done, jnp.int32), self._logs(state, kept))
        return self.live.outlet.put(told, logs, self.replicas.index(), self._is_first)

    def _logs(self, state: State, kept: Tree) -> Tree:
        last = self.full.table.devices[self.full.last]
        return self._results(state._replace(metrics=from_device(last, lax.axis_index(STAGE_AXIS), state.metrics)), kept)

    # --- results

    def _room(self, shapes: Tree, rows: int) -> Tree:
        if self.step.collect == "none" or shapes is None:
            return ()
        if self.step.collect == "all":
            return zeros(shapes, rows)
        return zeros(shapes), jnp.zeros((), bool)

    def _keeper(self, first: Any) -> Callable[[Tree, Any, Tree, Any], Tree]:
        def keep(kept: Tree, m: Any, result: Tree, active: Any) -> Tree:
            if self.step.collect == "none":
                return ()
            if self.step.collect == "last":
                return as_before((result, active), kept)
            return jax.tree.map(
                lambda rows, new: lax.dynamic_update_index_in_dim(rows, new, first + m, 0), kept, result
            )

        return keep

    def _settle(self, state: State, begin: State) -> State:
        """Metrics as the last stage counted them, on all devices; moving statistics averaged over replicas."""
        last = self.full.table.devices[self.full.last]
        metrics = from_device(last, lax.axis_index(STAGE_AXIS), state.metrics)
        state = agree(self.replicas, state._replace(metrics=metrics), begin)
        # Seeds have gone on as far as the first replica has data, which is the one that has most.
        seeds = [a if is_float(a) else self.replicas.of_first(a) for a in state.non_trainable]
        return state._replace(non_trainable=seeds)

    def _results(self, state: State, kept: Tree) -> Tree:
        step, replicas = self.step, self.replicas
        if step.collect == "none":
            return step.finish(state) if step.finish is not None else {}
        last = self.full.table.devices[self.full.last]
        kept = from_device(last, lax.axis_index(STAGE_AXIS), kept)
        if step.collect == "last":
            known = step.finish(state) if step.finish is not None else {}
            logs = replicas.mean_of_active(*kept[0]) if replicas.count > 1 else kept[0][0]
            return {name: known.get(name, value) for name, value in logs.items()}
        body, tail = kept
        return jax.tree.map(lambda a: a[:, None], body), (row(tail, 0) if self.tail is not None else None)


def _full_scale(accumulation: Accumulation) -> float:
    """How often a gradient counts in a full update: a mean is built from scaled summands."""
    return accumulation.strength(1) / accumulation.steps


def size_of(body: Tree) -> int:
    """Batches in a slab's body."""
    return int(jax.tree.leaves(body)[0].shape[0])
