"""The compiled loop: one program runs all steps of an execution.

train, test and predict are three step functions (model.py) of the one loop written here. A `Loop` belongs to a model
and a mode, and keeps one compiled program per shape of slab.
"""

from __future__ import annotations

import functools
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
from .place import Place

log = logging.getLogger("openipu")

Tree = Any


@dataclass(frozen=True, slots=True)
class Pace:
    """How the loop is laid out.

    A GPU runs a loop of known length without the host, but asks the host before each turn of a loop of unknown length,
    20 microseconds each on an H200. So there an execution is a loop of unknown length around loops of `chunk` steps.
    `unroll` steps in a row take the loop's own kernels off small steps (an MLP's fell from 31 to 26 microseconds) but
    multiply compile time.
    """

    chunk: int = 1
    unroll: int = 1


SMALL_STEP = 300
"""Equations up to which a step is small: launching its kernels costs more than running them."""


def pace(platform: str, equations: Callable[[], int]) -> Pace:
    """The measured rule for `platform`; `equations` counts those of the step and is only asked where it matters."""
    if platform != "gpu":
        return Pace()
    return Pace(64, 4 if equations() <= SMALL_STEP else 1)


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

    def __init__(self, name: str, step: Step, place: Place) -> None:
        self._name, self._step, self._place = name, step, place
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
        [result], state = self.execute(state, None, _single(jax.device_put(batch, self._place.device)))
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
        platform = self._place.device.platform
        step = replace(self._step, run=rewrite(self._step.run, platform))
        arguments = (state, resident, slab.body, np.int32(0), slab.tail, np.bool_(False))

        def equations() -> int:
            first = functools.partial(_first_step, self._step)
            return _equations(jax.make_jaxpr(first)(state, resident, slab.body).jaxpr)

        execution = functools.partial(run_execution, step, pace(platform, equations))
        lowered = jax.jit(execution, donate_argnums=0).lower(*arguments)
        compiled = lowered.compile(dict(self._place.compiler_options))
        call = _never_run(lowered) if self._place.compile_only else compiled
        program = Program(call, time.perf_counter() - start, _shapes(slab.tail))
        self._dump(compiled)
        log.debug("%s: compiled for slabs of %s in %.2f s", self._name, _shapes(slab.body), program.compile_seconds)
        return program

    def _dump(self, compiled: Any) -> None:
        """Write the program's text where `serialization_output_folder` asks for it."""
        folder = self._place.dump_folder
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / f"{self._name}_{len(self.programs)}.hlo.txt").write_text(compiled.as_text())


def _never_run(lowered: Any) -> Callable[..., tuple[Any, State]]:
    """In place of a program that is compiled but not run: results are zero and the state stays as it is."""
    results, _ = lowered.out_info
    return lambda state, *_: (_zeros(_shapes(results)), state)


def run_execution(
    step: Step, pace: Pace, state: State, resident: Tree, body: Tree, count: Any, tail: Tree, has_tail: Any
) -> tuple[Any, State]:
    """`count` steps over the batches in `body`, then one over `tail` if there is one. This is what is compiled."""
    keep = {"none": _keep_nothing, "last": _keep_last, "all": _keep_all}[step.collect]

    def one(carry: tuple[State, Tree], index: Any, batch: Tree) -> tuple[State, Tree]:
        state, kept = carry
        new, result = step.run(state, _fetch(resident, batch))
        return _as_before(new, state), keep(kept, index, result)

    def empty(rows: int, batch: Tree) -> Tree:
        _, result = jax.eval_shape(lambda s, b: step.run(s, _fetch(resident, b)), state, batch)
        return {"none": (), "last": _zeros(_shapes(result)), "all": _zeros(_shapes(result), rows)}[step.collect]

    def from_body(index: Any, carry: tuple[State, Tree]) -> tuple[State, Tree]:
        return one(carry, index, _row(body, index))

    width = jax.tree.leaves(body)[0].shape[0]
    start = (state, empty(width, _row(body, 0)))
    state, kept = _repeat(from_body, start, count, pace if width >= pace.chunk else Pace())
    kept_tail = None
    if tail is not None:
        start = (state, empty(1, tail) if step.collect == "all" else kept)
        state, kept_tail = lax.cond(has_tail, lambda c: one(c, 0, tail), lambda c: c, start)
    if step.collect == "all":
        return (kept, _row(kept_tail, 0)), state
    return (step.finish(state) if step.finish else kept if tail is None else kept_tail), state


def _repeat(body: Callable[[Any, Tree], Tree], carry: Tree, count: Any, pace: Pace) -> Tree:
    """`body(index, carry)` for each index below `count`, in chunks of known length and then one by one."""
    chunk = pace.chunk
    if chunk == 1:
        return lax.fori_loop(0, count, body, carry)

    def whole(number: Any, carry: Tree) -> Tree:
        return lax.fori_loop(0, chunk, lambda i, c: body(number * chunk + i, c), carry, unroll=pace.unroll)

    carry = lax.fori_loop(0, count // chunk, whole, carry)
    return lax.fori_loop(count // chunk * chunk, count, body, carry)


def _keep_nothing(kept: Tree, index: Any, result: Tree) -> Tree:
    return ()


def _keep_last(kept: Tree, index: Any, result: Tree) -> Tree:
    return _as_before(result, kept)


def _keep_all(kept: Tree, index: Any, result: Tree) -> Tree:
    return jax.tree.map(lambda all_rows, row: lax.dynamic_update_index_in_dim(all_rows, row, index, 0), kept, result)


def _as_before(new: Tree, old: Tree) -> Tree:
    """`new` with the dtypes of `old`: what a Keras variable does on assignment, and what a loop needs."""
    return jax.tree.map(lambda a, b: jnp.asarray(a, b.dtype), new, old)


def _row(body: Tree, index: Any) -> Tree:
    return jax.tree.map(lambda a: a[index], body)


def _fetch(resident: Tree, batch: Tree) -> Tree:
    """The batch itself, or the rows of the resident arrays that it names."""
    if resident is None:
        return batch
    return jax.tree.map(lambda a: a.at[batch].get(mode="promise_in_bounds"), resident)


def _first_step(step: Step, state: State, resident: Tree, body: Tree) -> tuple[State, Any]:
    return step.run(state, _fetch(resident, _row(body, 0)))


def _equations(jaxpr: Any) -> int:
    """How many equations a traced program has, those of programs inside it included."""
    inner = [getattr(p, "jaxpr", p) for eqn in jaxpr.eqns for p in eqn.params.values()]
    return len(jaxpr.eqns) + sum(_equations(p) for p in inner if hasattr(p, "eqns"))


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
