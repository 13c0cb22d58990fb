"""Compiled executions: a `Loop` belongs to a model and a mode, and keeps one program per shape of slab."""

from __future__ import annotations

import functools
import logging
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from openipu.engine.convolution import rewrite
from openipu.engine.core.accumulation import Accumulation
from openipu.engine.core.operation_count import operations
from openipu.engine.core.state import State, Step
from openipu.engine.core.state_layout import ReplicaLayout
from openipu.engine.data.slab import Slab
from openipu.engine.devices import program_cache
from openipu.engine.devices.placement import Placement
from openipu.engine.devices.replicas import Replicas
from openipu.engine.devices.systems import spare_threads
from openipu.engine.host_io.step_logs import StepLogs

import jax
import jax.numpy as jnp
import numpy as np

from .execution import Counts, Layout, fetch, loop_shape, row, run_execution, zeros

log = logging.getLogger("openipu")

Tree = Any
Launch = Callable[[Callable[..., Any], tuple[Any, ...]], tuple[Any, State]]


@dataclass(frozen=True, slots=True)
class CompiledProgram:
    """A compiled execution, and the facts about it that reports show."""

    call: Callable[..., tuple[Any, State]]
    compiled: Any
    compile_seconds: float
    cached: bool = False
    """Whether it came from the cache of compiled programs."""
    operations: Callable[[], float] | None = None
    """Those of one step on one device, if anybody asks: a micro-batch, and its share of an update."""


@dataclass(frozen=True, slots=True)
class Result:
    """What one launch gave back: logs, or for predict the outputs of every row of the slab."""

    value: Any
    slab: Slab

    def rows(self) -> Tree:
        """The outputs in data order, without those of unused rows, as host arrays."""
        body, tail = self.value

        def join(block: Any, rest: Any) -> np.ndarray:
            batches = np.asarray(block).reshape(-1, *block.shape[2:])[: self.slab.count]
            kept = batches.reshape(-1, *block.shape[3:])
            return np.concatenate([kept, np.asarray(rest)]) if self.slab.has_tail else kept

        return jax.tree.map(join, body, body if tail is None else tail)


class Loop:
    """Runs slabs of data through a step, compiling once per shape."""

    def __init__(
        self,
        name: str,
        step: Step,
        place: Placement,
        accumulation: Accumulation,
        spread: ReplicaLayout,
        live: StepLogs | None = None,
    ) -> None:
        self._name, self._step, self._place = name, step, place
        self._accumulation, self._spread, self._live = accumulation, spread, live
        self.programs: dict[Any, CompiledProgram] = {}

    def execute(
        self, state: State, resident: Tree, slab: Slab, launch: Launch | None = None
    ) -> tuple[list[Result], State]:
        """Run one slab, normally in one launch. `launch` calls the program, if that takes more than calling it."""
        fixed = _shapes((state, resident))
        results = []
        for part in self._parts(fixed, slab):
            key = (fixed, _shapes(part.body), _shapes(part.tail))
            if key not in self.programs:
                self.programs[key] = self._compile(state, resident, part)
            call, args = self.programs[key].call, (state, resident, part.body, self._counts(part), part.tail)
            value, state = call(*args) if launch is None else launch(call, args)
            results.append(Result(value, part))
        return results, state

    def execute_one(self, state: State, batch: Tree) -> tuple[Result, State]:
        """Run a single batch that is not part of a feed, on the first replica."""
        [result], state = self.execute(state, None, _single(batch, self._place.replicas))
        return result, state

    def _counts(self, slab: Slab) -> np.ndarray:
        replicas = self._place.replicas.count
        steps, extra = divmod(slab.count, replicas)
        if self._step.needs_all and replicas > 1 and (extra or slab.has_tail):
            raise ValueError(
                f"The model's own `train_step` updates the weights on every replica, but {slab.steps} batches are left "
                f"for {replicas} replicas, or the last one is smaller. Give a multiple of {replicas} equal batches."
            )
        return Counts(steps, extra, slab.has_tail).pack()

    def _parts(self, fixed: Tree, slab: Slab) -> list[Slab]:
        """The slab as launches of programs that are there already, as far as that is possible.

        A slab without a tail runs in a program that has room for one. A tail that was not foreseen when the program was
        compiled is a launch of its own, unless its gradient belongs to the same update as others'.
        """
        replicas = self._place.replicas
        body, tail = _shapes(slab.body), _shapes(slab.tail)
        tails = [key[2] for key in self.programs if key[:2] == (fixed, body)]
        if slab.body is None:
            return [_single(slab.tail, replicas)]
        alone = replicas.count == 1 and self._accumulation.steps == 1
        if not tails or tail in tails or (slab.has_tail and not alone):
            return [slab]
        without = replace(slab, tail=_dummy(tails[0], replicas), has_tail=False)
        return [without, _single(slab.tail, replicas)] if slab.has_tail else [without]

    def _compile(self, state: State, resident: Tree, slab: Slab) -> CompiledProgram:
        start, hits = time.perf_counter(), program_cache.hits()
        lowered = jax.jit(self._execution(state, resident, slab), donate_argnums=0).lower(
            state, resident, slab.body, self._counts(slab), slab.tail
        )
        check_callbacks(lowered, self._place.replicas, self._name)
        compiled = lowered.compile(dict(self._place.compiler_options))
        call = _never_run(lowered) if self._place.compile_only else compiled
        specs = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), (state, resident, slab.body))
        count = functools.partial(self._operations, *specs)
        program = CompiledProgram(call, compiled, time.perf_counter() - start, program_cache.hits() > hits, count)
        self._dump(compiled)
        log.debug("%s: compiled for slabs of %s in %.2f s", self._name, _shapes(slab.body), program.compile_seconds)
        return program

    def _execution(self, state: State, resident: Tree, slab: Slab) -> Callable[..., tuple[Any, State]]:
        """The function to compile, on all replicas."""
        replicas = self._place.replicas

        axes = self._spread.axes(state)

        def traced(run: Callable[[State, Tree], Any]) -> Any:
            """`run` on the first batch of one replica."""

            def first(state: State, resident: Tree, body: Tree) -> None:
                run(self._spread.own_part(state), fetch(resident, row(row(body, 0), 0)))

            program = replicas.program(first, (axes, None, 1), None)
            return jax.make_jaxpr(program)(state, resident, slab.body).jaxpr

        def equations() -> int:
            return _equations(traced(self._step.micro))

        if self._step.check is not None and not self.programs:
            traced(self._step.check)
        step = replace(self._step, micro=rewrite(self._step.micro, replicas.platform))
        layout = Layout(replicas, self._accumulation, loop_shape(replicas.platform, equations), self._live)
        run = functools.partial(_on_replica, step, layout, self._spread)
        outputs = (1, None) if step.collect == "all" else None
        return replicas.program(run, (axes, None, 1, None, None), (outputs, axes))

    def _operations(self, state: State, resident: Tree, body: Tree) -> float:
        """The operations of one step on one device, with convolutions as they were written."""
        replicas, axes, size = self._place.replicas, self._spread.axes(state), self._accumulation.steps
        step = self._step

        def traced(run: Callable[[State, Tree], Any]) -> float:
            def first(state: State, resident: Tree, body: Tree) -> Any:
                batch = fetch(resident, row(jax.tree.map(lambda a: a[:, 0], body), 0))
                return jax.tree.map(lambda a: jnp.asarray(a)[None], run(self._spread.own_part(state), batch))

            return operations(jax.make_jaxpr(replicas.program(first, (axes, None, 1), 0))(state, resident, body))

        def updated(state: State, batch: Tree) -> Any:
            new, gradients, _ = step.micro(state, batch)
            assert step.update is not None
            total = self._accumulation.add(self._accumulation.start(state.trainable), gradients, 0)
            return step.update(new, total)

        micro = traced(step.micro)
        return micro if step.update is None else micro + (traced(updated) - micro) / size

    def _dump(self, compiled: Any) -> None:
        """Write the program's text where `serialization_output_folder` asks for it."""
        folder = self._place.dump_folder
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / f"{self._name}_{len(self.programs)}.hlo.txt").write_text(compiled.as_text())


