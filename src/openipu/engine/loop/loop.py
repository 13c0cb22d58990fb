"""Compiled executions. A `Loop` belongs to a model and a mode, and keeps one program per shape of slab.

Who does what: this file launches a program for each slab and keeps the programs. What they compute is defined by two
kinds of loops: over replicas in replica_loop.py, and over pipeline stages in pipeline/runtime/stage_loop.py.
"""

from __future__ import annotations

import abc
import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from openipu.engine.core.accumulation import Accumulation
from openipu.engine.core.state import Outcome, State
from openipu.engine.data.slab import Slab
from openipu.engine.devices.launching import in_turn
from openipu.engine.devices.placement import Placement
from openipu.engine.devices.replicas import Replicas
from openipu.engine.host_io.step_logs import StepLogs
from openipu.engine.types import Array, Tree

import jax
import numpy as np

from .compile import CompiledProgram, Function, compile_program
from .remainder import Counts

log = logging.getLogger("openipu")

Launch = Callable[[Function, tuple[Any, ...]], tuple[Any, ...]]
"""Calls a program with its arguments."""


@dataclass(frozen=True, slots=True)
class Result:
    """What one launch returned: logs, or for predict the outputs for every row of its slab."""

    value: Tree
    count: int
    """The number of full batches, over all replicas."""
    has_tail: bool

    @property
    def steps(self) -> int:
        """The number of batches, over all replicas."""
        return self.count + self.has_tail

    def rows(self) -> Tree:
        """The outputs in data order, as host arrays, without those of unused rows."""
        body, tail = self.value

        def join(block: Array, rest: Array) -> np.ndarray:
            batches = np.asarray(block).reshape(-1, *block.shape[2:])[: self.count]
            kept = batches.reshape(-1, *block.shape[3:])
            return np.concatenate([kept, np.asarray(rest)]) if self.has_tail else kept

        return jax.tree.map(join, body, body if tail is None else tail)


class Loop(abc.ABC):
    """Runs slabs of data, compiling once per shape."""

    def __init__(
        self, name: str, outcome: Outcome, place: Placement, accumulation: Accumulation, live: StepLogs | None = None
    ) -> None:
        self._name, self._outcome, self._place = name, outcome, place
        self._accumulation, self._live = accumulation, live
        self.programs: dict[Any, CompiledProgram] = {}

    @abc.abstractmethod
    def _execution(self, state: State, resident: Tree, slab: Slab) -> Function:
        """The function to compile for all devices: (state, resident, body, counts, tail) -> (results, state)."""

    @abc.abstractmethod
    def _operations(self, state: State, resident: Tree, body: Tree) -> float:
        """The number of operations in one step on one device, counted before convolutions are rewritten."""

    def execute(
        self, state: State, resident: Tree, slab: Slab, launch: Launch | None = None
    ) -> tuple[list[Result], State]:
        """Run one slab, normally in one launch. `launch` may replace the plain call of the program."""
        fixed = _shapes((state, resident))
        parts = self._parts(fixed, slab)
        # All programs first: the first launch uses up the state, which must not be lost if a second program fails.
        calls = [
            in_turn(self, self._place.replicas.devices, self._program(fixed, state, resident, part).call)
            for part in parts
        ]
        results = []
        for call, part in zip(calls, parts, strict=True):
            args = (state, resident, part.body, self._counts(part), part.tail)
            value, state = call(*args) if launch is None else launch(call, args)
            results.append(Result(value, part.count, part.has_tail))
        return results, state

    def execute_one(self, state: State, batch: Tree) -> tuple[Result, State]:
        """Run a single batch that does not come from a feed, on the first replica."""
        [result], state = self.execute(state, None, _single(batch, self._place.replicas))
        return result, state

    def _program(self, fixed: Tree, state: State, resident: Tree, slab: Slab) -> CompiledProgram:
        """The program for slabs like this one, compiled if there is none yet."""
        key = (fixed, _shapes(slab.body), _shapes(slab.tail))
        if key not in self.programs:
            self.programs[key] = self._compile(state, resident, slab)
        return self.programs[key]

    def _counts(self, slab: Slab) -> np.ndarray:
        steps, extra = divmod(slab.count, self._place.replicas.count)
        return Counts(steps, extra, slab.has_tail).pack()

    def _parts(self, fixed: Tree, slab: Slab) -> list[Slab]:
        """The slab, split so that existing programs can run it where possible.

        A slab without a tail can run in a program that has room for one. A tail that the program has no room for gets a
        launch of its own, unless its gradients belong to the same update as others.
        """
        replicas = self._place.replicas
        body, tail = _shapes(slab.body), _shapes(slab.tail)
        tails = [key[2] for key in self.programs if key[:2] == (fixed, body)]
        if slab.body is None:
            return [_single(slab.tail, replicas)]
        alone = replicas.count == 1 and self._accumulation.steps == 1
        if not tails or tail in tails or (slab.has_tail and not alone):
            return [slab]
        without = replace(slab, tail=_no_tail(tails[0], replicas), has_tail=False)
        return [without, _single(slab.tail, replicas)] if slab.has_tail else [without]

    def _compile(self, state: State, resident: Tree, slab: Slab) -> CompiledProgram:
        log.debug("%s: compiling for slabs of %s", self._name, _shapes(slab.body))
        specs = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), (state, resident, slab.body))
        return compile_program(
            self._name,
            self._place,
            lambda: self._execution(state, resident, slab),
            (state, resident, slab.body, self._counts(slab), slab.tail),
            operations=functools.partial(self._operations, *specs),
        )


def _single(batch: Tree, replicas: Replicas) -> Slab:
    """A slab of one batch, for the first replica."""
    shape = (1, replicas.count)
    body = jax.tree.map(lambda a: np.broadcast_to(np.asarray(a), (*shape, *np.shape(a))), batch)
    return Slab(0, 1, jax.device_put(body, replicas.split(1)), None, False)


def _shapes(tree: Tree) -> Tree:
    """A hashable description of the arrays in `tree`, or None for None."""
    if tree is None:
        return None
    leaves, structure = jax.tree.flatten(tree)
    return structure, tuple((a.shape, np.dtype(a.dtype)) for a in leaves)


def _no_tail(shapes: Tree, replicas: Replicas) -> Tree:
    """Zeros in the shapes of a tail, for a slab that has none."""
    if shapes is None:
        return None
    structure, leaves = shapes
    arrays = [np.zeros(shape, dtype) for shape, dtype in leaves]
    return jax.device_put(jax.tree.unflatten(structure, arrays), replicas.everywhere())
