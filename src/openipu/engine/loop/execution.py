"""What one execution computes, as a pure function of one replica. loop.py compiles it.

    for each update:  for each of its micro-batches: forward, backward, accumulate;  reduce over replicas;  apply

and then the rest of the data: micro-batches that do not fill an update, a step for which only some replicas have a
micro-batch, and the tail (data/slab.py, [Note: the last partial batch]). Together they make one last update, in which
each sample counts the same and which is as strong as a full one: what one device with the whole batch would do.
Evaluation and prediction are the same loop without gradients and updates.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from openipu.engine.core.accumulation import Accumulation
from openipu.engine.core.state import Spot, State, Step
from openipu.engine.devices.replicas import Replicas
from openipu.engine.host_io.step_logs import StepLogs

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

Tree = Any
Add = Callable[[Tree, Tree], Tree]


@dataclass(frozen=True, slots=True)
class LoopShape:
    """How the loop over updates is laid out.

    A GPU runs a loop of known length without the host, but asks the host before each turn of a loop of unknown length,
    20 microseconds each on an H200. `known` gives a full execution a loop of its own, of known length; only a short
    last one runs in the other. `unroll` turns in a row take the loop's own kernels off small steps (an MLP's fell from
    31 to 26 microseconds) but multiply compile time.
    """

    known: bool = False
    unroll: int = 1


SMALL_STEP = 300
"""Equations up to which a step is small: launching its kernels costs more than running them."""


def loop_shape(platform: str, equations: Callable[[], int]) -> LoopShape:
    """The measured rule for `platform`; `equations` counts those of the step and is only asked where it matters."""
    if platform != "gpu":
        return LoopShape()
    return LoopShape(True, 4 if equations() <= SMALL_STEP else 1)


@dataclass(frozen=True, slots=True)
class Layout:
    """The static part of an execution."""

    replicas: Replicas
    accumulation: Accumulation
    loop_shape: LoopShape
    live: StepLogs | None = None
    """Who is told the logs of each step while the execution runs."""


class Counts(NamedTuple):
    """The part of an execution that may differ from launch to launch: how much of the slab is there.

    It travels as one array, because each array sent costs a GPU's launch some microseconds.
    """

    steps: Any
    """Steps for which every replica has a micro-batch."""
    extra: Any
    """Replicas that have one micro-batch more."""
    has_tail: Any
    """Whether the next replica after those has the tail."""

    def pack(self) -> np.ndarray:
        """As one array."""
        return np.array(self, np.int32)

    @classmethod
    def unpack(cls, packed: Any) -> Counts:
        """The inverse of `pack`, inside the program."""
        return cls(packed[0], packed[1], packed[2] > 0)


class Kept(NamedTuple):
    """What leaves the program: results at its end, and what `live` is told meanwhile."""

    results: Tree
    told: Tree


class _Carry(NamedTuple):
    state: State
    total: Tree  # accumulated gradients
    kept: Kept


def run_execution(
    step: Step, layout: Layout, state: State, resident: Tree, body: Tree, counts: Counts, tail: Tree
) -> tuple[Any, State]:
    """Run a slab; gives what `step` collects, and the new state. `body` holds this replica's batches by step."""
    replicas, accumulation = layout.replicas, layout.accumulation
    size = accumulation.steps
    me = replicas.index()
    begin = state = step.begin(state) if step.begin is not None else state
    batches = counts.steps * replicas.count + counts.extra

    def micro(carry: _Carry, index: Any, batch: Tree, add: Add, active: Any = None, spot: Spot | None = None) -> _Carry:
        """One micro-batch, the tail if it has no index. A replica that is not `active` computes it in vain."""
        some = active is not None and replicas.count > 1
        new, gradients, result = step.micro(carry.state, fetch(resident, batch), *(active, spot) * some)
        new = as_before(new, carry.state)
        total = add(carry.total, gradients) if step.update else ()
        if some:
            new = _only_if(active, replicas, new, carry.state)
            total = jax.tree.map(lambda a, b: jnp.where(active, a, b), total, carry.total)
        results, told = carry.kept
        if layout.live is not None and not (index is None and step.collect == "all"):
            done = batches + 1 if index is None else jnp.minimum((index + 1) * replicas.count, batches)
            logs = logs_of(step, replicas, new.metrics, result, active if some else True)
            told = layout.live.outlet.put(told, (done, logs), me, replicas.is_first())
        return _Carry(new, total, Kept(keep(step, results, index, result, active if some else True), told))

    def full(position: Any) -> Add:
        return lambda total, gradients: accumulation.add(total, gradients, position)

    def applied(carry: _Carry) -> _Carry:
        if step.update is None:
            return carry
        return carry._replace(state=as_before(step.update(carry.state, carry.total), carry.state), total=())

    def start(state: State, kept: Kept) -> _Carry:
        return _Carry(state, accumulation.start(state.trainable) if step.update else (), kept)

    def one_update(number: Any, pair: tuple[State, Kept]) -> tuple[State, Kept]:
        carry = start(*pair)
        if size == 1:
            carry = micro(carry, number, row(body, number), full(0))
        else:
            first = number * size
            carry = lax.fori_loop(0, size, lambda i, c: micro(c, first + i, row(body, first + i), full(i)), carry)
        carry = applied(carry)
        return carry.state, carry.kept

    width = jax.tree.leaves(body)[0].shape[0]

    def result(batch: Tree) -> Tree:
        return jax.eval_shape(lambda s, r, b: step.micro(s, fetch(r, b))[2], state, resident, batch)

    shapes = (None, None) if step.collect == "none" else (result(row(body, 0)), None if tail is None else result(tail))
    kept = Kept(
        room(step, shapes[0], shapes[1], width), nothing_told(layout.live, step, replicas, state.metrics, shapes[0])
    )
    updates = counts.steps // size if size > 1 else counts.steps
    state, kept = _repeat(one_update, (state, kept), updates, width // size, layout.loop_shape)

    left = counts.steps - updates * size if size > 1 else 0
    more = (counts.extra > 0).astype(np.int32) if replicas.count > 1 else 0
    rows, tail_rows = rows_of(row(body, 0)), rows_of(tail)
    samples = rows * (left * replicas.count + counts.extra) + tail_rows * counts.has_tail

    def share(rows: int) -> Add:
        scale = rows * accumulation.strength(replicas.count) / samples
        return lambda total, gradients: accumulation.add_scaled(total, gradients, scale)

    def rest(pair: tuple[State, Kept]) -> tuple[State, Kept]:
        first = updates * size

        def from_body(i: Any, pair: tuple[_Carry, Tree]) -> tuple[_Carry, Tree]:
            carry, _ = pair
            active = (i < left) | (me < counts.extra)
            return micro(carry, first + i, row(body, first + i), share(rows), active), _counters(carry.state)

        def from_tail(carry: _Carry) -> _Carry:
            # One replica has it. What is predicted leaves the program from the first one, so there all compute it.
            active = me == (me if step.collect == "all" else counts.extra)
            spot = Spot(counts.extra * rows, replicas.count * rows)
            return micro(carry, None, tail, share(tail_rows), active, spot)

        carry = start(agree(replicas, pair[0], begin), pair[1])
        before = _counters(carry.state)
        if size > 1 or replicas.count > 1:
            carry, before = lax.fori_loop(0, left + more, from_body, (carry, before))
        if tail is not None:
            # Tail and the micro-batches of some replicas are one step of one device: the seed is the same.
            same_step = carry._replace(state=_with_counters(carry.state, before, counts.extra > 0))
            carry = lax.cond(counts.has_tail, lambda pair: from_tail(pair[0]), lambda pair: pair[1], (same_step, carry))
        carry = applied(carry)
        return carry.state, carry.kept

    if size > 1 or replicas.count > 1 or tail is not None:
        state, kept = _if(samples > 0, rest, (state, kept))
    if layout.live is not None:
        layout.live.outlet.flush(kept.told, me, replicas.is_first())
    if step.collect != "all":
        return results_of(step, replicas, state, kept.results), agree(replicas, state, begin)
    outputs, of_tail = kept.results
    return (jax.tree.map(lambda a: a[:, None], outputs), of_tail), agree(replicas, state, begin)


def row(body: Tree, index: Any) -> Tree:
    """Batch number `index` of a slab."""
    return jax.tree.map(lambda a: a[index], body)


def fetch(resident: Tree, batch: Tree) -> Tree:
    """The batch itself, or the rows of the resident arrays that it names."""
    if resident is None:
        return batch
    return jax.tree.map(lambda a: a.at[batch].get(mode="promise_in_bounds"), resident)


def rows_of(batch: Tree) -> int:
    """Samples in a batch; 0 without one."""
    leaves = jax.tree.leaves(batch)
    return int(leaves[0].shape[0]) if leaves else 0


def zeros(shapes: Tree, rows: int | None = None) -> Tree:
    """Zeros like a tree of arrays or of their descriptions, each with `rows` of them in front if asked."""
    front = () if rows is None else (rows,)
    return jax.tree.map(lambda s: jnp.zeros((*front, *s.shape), s.dtype), shapes)


def _repeat(body: Callable[[Any, Tree], Tree], carry: Tree, count: Any, most: int, loop_shape: LoopShape) -> Tree:
    """`body(index, carry)` for each index below `count`, which is `most` in all but the last execution."""

    def any_number(carry: Tree) -> Tree:
        return lax.fori_loop(0, count, body, carry)

    def full(carry: Tree) -> Tree:
        return lax.fori_loop(0, most, body, carry, unroll=min(loop_shape.unroll, most))

    if not loop_shape.known or most == 0:
        return any_number(carry)
    return lax.cond(count == most, full, any_number, carry)


def _if(condition: Any, run: Callable[[Tree], Tree], carry: Tree) -> Tree:
    return lax.cond(condition, run, lambda c: c, carry)


def room(step: Step, result: Tree, of_tail: Tree, rows: int) -> Tree:
    """Where results are kept: nothing, those of one step, or those of `rows` steps and of the tail."""
    if step.collect == "none":
        return ()
    if step.collect == "last":
        return zeros(result), jnp.zeros((), bool)
    return zeros(result, rows), None if of_tail is None else zeros(of_tail)


def keep(step: Step, kept: Tree, index: Any, result: Tree, active: Any) -> Tree:
    """Results so far, those of the tail without an index.

    The last ones go with a word on whether this replica was active, so that they mean something.
    """
    if step.collect == "none":
        return ()
    if step.collect == "last":
        return as_before((result, active), kept)
    outputs, of_tail = kept
    if index is None:
        return outputs, as_before(result, of_tail)
    return jax.tree.map(
        lambda rows, new: lax.dynamic_update_index_in_dim(rows, new, index, 0), outputs, result
    ), of_tail


def results_of(step: Step, replicas: Replicas, state: State, kept: Tree) -> Tree:
    """The logs over all replicas: true values of what metrics count, means over the last step of everything else."""
    known = step.finish(state) if step.finish is not None else {}
    if step.collect == "none":
        return known
    logs = replicas.mean_of_active(*kept) if replicas.count > 1 else kept[0]
    return {name: known.get(name, value) for name, value in logs.items()}


def logs_of(step: Step, replicas: Replicas, metrics: list[Any], result: Tree, active: Any) -> Tree:
    """What there is to tell after one step: the logs so far, or for predict the outputs of all replicas."""
    if step.collect == "all":
        return replicas.gather(result)
    return results_of(step, replicas, State([], [], [], metrics), (result, active))


def nothing_told(live: StepLogs | None, step: Step, replicas: Replicas, metrics: list[Any], result: Tree) -> Tree:
    """What `live` has been told before the first step."""
    if live is None:
        return ()
    logs = jax.eval_shape(lambda m, r: logs_of(step, replicas, m, r, True), metrics, result)
    live.describe(logs)
    return live.outlet.start((jax.ShapeDtypeStruct((), jnp.int32), logs))


def as_before(new: Tree, old: Tree) -> Tree:
    """`new` with the dtypes of `old`: what a Keras variable does on assignment, and what a loop needs."""
    return jax.tree.map(lambda a, b: jnp.asarray(a, b.dtype), new, old)


def _only_if(active: Any, replicas: Replicas, new: State, old: State) -> State:
    """The new state if `active`.

    Random seeds go on everywhere, so that they stay equal on all replicas. Moving statistics, equal before, become
    those that the active replicas agree on.
    """

    def choose(a: Any, b: Any) -> Any:
        return jnp.where(active, a, b)

    def settle(a: Any, b: Any) -> Any:
        return b + replicas.mean_of_active(a - b, active) if is_float(a) else a

    return State(
        jax.tree.map(choose, new.trainable, old.trainable),
        [settle(a, b) for a, b in zip(new.non_trainable, old.non_trainable, strict=True)],
        jax.tree.map(choose, new.optimizer, old.optimizer),
        jax.tree.map(choose, new.metrics, old.metrics),
    )


def agree(replicas: Replicas, state: State, begin: State) -> State:
    """Moving statistics averaged over replicas. They are linear in what they see, so once per execution is enough.

    Changes are averaged, not values, so that what did not change stays the same to the bit.
    """
    if replicas.count == 1:
        return state

    def mean(a: Any, b: Any) -> Any:
        return b + replicas.mean(a - b) if is_float(a) else a

    return state._replace(non_trainable=list(map(mean, state.non_trainable, begin.non_trainable)))


def _counters(state: State) -> list[Any]:
    """Random seeds and whatever else counts steps, which is equal on all replicas."""
    return [a for a in state.non_trainable if not is_float(a)]


def _with_counters(state: State, counters: list[Any], condition: Any) -> State:
    """The state with `counters` in it, if `condition`."""
    rest = iter(counters)
    return state._replace(
        non_trainable=[a if is_float(a) else jnp.where(condition, next(rest), a) for a in state.non_trainable]
    )


def is_float(array: Any) -> bool:
    """Whether an array holds floating-point numbers: then gradients flow through it, and means can be taken of it."""
    return bool(jnp.issubdtype(array.dtype, jnp.floating))
