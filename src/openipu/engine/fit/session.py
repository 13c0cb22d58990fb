"""A model under a strategy: its loops, and its state while they run.

Who does what: step_function.py makes the loop for a mode, state_in_flight.py keeps the state, data/feed.py cuts the
data into slabs, loop/driver.py launches slab after slab, and epoch.py calls the callbacks. `Session` joins them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from openipu import _validate as validate
from openipu.engine.core.carried_rows import check_carried_rows
from openipu.engine.core.model_state import variables_of
from openipu.engine.core.optimizer_chain import describe
from openipu.engine.core.options import Options
from openipu.engine.core.replica_metrics import mention_metrics
from openipu.engine.core.state import Logs, Mode, State
from openipu.engine.data.feed import Feed
from openipu.engine.data.position import Position
from openipu.engine.data.slab import Slab
from openipu.engine.devices import systems
from openipu.engine.devices.placement import Placement, placement_on
from openipu.engine.devices.running import calls, refuse_elsewhere, running
from openipu.engine.facts.calls import doing, recorded
from openipu.engine.interrupts import SHORT, Task, uninterrupted
from openipu.engine.keras_compat.api import compilation
from openipu.engine.keras_compat.patches import COMPILE
from openipu.engine.loop.driver import launches
from openipu.engine.loop.loop import Result
from openipu.engine.pipeline.build.keras_pipeline import KerasPipeline, make_keras_pipeline
from openipu.engine.pipeline.partition.assignment import is_pipelined
from openipu.engine.types import Tree

import keras

from .epoch import Epoch, make_epoch
from .labels import LabelCheck
from .state_in_flight import StateInFlight
from .step_by_step import check_step_by_step, mention_compiled, uncompiled_by
from .step_function import StepFunction


@dataclass(frozen=True, slots=True)
class ResumePoint:
    """A running `fit` between two executions: everything that another process needs to resume it.

    `state` is a `StateInFlight.snapshot`, `epoch` is Keras' number of the epoch, `ended` says whether its last
    execution is done, and `logs` are those of the last execution. `resumed` is called when everything is in place,
    after `on_epoch_begin` has been called again.
    """

    epoch: int
    ended: bool
    position: Position
    state: State
    logs: Logs
    resumed: Callable[[], None]


class Strategy(Protocol):
    """What a session needs of a strategy."""

    @property
    def system(self) -> systems.System:
        """The devices that the strategy uses under the current configuration."""

    @property
    def shared(self) -> bool:
        """Whether all instances of a group have the strategy's models in common."""


class CheckpointKeeper(Protocol):
    """Saves a running `fit` between its executions."""

    def executed(self, position: Position, state: Callable[[], State], logs: Logs, last: bool) -> None:
        """Called after each launch. `state()` is the state after it; `last` says whether it ends the epoch."""

    def finish(self) -> None:
        """Called when training has ended or failed."""


