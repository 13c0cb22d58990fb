"""The compiled loop: one program runs all steps of an execution.

train, test and predict are three step functions (model.py) of the one loop written here. A `Loop` belongs to a model
and a mode, and keeps one compiled program per shape of slab.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .convolution import rewrite
from .feed import Slab
from .model import State, Step

log = logging.getLogger("openipu")

Tree = Any


@dataclass(frozen=True, slots=True)
class Program:
    """A compiled execution, and the facts about it that reports show."""

    call: Callable[..., tuple[Any, State]]
    compile_seconds: float
    tail: Tree
    """Shapes of the tail that it was compiled with, or None."""


@dataclass(frozen=True, slots=True)
class Result:
    """What one launch gave back: logs, or for predict the outputs of every row of the slab."""

    value: Any
    slab: Slab

    def rows(self) -> Tree:
        """The outputs in data order, without those of unused rows, as host arrays."""
        body, tail = self.value

        def join(block: Any, rest: Any) -> np.ndarray:
            kept = np.asarray(block)[: self.slab.count].reshape(-1, *block.shape[2:])
            return np.concatenate([kept, np.asarray(rest)]) if self.slab.has_tail else kept

        return jax.tree.map(join, body, body if tail is None else tail)


class Loop:
    """Runs slabs of data through a step function, compiling once per shape."""

    def __init__(self, step: Step, device: Any, compiler_options: dict[str, Any] | None = None) -> None:
        self._step = step
        self._device = device
        self._options = compiler_options
        self.programs: dict[Any, Program] = {}

    def execute(self, state: State, resident: Tree, slab: Slab) -> tuple[list[Result], State]:
        """Run one slab, normally in one launch."""
        fixed = _shapes((state, resident))
        results = []
        for part in self._parts(fixed, slab):
            program = self._program(fixed, state, resident, part)
            arguments = (part.body, np.int32(part.count), part.tail, np.bool_(part.has_tail))
            value, state = program.call(state, resident, *arguments)
            results.append(Result(value, part))
        return results, state

    def execute_one(self, state: State, batch: Tree) -> tuple[Result, State]:
        """Run a single batch that is not part of a feed."""
        [result], state = self.execute(state, None, _single(jax.device_put(batch, self._device)))
        return result, state

    def _parts(self, fixed: Tree, slab: Slab) -> list[Slab]:
        """The slab, or, where its tail was not foreseen when the program was compiled, its body and then its tail."""
        if slab.body is None:
            return [_single(slab.tail)]
        program = self.programs.get((fixed, _shapes(slab.body)))
        if program is None or program.tail == _shapes(slab.tail):
            return [slab]
        body = replace(slab, tail=_zeros(program.tail), has_tail=False)
        return [body, _single(slab.tail)] if slab.has_tail else [body]

    def _program(self, fixed: Tree, state: State, resident: Tree, slab: Slab) -> Program:
        key = (fixed, _shapes(slab.body))
        if key not in self.programs:
            self.programs[key] = self._compile(state, resident, slab)
        return self.programs[key]

    def _compile(self, state: State, resident: Tree, slab: Slab) -> Program:
        start = time.perf_counter()
        step = replace(self._step, run=rewrite(self._step.run, self._device.platform))

        def execution(state: State, *arguments: Any) -> tuple[Any, State]:
            return run_execution(step, state, *arguments)

        lowered = jax.jit(execution, donate_argnums=0).lower(
            state, resident, slab.body, np.int32(0), slab.tail, np.bool_(False)
        )
        compiled = lowered.compile(self._options)
        seconds = time.perf_counter() - start
        log.debug("compiled a program for slabs of %s in %.2f s", _shapes(slab.body), seconds)
        return Program(compiled, seconds, _shapes(slab.tail))


def run_execution(
    step: Step, state: State, resident: Tree, body: Tree, count: Any, tail: Tree, has_tail: Any
) -> tuple[Any, State]:
    """`count` steps over the batches in `body`, then one over `tail` if there is one. This is what is compiled."""
    fetch = _gather(resident) if resident is not None else lambda batch: batch
    keep = {"none": _keep_nothing, "last": _keep_last, "all": _keep_all}[step.collect]

    def one(carry: tuple[State, Tree], index: Any, batch: Tree) -> tuple[State, Tree]:
        state, kept = carry
        new, result = step.run(state, fetch(batch))
        return _as_before(new, state), keep(kept, index, result)

    def empty(rows: int, batch: Tree) -> Tree:
        _, result = jax.eval_shape(lambda s, b: step.run(s, fetch(b)), state, batch)
        return {"none": (), "last": _zeros(_shapes(result)), "all": _zeros(_shapes(result), rows)}[step.collect]

    def from_body(index: Any, carry: tuple[State, Tree]) -> tuple[State, Tree]:
        return one(carry, index, jax.tree.map(lambda a: a[index], body))

    width = jax.tree.leaves(body)[0].shape[0]
    state, kept = lax.fori_loop(0, count, from_body, (state, empty(width, jax.tree.map(lambda a: a[0], body))))
    kept_tail = None
    if tail is not None:
        start = (state, empty(1, tail) if step.collect == "all" else kept)
        state, kept_tail = lax.cond(has_tail, lambda c: one(c, 0, tail), lambda c: c, start)
    if step.collect == "all":
        return (kept, jax.tree.map(lambda a: a[0], kept_tail)), state
    return (step.finish(state) if step.finish else kept if tail is None else kept_tail), state


def _keep_nothing(kept: Tree, index: Any, result: Tree) -> Tree:
    return ()


def _keep_last(kept: Tree, index: Any, result: Tree) -> Tree:
    return _as_before(result, kept)


def _keep_all(kept: Tree, index: Any, result: Tree) -> Tree:
    return jax.tree.map(lambda all_rows, row: lax.dynamic_update_index_in_dim(all_rows, row, index, 0), kept, result)


def _as_before(new: Tree, old: Tree) -> Tree:
    """`new` with the dtypes of `old`: what a Keras variable does on assignment, and what a loop needs."""
    return jax.tree.map(lambda a, b: jnp.asarray(a, b.dtype), new, old)


def _gather(resident: Tree) -> Callable[[Any], Tree]:
    return lambda rows: jax.tree.map(lambda a: a.at[rows].get(mode="promise_in_bounds"), resident)


def _single(batch: Tree) -> Slab:
    return Slab(0, 1, jax.tree.map(lambda a: a[None], batch), None, False)


def _shapes(tree: Tree) -> Tree:
    """A hashable description of the arrays in `tree`, or None for None."""
    if tree is None:
        return None
    leaves, structure = jax.tree.flatten(tree)
    return structure, tuple((a.shape, np.dtype(a.dtype)) for a in leaves)


def _zeros(shapes: Tree, rows: int | None = None) -> Tree:
    """Arrays of zeros of the given shapes, each with `rows` of them in front if asked."""
    if shapes is None:
        return None
    structure, leaves = shapes
    front = () if rows is None else (rows,)
    return jax.tree.unflatten(structure, [jnp.zeros((*front, *shape), dtype) for shape, dtype in leaves])
