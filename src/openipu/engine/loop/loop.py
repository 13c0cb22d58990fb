"""Compiled executions. A `Loop` belongs to a model and a mode, and keeps one program per shape of slab and form.

Who does what: this file launches programs for each slab and keeps the programs. What they compute is defined by two
kinds of loops: over replicas in replica_loop.py, and over pipeline stages in pipeline/runtime/stage_loop.py.
"""

from __future__ import annotations

import abc
import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from openipu.engine.core.accumulation import Accumulation
from openipu.engine.core.state import Outcome, State
from openipu.engine.data.instances import OwnParts, check_same
from openipu.engine.data.slab import Slab
from openipu.engine.devices.launching import in_turn
from openipu.engine.devices.placement import Placement
from openipu.engine.devices.replicas import Replicas
from openipu.engine.devices.transfer import local, read
from openipu.engine.facts import calls
from openipu.engine.facts.costs import Counted
from openipu.engine.facts.recorder import RunRecorder, StageTiming
from openipu.engine.facts.timeline import Interval
from openipu.engine.facts.values import PipelineFacts
from openipu.engine.host_io.outfeed_buffer import filled
from openipu.engine.host_io.step_logs import StepLogs
from openipu.engine.shapes import signature, specs_of
from openipu.engine.types import Array, Tree

import jax
import numpy as np

from .arrays import length
from .compile import CompiledProgram, Function, compile_program, note_launch
from .outfeeds import Specs, UnforeseenError, mention_incomplete
from .remainder import Counts, Job

log = logging.getLogger("openipu")

Launch = Callable[[Function, tuple[Any, ...]], tuple[Any, ...]]
"""Calls a program with its arguments."""


@dataclass(frozen=True, slots=True)
class Result:
    """What one launch returned: the logs so far, or for predict the outputs for the rows that it ran."""

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

        def used(block: Array) -> np.ndarray:
            return _joined(_joined(read(block))[: self.count])

        parts = [jax.tree.map(used, body)] if self.count else []
        return concatenate([*parts, jax.tree.map(read, tail)] if self.has_tail else parts)


def concatenate(blocks: list[Tree]) -> Tree:
    """The rows of all blocks, in order."""
    return jax.tree.map(lambda *parts: np.concatenate(parts) if len(parts) > 1 else parts[0], *blocks)


