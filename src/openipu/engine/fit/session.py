"""A model under a strategy: who owns its loops, and its state while they run.

Who does what: step_function.py makes the loop of a mode, state_in_flight.py keeps the state, data/feed.py cuts the
data. `Session` puts them together and runs epochs. While one execution runs on the device, the next slab is built and
sent.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from openipu.engine.core.optimizer_chain import describe
from openipu.engine.core.options import Options
from openipu.engine.core.replica_metrics import mention_metrics
from openipu.engine.core.state import Logs, Mode, State
from openipu.engine.data.feed import Feed
from openipu.engine.data.position import Position
from openipu.engine.data.prefetch import Prefetch
from openipu.engine.data.slab import Slab
from openipu.engine.devices import systems
from openipu.engine.devices.placement import Placement, placement_on
from openipu.engine.host_io.step_logs import CallbackTeller, StepLogs
from openipu.engine.loop.interrupts import uninterrupted
from openipu.engine.loop.loop import Loop, Result
from openipu.engine.pipeline.build.keras_pipeline import KerasPipeline, make_keras_pipeline
from openipu.engine.pipeline.partition.assignment import is_pipelined

import jax
import numpy as np

from .notices import mention_jit, refuse_eager
from .state_in_flight import StateInFlight
from .step_function import StepFunction


@dataclass(frozen=True, slots=True)
class ResumePoint:
    """A running `fit` between two executions: all that another process needs in order to go on from here.

    `state` is a `Held.snapshot`, `epoch` Keras' number of the epoch, `ended` whether that had its last execution, and
    `logs` those of the last execution. `resumed` is called when all is in place: after `on_epoch_begin`, which this
    moment had behind it.
    """

    epoch: int
    ended: bool
    position: Position
    state: State
    logs: Logs
    resumed: Callable[[], None]


class CheckpointKeeper(Protocol):
    """Somebody who saves moments of a `fit`."""

    def executed(self, position: Position, state: Callable[[], State], logs: Logs, last: bool) -> None:
        """An execution was launched, perhaps the epoch's last one; `state()` is the state after it."""

    def finish(self) -> None:
        """Training is over or has failed."""