class Session:
    """A model under a strategy: where it runs, its loops, and its state while executions run."""

    def __init__(self, model: keras.Model, strategy: Strategy) -> None:
        self.model, self.strategy = model, strategy
        self.options = Options()
        self._labels = LabelCheck(model)
        self._epochs: list[Epoch] = []
        self._late: list[Task[None]] = []
        self._pipelines: dict[Any, KerasPipeline] = {}
        self.validation: Feed | None = None
        """The feed of validation data, kept over the epochs of a running `fit`."""
        self.callbacks: keras.callbacks.CallbackList | None = None
        """The callbacks of a running `fit`."""
        self.resume: ResumePoint | None = None
        """Where a `fit` resumes, if it does. Set by a callback when training begins."""
        self.keeper: CheckpointKeeper | None = None
        """Saves a running `fit`, if something does. Set by a callback when training begins."""

    @contextlib.contextmanager
    def using(self, call: str) -> Iterator[None]:
        """Until the block ends, `call` is running: `fit`, `evaluate` and so on. Other threads cannot use the model.

        Ctrl-C is held back, except where it is let through. See engine/interrupts.py.
        """
        model = self.model
        with (
            uninterrupted(SHORT),
            running(model, call, f"the model {model.name!r}"),
            recorded(call, model.name, together=call.endswith("_on_batch")),
            COMPILE.using(self._compile, on=model, once=True),
        ):
            while self._late:  # a run that was left by a second Ctrl-C
                self._late[-1].wait()
                self._late.pop()
            self.sync()  # a callback may use the model in the middle of an epoch
            yield

    def _compile(self, compile: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        """Keras' `compile`. Refused while the optimizer and the programs that it would drop are in use."""
        refuse_elsewhere(self.model, "compile")
        if self._epochs or self.callbacks is not None:
            raise RuntimeError(
                f"`compile` of the model {self.model.name!r} was called in the middle of {calls(self.model)[-1]}. Call "
                "it before or after that, or in `on_train_end`."
            )
        compile(*args, **kwargs)

    @property
    def effective_options(self) -> Options:
        """The model's options, together with those that its optimizer sets."""
        optimizer = getattr(self.model, "optimizer", None)
        options = self.options.resolved(self.pipelined)
        return options if optimizer is None else options.with_optimizer(describe(optimizer))

    def set_options(self, options: Options) -> None:
        """Change the options. Programs compiled under other options are dropped at the next use."""
        refuse_elsewhere(self.model, "set_*_options")
        self.options = options

    @property
    def pipelined(self) -> bool:
        """Whether the model runs in stages."""
        return is_pipelined(self.model, self.options.stages)

    def place(self, mode: Mode) -> Placement:
        """Where the model runs in `mode` under the current configuration.

        A process that has data of its own predicts without the others.
        """
        each = self.pipeline("test").pipelining.device_count if self.pipelined else 1
        system = self.strategy.system
        return placement_on(system.of_this_process() if mode == "predict" and system.own_data else system, each)

    def reserve_place(self, mode: Mode) -> Placement:
        """Reserve what the model needs to run, and return the place where it runs.

        For a pipeline, this may restart JAX's CPU client with spare threads: a device that waits for another one
        blocks a thread, and the device that works needs one.
        """
        if self.pipelined:
            systems.reserve()
        return self.place(mode)

    def pipeline(self, mode: Mode) -> KerasPipeline:
        """The stages of a pipelined model and how they run. Kept as long as the model and its options do not change.

        They are made again after `compile`, because a model's `call` may do something else since then.
        """
        options = self.effective_options
        owners = variables_of(self.model, "predict")
        variables = tuple(map(id, owners.trainable)), tuple(map(id, owners.non_trainable))
        key = (mode == "train", options, tuple(map(id, self.model.layers)), variables, compilation(self.model))
        if key not in self._pipelines:
            self._pipelines = {old: known for old, known in self._pipelines.items() if old[1:] == key[1:]}
            self._pipelines[key] = make_keras_pipeline(self.model, mode, options)
        return self._pipelines[key]

    def left_to_keras(self, mode: Mode) -> bool:
        """Whether Keras' own loop runs the model, because its steps must not be compiled.

        Raises if that loop cannot do what the model's options and the configuration ask for.
        """
        setting = uncompiled_by(self.model)
        if setting is not None:
            place = None if self.pipelined else self.place(mode)
            check_step_by_step(self.model, mode, setting, place, self.effective_options)
        return setting is not None

    def function(self, mode: Mode, force: bool = False) -> StepFunction:
        """The model's step function for `mode`. It is made again after `compile` or a change of configuration."""
        name, place = f"{mode}_function", self.reserve_place(mode)
        current = getattr(self.model, name, None)
        options = self.effective_options
        if force or not isinstance(current, StepFunction) or not current.fits(place, options):
            mention_compiled(self.model)
            if mode == "train" and self.options.pipelining is not None and not self.pipelined:
                validate.notice(
                    f"Model {self.model.name!r} has pipelining options but no stages, so they have no effect. Give it "
                    "stages with `set_pipeline_stage_assignment`, or use `set_gradient_accumulation_options`."
                )
            check_carried_rows(self.model, place.replicas.count)
            if place.replicas.count > 1 and mode != "predict":
                mention_metrics(self.model.name, self.model.metrics)
            current = StepFunction(self.model, mode, place, options, self.pipeline(mode) if self.pipelined else None)
            setattr(self.model, name, current)
        return current

    def check_labels(self, mode: Mode, feed: Feed) -> None:
        """Raise an error if labels are not among the model's classes. Each feed is checked once."""
        if self.options.check_labels and not feed.labels_checked and feed.source.host is not None:
            self._labels.check(mode, feed.source.host, feed.source.batch_size)
        feed.labels_checked = True

    def sync(self) -> None:
        """Put the running state, if there is one, back into the model's variables."""
        if self._epochs:
            self._epochs[-1].sync()

    def epoch(
        self, mode: Mode, feed: Feed, callbacks: keras.callbacks.CallbackList, alone: bool = False
    ) -> Generator[Tree, None, None]:
        """Run one epoch. Yields the logs or outputs of each execution, after the callbacks have seen them.

        `alone` says that callbacks may use the model in some of its processes only.
        """
        with doing("plan"):
            function = self.function(mode)
        held = StateInFlight(self.model, mode, function.spread, alone)
        keeper, resume = (self.keeper, self.resume) if mode == "train" else (None, None)
        if resume is not None:
            self.resume = None
            held.load(resume.state)
            feed.resume(resume.position)
            resume.resumed()
        epoch = make_epoch(mode, function.loop, held, feed.source, callbacks, function.live)
        # A checkpoint holds the position in the data, so no more than one slab may be read ahead.
        depth = 1 if keeper else -(-(function.options.prefetch_depth or 1) // feed.width)
        position: Position | None = None

        def execute(slab: Slab, meanwhile: Callable[[], None]) -> list[Result]:
            nonlocal position
            position = feed.position() if keeper else None
            return epoch.execute(slab, meanwhile)

        self._epochs.append(epoch)
        try:
            for launched in launches(feed.epoch(), execute, depth):
                value, last = epoch.tell(launched), launched.last
                del launched  # it holds the slab, whose memory the next one needs
                if keeper and position:
                    with doing("checkpoint"):
                        keeper.executed(feed.read_since(position), held.snapshot, value, last)
                resume = None
                yield value
            if resume is not None:
                yield resume.logs
        finally:
            try:
                held.finish(self._late.append)
            finally:
                self._epochs.pop()
