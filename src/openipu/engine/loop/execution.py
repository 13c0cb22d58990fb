"""What one program computes on one replica, as a pure function. replica_loop.py compiles it.

    for each update:  for each of its micro-batches: forward, backward, accumulate;  reduce over replicas;  apply

Micro-batches that do not fill an update make one last update (remainder.py), together with a smaller last batch: see
[Note: the last partial batch] in data/slab.py. Evaluation and prediction are the same loop without gradients and
updates.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from openipu.engine.convolution import rewrite
from openipu.engine.core.accumulation import Accumulation
from openipu.engine.core.enqueued import Enqueued, collecting
from openipu.engine.core.state import Outcome, Spot, State, Step
from openipu.engine.devices.replicas import Replicas
from openipu.engine.host_io.step_logs import StepLogs
from openipu.engine.types import Array, Tree

import jax
import jax.numpy as jnp
from jax import lax

from .arrays import as_before, fetch, length, row, rows_of
from .loop_shape import repeat
from .outfeeds import Outfeeds, Specs
from .remainder import Counts, Form, Number, Remainder
from .replica_state import agree, counters, only_if, with_counters
from .results import Collector, Kept

Add = Callable[[Tree, Tree], Tree]
"""Adds the gradients of a micro-batch to the accumulated gradients: (accumulated, new) -> accumulated."""
Running = tuple[State, Kept]
"""What one update hands to the next."""


@dataclass(frozen=True, slots=True)
class Layout:
    """The static part of a program."""

    form: Form
    replicas: Replicas
    accumulation: Accumulation
    live: StepLogs | None = None
    """Receives the logs of each step while the execution runs."""
    outfeeds: Specs | None = None
    """The outfeeds that the step fills."""


class _Carry(NamedTuple):
    state: State
    total: Tree  # accumulated gradients
    kept: Kept


def run_execution(
    step: Step, layout: Layout, state: State, resident: Tree, body: Tree, counts: Counts, tail: Tree
) -> tuple[Any, State]:
    """Run steps of a slab. Returns the results and the new state. `body` holds the batches of this replica by step."""
    replicas, accumulation, outcome = layout.replicas, layout.accumulation, step.outcome
    begin = begun(outcome, state, counts)
    strength = accumulation.strength(replicas.count)
    remainder = Remainder.of(
        counts, accumulation.steps, replicas.count, strength, rows_of(row(body, 0)), rows_of(tail), outcome.adds
    )  # fmt: skip
    outfeeds = Outfeeds(layout.outfeeds, replicas)
    collector = Collector(outcome, replicas, layout.live, counts.first, counts.batches(replicas.count), outfeeds)
    micro = rewrite(collecting(step.micro), replicas.platform)
    execution = Execution(step, micro, layout, resident, body, tail, begin, remainder, collector)

    running = begin, execution.room()
    if layout.form.updates != "none":
        most = length(body) // accumulation.steps
        known = layout.form.updates == "all"
        running = repeat(execution.whole_update, running, remainder.updates, most, known=known)
    if layout.form.turns or tail is not None:
        running = execution.last_update(running)
    state, kept = running
    collector.finish(kept)
    return collector.results(state, kept.results), agree(replicas, state, begin)


def begun(outcome: Outcome, state: State, counts: Counts) -> State:
    """The state at the start of a program. If it continues an execution, this is the state as it is."""
    if outcome.begin is None:
        return state
    fresh: State = jax.tree.map(lambda a, b: jnp.where(counts.first == 0, a, b), outcome.begin(state), state)
    return fresh


@dataclass(frozen=True, slots=True)
class Execution:
    """A program at work on one replica: what runs, and on which data."""

    step: Step
    micro: Callable[..., tuple[tuple[State, list[Any], Any], Enqueued]]
    """The step's `micro`, rewritten. It also returns what it enqueues."""
    layout: Layout
    resident: Tree
    body: Tree
    tail: Tree
    begin: State
    """The state at the start of the program."""
    remainder: Remainder
    collector: Collector

    @property
    def replicas(self) -> Replicas:
        """The replicas that run this program together."""
        return self.layout.replicas

    @property
    def accumulation(self) -> Accumulation:
        """How gradients are accumulated."""
        return self.layout.accumulation

    def room(self) -> Kept:
        """Empty room for results, as it is before the first step."""
        form, result, of_tail = self.layout.form, None, None
        if self.step.outcome.collect != "none":
            result = self._result(row(self.body, 0)) if form != Form() else None
            of_tail = None if self.tail is None else self._result(self.tail)
        rows = length(self.body) if form.updates != "none" else self.accumulation.steps
        return self.collector.start(self.begin.metrics, result, of_tail, rows)

    def whole_update(self, number: Number, running: Running) -> Running:
        """The update with this number, for which every replica has all micro-batches."""
        size = self.accumulation.steps
        carry = self._start(*running)
        if size == 1:
            number = self.collector.first + number
            carry = self._micro(carry, number, row(self.body, number), self._in_whole(0))
        else:
            first = self.collector.first + number * size
            carry = lax.fori_loop(
                0, size, lambda i, c: self._micro(c, first + i, row(self.body, first + i), self._in_whole(i)), carry
            )
        return self._applied(carry)

    def last_update(self, running: Running) -> Running:
        """The update with the micro-batches that are left over."""
        remainder = self.remainder
        carry = self._start(agree(self.replicas, running[0], self.begin), running[1])
        before = counters(carry.state)
        if self.layout.form.turns:
            carry, before = self._left_over(carry, before)
        if self.tail is not None:
            # The tail belongs to the same step as the micro-batches of `extra` replicas, so it uses the same seed.
            same_step = self._joins_tail(remainder.extra) > 0
            carry = carry._replace(state=with_counters(carry.state, before, same_step))
            carry = self._of_tail(carry)
        return self._applied(carry)

    def _left_over(self, carry: _Carry, before: list[Array]) -> tuple[_Carry, list[Array]]:
        """Run the full micro-batches that are left over. Also returns the counters from before the last one."""
        remainder, me = self.remainder, self.replicas.index()
        first, add = remainder.first, self._in_last(remainder.rows)

        def turn(i: Number, pair: tuple[_Carry, list[Array]]) -> tuple[_Carry, list[Array]]:
            carry, _ = pair
            active, complete = remainder.is_active(i, me), i < remainder.left
            batch = row(self.body, first + i)
            return self._micro(carry, first + i, batch, add, active, complete=complete), counters(carry.state)

        after: tuple[_Carry, list[Array]] = lax.fori_loop(0, remainder.turns, turn, (carry, before))
        return after

    def _of_tail(self, carry: _Carry) -> _Carry:
        """Run the tail, which one replica has. All replicas predict it, because outputs leave from the first one."""
        remainder, me = self.remainder, self.replicas.index()
        active = remainder.takes_tail(me) | (self.step.outcome.collect == "all")
        spot = Spot(self._joins_tail(remainder.extra) * remainder.rows, remainder.replicas * remainder.rows)
        alone = self.replicas.count == 1
        return self._micro(carry, None, self.tail, self._in_last(remainder.tail_rows), active, spot, complete=alone)

    def _joins_tail(self, extra: Number) -> Number:
        """The number of replicas in the step of the tail, before the one that has it."""
        return 0 if self.step.applies else extra

    def _micro(
        self,
        carry: _Carry,
        index: Number | None,
        batch: Tree,
        add: Add,
        active: Number | None = None,
        spot: Spot | None = None,
        complete: Number = True,
    ) -> _Carry:
        """Run one micro-batch, or the tail if `index` is None. What an inactive replica computes is thrown away.

        `complete` says whether every replica has a micro-batch.
        """
        mask = active if self.replicas.count > 1 else None
        where = () if mask is None else (mask, spot)
        (new, gradients, result), enqueued = self.micro(carry.state, fetch(self.resident, batch), *where)
        new = as_before(new, carry.state)
        total = add(carry.total, gradients) if self.step.update else ()
        if mask is not None:
            new = only_if(mask, self.replicas, new, carry.state, self.step.applies)
            total = jax.tree.map(lambda a, b: jnp.where(mask, a, b), total, carry.total)
        kept = self.collector.add(carry.kept, index, result, True if mask is None else mask, new.metrics)
        if enqueued.outfeeds:
            whole = enqueued if index is not None else self._shapes(row(self.body, 0))[1]
            self.collector.outfeeds.foresee(whole.specs())
        return _Carry(new, total, self._put(kept, enqueued, complete))

    def _put(self, kept: Kept, enqueued: Enqueued, complete: Number = True) -> Kept:
        return kept._replace(cells=self.collector.outfeeds.put(kept.cells, enqueued, complete))

    def _start(self, state: State, kept: Kept) -> _Carry:
        return _Carry(state, self.accumulation.start(state.trainable) if self.step.update else (), kept)

    def _applied(self, carry: _Carry) -> Running:
        if self.step.update is None:
            return carry.state, carry.kept
        new, enqueued = collecting(self.step.update)(carry.state, carry.total)
        if enqueued.outfeeds:
            both = Enqueued.joined([self._shapes(row(self.body, 0))[1], enqueued])
            self.collector.outfeeds.foresee(both.specs())
        return as_before(new, carry.state), self._put(carry.kept, enqueued)

    def _in_whole(self, position: Number) -> Add:
        """How gradients are added at `position` in a whole update."""
        return lambda total, gradients: self.accumulation.add(total, gradients, position)

    def _in_last(self, rows: int) -> Add:
        """How the gradients of `rows` samples are added in the last update."""
        return lambda total, gradients: self.accumulation.add_scaled(total, gradients, self.remainder.share(rows))

    def _result(self, batch: Tree) -> Tree:
        """The shapes of a micro-batch's results."""
        return self._shapes(batch)[0]

    def _shapes(self, batch: Tree) -> tuple[Tree, Enqueued]:
        """The shapes of a micro-batch's results, and of what it enqueues."""

        def run(state: State, resident: Tree, batch: Tree) -> tuple[Tree, Enqueued]:
            (_, _, result), enqueued = collecting(self.step.micro)(state, fetch(resident, batch))
            return result, enqueued

        shapes: tuple[Tree, Enqueued] = jax.eval_shape(run, self.begin, self.resident, batch)
        return shapes