class Session:
    """A model under a strategy: where it runs, its loops, and its state while executions run."""

    def __init__(self, model: Any, strategy: Any) -> None:
        self.model, self.strategy = model, strategy
        self.options = Options()
        self._held: list[StateInFlight] = []
        self._pipelines: dict[Any, KerasPipeline] = {}
        self._live: StepLogs | None = None
        self.validation: Feed | None = None
        """The validation data of a running `fit`, kept over its epochs."""
        self.callbacks: Any = None
        """The callbacks of a running `fit`."""
        self.resume: ResumePoint | None = None
        """Where a `fit` goes on, if not at its beginning. Set by a callback when training begins."""
        self.keeper: CheckpointKeeper | None = None
        """Who saves a running `fit`. Set by a callback when training begins."""

    @property
    def effective_options(self) -> Options:
        """The model's options together with what its optimizer asks for."""
        optimizer = getattr(self.model, "optimizer", None)
        options = self.options.resolved(self.pipelined)
        return options if optimizer is None else options.with_optimizer(describe(optimizer))

    def set_options(self, options: Options) -> None:
        """Change the options; what was compiled under others is dropped when it is next asked for."""
        self.options = options

    @property
    def pipelined(self) -> bool:
        """Whether the model runs in stages."""
        return is_pipelined(self.model, self.options.stages)

    @property
    def place(self) -> Placement:
        """Where the model runs under the current configuration."""
        if self.pipelined:
            # A device that waits for another one blocks a thread, which the one that works could use.
            systems.reserve()
            return placement_on(self.strategy.system, self.pipeline("test").pipelining.device_count)
        return placement_on(self.strategy.system)

    def pipeline(self, mode: Mode) -> KerasPipeline:
        """The stages of a pipelined model and how they run; kept as long as the model stays the same."""
        options = self.effective_options
        key = (mode == "train", options, tuple(map(id, self.model.layers)))
        if key not in self._pipelines:
            self._pipelines = {old: known for old, known in self._pipelines.items() if old[1:] == key[1:]}
            self._pipelines[key] = make_keras_pipeline(self.model, mode, options)
        return self._pipelines[key]

    def function(self, mode: Mode, force: bool = False) -> StepFunction:
        """The model's step function for `mode`, made anew after `compile` and after a change of configuration."""
        refuse_eager(self.model)
        name, place = f"{mode}_function", self.place
        current = getattr(self.model, name, None)
        options = self.effective_options
        if force or not isinstance(current, StepFunction) or (current.place, current.options) != (place, options):
            mention_jit(self.model)
            if place.replicas.count > 1 and mode != "predict":
                mention_metrics(self.model.name, self.model.metrics)
            current = StepFunction(self.model, mode, place, options, self.pipeline(mode) if self.pipelined else None)
            setattr(self.model, name, current)
        return current

    def sync(self) -> None:
        """Give the running state, if any, back to the model's variables."""
        if self._held:
            running = self._live.finish() if self._live is not None else None
            if running is not None:
                self._held[-1].show(running[1])
            self._held[-1].sync()

    def epoch(self, mode: Mode, feed: Feed, callbacks: Any) -> Iterator[Any]:
        """Run one epoch; gives the logs, or outputs, of each execution after the callbacks have seen them."""
        function = self.function(mode)
        loop, live, held = function.loop, function.live, StateInFlight(self.model, mode, function.spread)
        keeper, resume = (self.keeper, self.resume) if mode == "train" else (None, None)
        if resume is not None:
            self.resume = None
            held.load(resume.state)
            feed.resume(resume.position)
            resume.resumed()
        began = getattr(callbacks, f"on_{mode}_batch_begin")
        ended = getattr(callbacks, f"on_{mode}_batch_end")
        # A checkpoint says where the data is, so nothing may be read further ahead.
        depth = 1 if keeper else -(-(function.options.prefetch_depth or 1) // feed.width)
        slabs = Prefetch(feed.epoch(), depth)
        self._held.append(held)
        try:
            for slab in slabs:
                position = feed.position() if keeper else None
                if live is not None:
                    value = self._run_live(mode, loop, live, held, feed.source.resident, slab, slabs, began, ended)
                else:
                    began(slab.begin)
                    with uninterrupted():
                        results = held.run(loop.execute, feed.source.resident, slab)
                    slabs.launched(results[-1].value)
                    value = _rows(results) if mode == "predict" else results[-1].value
                    ended(slab.end, {"outputs": value} if mode == "predict" else value)
                if keeper and position:
                    keeper.executed(position, held.snapshot, value, slabs.ended)
                resume = None
                yield value
            if resume is not None:
                yield resume.logs
        finally:
            held.sync()
            self._held.pop()

    def _run_live(
        self,
        mode: Mode,
        loop: Loop,
        live: StepLogs,
        held: StateInFlight,
        resident: Any,
        slab: Slab,
        slabs: Prefetch,
        began: Callable[[int], None],
        ended: Callable[[int, Logs], None],
    ) -> Any:
        """One execution whose steps are told to the callbacks while it runs; its logs, or outputs."""
        predicts = mode == "predict"
        teller = CallbackTeller(live, slab, began, ended, _batch_outputs if predicts else lambda logs, _: logs)
        self._live = live
        try:
            launch = functools.partial(teller.launch, meanwhile=slabs.prepare)
            results = held.run(loop.execute, resident, slab, launch)
        finally:
            self._live = None
        if live.error is not None:
            raise live.error
        value = _rows(results) if predicts else results[-1].value
        teller.rest(functools.partial(_outputs_of, value, slab) if predicts else lambda _: value)
        return value


def _batch_outputs(outputs: Any, replica: int) -> Logs:
    return {"outputs": jax.tree.map(lambda a: a[replica], outputs)}


def _outputs_of(rows: Any, slab: Slab, batch: int) -> Logs:
    size = 0 if slab.body is None else jax.tree.leaves(slab.body)[0].shape[2]
    stop = (batch + 1) * size if batch < slab.count else None
    return {"outputs": jax.tree.map(lambda a: a[batch * size : stop], rows)}


def _rows(results: list[Result]) -> Any:
    return concatenate([result.rows() for result in results])


def concatenate(blocks: list[Any]) -> Any:
    """The rows of all blocks, in their order."""
    return jax.tree.map(lambda *parts: np.concatenate(parts) if len(parts) > 1 else parts[0], *blocks)