def check_callbacks(lowered: Any, replicas: Replicas, name: str) -> None:
    """Refuse a program that would hang. See [Note: virtual CPU devices] in devices.py."""
    used = len(replicas.devices)
    if replicas.platform != "cpu" or used == 1 or spare_threads(used) > 0:
        return
    if re.search(r"@xla_ffi_\w*python_cpu_callback", lowered.as_text()):
        raise ValueError(
            f"The program of {name!r} calls Python (`pure_callback`, `jax.debug.print`, ...) on {used} virtual CPU "
            f"devices, which have {used} threads and need one more for that. Set the environment variable "
            f"JAX_NUM_CPU_DEVICES={used + 1} before Python starts, or take the calls out."
        )


def _on_replica(
    step: Step, layout: Layout, spread: ReplicaLayout, state: State, resident: Tree, body: Tree, counts: Any, tail: Tree
) -> tuple[Any, State]:
    """An execution on one replica: its own parts of what is split have an axis of length one for the replica."""
    mine = jax.tree.map(lambda a: a[:, 0], body)
    value, new = run_execution(step, layout, spread.own_part(state), resident, mine, Counts.unpack(counts), tail)
    return value, spread.rejoin(new)


def _never_run(lowered: Any) -> Callable[..., tuple[Any, State]]:
    """In place of a program that is compiled but not run: results are zero and the state stays as it is."""
    results, _ = lowered.out_info
    return lambda state, *_: (zeros(results), state)


def _single(batch: Tree, replicas: Replicas) -> Slab:
    """A slab of one batch, which goes to the first replica."""
    shape = (1, replicas.count)
    body = jax.tree.map(lambda a: np.broadcast_to(np.asarray(a), (*shape, *np.shape(a))), batch)
    return Slab(0, 1, jax.device_put(body, replicas.split(1)), None, False)


def _equations(jaxpr: Any) -> int:
    """How many equations a traced program has, those of programs inside it included."""
    inner = [getattr(p, "jaxpr", p) for eqn in jaxpr.eqns for p in eqn.params.values()]
    return len(jaxpr.eqns) + sum(_equations(p) for p in inner if hasattr(p, "eqns"))


def _shapes(tree: Tree) -> Tree:
    """A hashable description of the arrays in `tree`, or None for None."""
    if tree is None:
        return None
    leaves, structure = jax.tree.flatten(tree)
    return structure, tuple((a.shape, np.dtype(a.dtype)) for a in leaves)


def _dummy(shapes: Tree, replicas: Replicas) -> Tree:
    """Zeros in place of a tail that is not there."""
    if shapes is None:
        return None
    structure, leaves = shapes
    arrays = [np.zeros(shape, dtype) for shape, dtype in leaves]
    return jax.device_put(jax.tree.unflatten(structure, arrays), replicas.everywhere())