class Loop(abc.ABC):
    """Runs slabs of data, compiling once per shape."""

    def __init__(
        self, name: str, outcome: Outcome, place: Placement, accumulation: Accumulation, live: StepLogs | None = None
    ) -> None:
        self._name, self._outcome, self._place = name, outcome, place
        self._accumulation, self._live = accumulation, live
        self.programs: dict[Any, CompiledProgram] = {}

    @abc.abstractmethod
    def _jobs(self, counts: Counts, slab: Slab) -> list[Job]:
        """What to launch, in order, to run the slab with these counts."""

    @abc.abstractmethod
    def _execution(self, state: State, resident: Tree, body: Tree, job: Job, outfeeds: Specs) -> Function:
        """The function to compile for all devices: (state, resident, body, counts, tail) -> (results, state).

        Tracing it raises `UnforeseenError` if it fills other outfeeds than these.
        """

    @abc.abstractmethod
    def _operations(self, state: State, resident: Tree, body: Tree) -> Counted:
        """The costs of one step, counted before convolutions are rewritten."""

    def execute(
        self, state: State, resident: Tree, slab: Slab, launch: Launch | None = None
    ) -> tuple[list[Result], State]:
        """Run one slab, in one launch, or in two if it has a remainder. `launch` may replace the call of a program."""
        if slab.body is None:
            slab = _single(slab.tail, self._place.replicas)
        fixed, replicas = signature((state, resident, slab.body)), self._place.replicas
        jobs = self._jobs(Counts(0, *divmod(slab.count, replicas.count)), slab)
        # All programs first: the first launch uses up the state, which must not be lost if a second program fails.
        programs = [self._program(fixed, state, resident, slab.body, job) for job in jobs]
        outfeeds = {outfeed: spec for program in programs for outfeed, spec in program.outfeeds.items()}
        if outfeeds and any(job.counts.extra for job in jobs):
            mention_incomplete()
        run = calls.current()
        execution = None if run is None else self._note(run, programs, state, resident, slab)
        results = []
        with filled(outfeeds.items(), replicas.own if outfeeds else ()):
            for program, job in zip(programs, jobs, strict=True):
                call = in_turn(self, replicas.devices, program.call, program.name)
                args = (state, resident, slab.body, job.counts.pack(), job.tail)
                value, state = call(*args) if launch is None else launch(call, args)
                if self._outcome.collect != "all":
                    value = local(value)
                count = job.counts._replace(first=0).batches(replicas.count)
                results.append(Result(value, int(count), job.tail is not None))
            if run is not None and execution is not None:
                steps = -(-slab.steps // replicas.count)
                run.launched(execution, results[-1].value, state, steps, slab.samples, calls.is_own())
            if outfeeds:  # when the launch returns, all elements can be read, as after `strategy.run`
                jax.block_until_ready(state)
        for outfeed in outfeeds:
            if outfeed.interrupt is not None:
                log.error("An outfeed queue has lost elements: %r", outfeed.interrupt)
        return results, state

    def pipeline_facts(self, steps: int) -> PipelineFacts | None:  # noqa: ARG002
        """The plan of a pipeline for slabs of `steps` steps; None if this is not one."""
        return None

    def stage_timing(self, state: State, resident: Tree, body: Tree) -> StageTiming | None:  # noqa: ARG002
        """How to time the stages of a pipeline after the run; None if this is not one, or if that is not possible."""
        return None

    def _note(
        self, run: RunRecorder, programs: list[CompiledProgram], state: State, resident: Tree, slab: Slab
    ) -> Interval:
        """Tell a run that is recorded what is about to be launched."""
        return note_launch(
            run, programs, self._place.replicas, slab.batch_size, self._accumulation.steps,
            lambda: self.pipeline_facts(length(slab.body)), lambda: self.stage_timing(state, resident, slab.body),
        )  # fmt: skip

    def execute_one(self, state: State, batch: Tree) -> tuple[Result, State]:
        """Run a single batch that does not come from a feed, on the first replica.

        Processes with data of their own each bring one.
        """
        replicas = self._place.replicas
        if self._place.own_data:
            slab = OwnParts(replicas).slab(0, replicas.count, replicas.count, [batch], None, batch)
            assert slab is not None, "each process has brought a batch"
        else:
            if not replicas.is_local:
                check_same([batch])
            slab = _single(batch, replicas)
        [result], state = self.execute(state, None, slab)
        return result, state

    def _program(self, fixed: Tree, state: State, resident: Tree, body: Tree, job: Job) -> CompiledProgram:
        """The program for jobs like this one, compiled if there is none yet."""
        key = (fixed, signature(job.tail), job.form)
        if key not in self.programs:
            self.programs[key] = self._compile(state, resident, body, job)
        return self.programs[key]

    def _compile(self, state: State, resident: Tree, body: Tree, job: Job) -> CompiledProgram:
        log.debug("%s: compiling for slabs of %s, %s", self._name, signature(body), job.form)
        specs = specs_of((state, resident, body))

        def compiled(outfeeds: Specs) -> CompiledProgram:
            return compile_program(
                self._name,
                self._place,
                lambda: self._execution(state, resident, body, job, outfeeds),
                (state, resident, body, job.counts.pack(), job.tail),
                operations=functools.partial(self._operations, *specs),
                outfeeds=outfeeds,
            )

        outfeeds: Specs = {}
        while True:
            try:
                return compiled(outfeeds)
            except UnforeseenError as met:  # [Note: unforeseen outfeeds]
                outfeeds = {**outfeeds, **met.specs}


def _joined(array: np.ndarray) -> np.ndarray:
    """The array with its first two axes made one. Unlike -1 in `reshape`, this works without rows."""
    return array.reshape(array.shape[0] * array.shape[1], *array.shape[2:])


def _single(batch: Tree, replicas: Replicas) -> Slab:
    """A slab of one batch, for the first replica."""
    shape = (1, replicas.count)
    body = jax.tree.map(lambda a: np.broadcast_to(np.asarray(a), (*shape, *np.shape(a))), batch)
    return Slab(0, 1, replicas.send(body, 1), None)
