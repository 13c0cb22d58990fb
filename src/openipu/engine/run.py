"""The host's side of fit, evaluate and predict: feed a slab, launch it, tell the callbacks, repeat.

Who does what: plan.py decides, feed.py cuts the data, loop.py compiles and launches. Here is only the order in which
things happen, which is Keras' order. While one execution runs on the device, the next slab is built and sent.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Protocol

from openipu.optimizers.plan import describe

import jax
import keras
import numpy as np

from . import devices, keras_private, offload
from .accumulate import Accumulation
from .ahead import Ahead
from .building import build, build_for_predict, is_built
from .checks import mention_jit, mention_metrics, refuse_eager
from .feed import Feed, Slab
from .held import Held
from .live import Live, Teller
from .loop import Loop, Result
from .options import MetricReduction, Options
from .pipeline.assign import is_pipelined
from .pipeline.plan import StagePlan, make_plan, make_stage_loop
from .place import Place
from .place import place as make_place
from .plan import check_training, describe_updates, limited, make_feed, positive
from .position import Position
from .shard import make_shards
from .spread import AnySpread, Spread
from .state import Mode, State, parts_of, state_of
from .steps import make_step

log = logging.getLogger("openipu")

Logs = dict[str, Any]


class StepFunction:
    """A loop under Keras' calling convention. It sits where Keras keeps its own and drops it when `compile` is called.

    `train_on_batch`, `test_on_batch` and `predict_on_batch` call it with the parts of the state that they know.
    """

    def __init__(self, model: Any, mode: Mode, place: Place, options: Options, plan: StagePlan | None = None) -> None:
        self.place, self.options, self._mode = place, options, mode
        self.live = Live(options.buffer_depth) if options.live_callbacks else None
        self.loop: Loop
        self.spread: AnySpread
        if plan is not None:
            self.loop, self.spread = make_stage_loop(model, mode, place, options, plan, self.live)
        else:
            self.loop, self.spread = _make_loop(model, mode, place, options, self.live)

    def __call__(self, parts: tuple[Any, ...], iterator: Iterator[Any]) -> tuple[Any, tuple[Any, ...]]:
        """One step on the next batch."""
        state = self.spread.spread(state_of(self._mode, parts))
        result, state = self.loop.execute_one(state, next(iterator))
        value = result.rows() if self._mode == "predict" else result.value
        return value, parts_of(self._mode, self.spread.gather(state))


def _make_loop(model: Any, mode: Mode, place: Place, options: Options, live: Live | None) -> tuple[Loop, Spread]:
    """The loop of a model that is not pipelined, and how its state lies on the devices."""
    replicas, accumulation = place.replicas, Accumulation()
    spread, twin = Spread(replicas), None
    if mode == "train":
        accumulation = options.accumulation.of_weights(model.trainable_variables)
        if options.shard_optimizer and replicas.count > 1:
            shards, twin = make_shards(model.optimizer, model.trainable_variables, replicas)
            spread = replace(spread, shards=shards)
        spread = replace(spread, offloaded=offload.is_offloaded(options, replicas))
    step = make_step(model, mode, place, options, spread, twin)
    return Loop(f"{model.name}_{mode}", step, place, accumulation, spread, live), spread


@dataclass(frozen=True, slots=True)
class Moment:
    """A running `fit` between two executions: all that another process needs in order to go on from here.

    `state` is a `Held.snapshot`, `epoch` Keras' number of the epoch and `logs` those of the last execution. `resumed`
    is called when all is in place: after `on_epoch_begin`, which this moment had behind it.
    """

    epoch: int
    position: Position
    state: State
    logs: Logs
    resumed: Callable[[], None]


class Keeper(Protocol):
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
        self._held: list[Held] = []
        self._plans: dict[Any, StagePlan] = {}
        self._live: Live | None = None
        self.validation: Feed | None = None
        """The validation data of a running `fit`, kept over its epochs."""
        self.callbacks: Any = None
        """The callbacks of a running `fit`."""
        self.resume: Moment | None = None
        """Where a `fit` goes on, if not at its beginning. Set by a callback when training begins."""
        self.keeper: Keeper | None = None
        """Who saves a running `fit`. Set by a callback when training begins."""

    @property
    def effective_options(self) -> Options:
        """The model's options together with what its optimizer asks for."""
        optimizer = getattr(self.model, "optimizer", None)
        return self.options if optimizer is None else self.options.with_optimizer(describe(optimizer))

    def set_options(self, options: Options) -> None:
        """Change the options; what was compiled under others is dropped when it is next asked for."""
        self.options = options

    @property
    def pipelined(self) -> bool:
        """Whether the model runs in stages."""
        return is_pipelined(self.model, self.options.stages)

    @property
    def place(self) -> Place:
        """Where the model runs under the current configuration."""
        if self.pipelined:
            # A device that waits for another one blocks a thread, which the one that works could use.
            devices.reserve(devices.cores())
            return make_place(self.strategy.system, self.plan("test").device_count)
        if self.options.live_callbacks:
            devices.reserve(1)
        return make_place(self.strategy.system)

    def plan(self, mode: Mode) -> StagePlan:
        """How the stages of a pipelined model are spread over devices; kept as long as the model stays the same."""
        options = self.effective_options
        key = (mode == "train", options, tuple(map(id, self.model.layers)), self.strategy.system.settings)
        if key not in self._plans:
            self._plans = {old: plan for old, plan in self._plans.items() if old[1:] == key[1:]}
            self._plans[key] = make_plan(self.model, mode, options, self.strategy.system.settings)
        return self._plans[key]

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
            current = StepFunction(self.model, mode, place, options, self.plan(mode) if self.pipelined else None)
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
        loop, live, held = function.loop, function.live, Held(self.model, mode, function.spread)
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
        slabs = Ahead(feed.epoch(), depth)
        self._held.append(held)
        try:
            for slab in slabs:
                position = feed.position() if keeper else None
                if live is not None:
                    value = self._run_live(mode, loop, live, held, feed.source.resident, slab, slabs, began, ended)
                else:
                    began(slab.begin)
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
        live: Live,
        held: Held,
        resident: Any,
        slab: Slab,
        slabs: Ahead,
        began: Callable[[int], None],
        ended: Callable[[int, Logs], None],
    ) -> Any:
        """One execution whose steps are told to the callbacks while it runs; its logs, or outputs."""
        predicts = mode == "predict"
        teller = Teller(live, slab, began, ended, _batch_outputs if predicts else _step_logs)
        self._live = live
        try:
            launch = functools.partial(teller.launch, meanwhile=slabs.prepare)
            results = held.run(loop.execute, resident, slab, launch)
        finally:
            self._live = None
        if live.error is not None:
            raise live.error
        value = _rows(results) if predicts else results[-1].value
        teller.rest(functools.partial(_outputs_of, value, slab) if predicts else lambda _: _step_logs(value, 0))
        return value


def _step_logs(logs: Logs, _batch: int) -> Logs:
    return dict(keras_private.pythonify_logs(logs))


def _batch_outputs(outputs: Any, replica: int) -> Logs:
    return {"outputs": jax.tree.map(lambda a: a[replica], outputs)}


def _outputs_of(rows: Any, slab: Slab, batch: int) -> Logs:
    size = 0 if slab.body is None else jax.tree.leaves(slab.body)[0].shape[2]
    stop = (batch + 1) * size if batch < slab.count else None
    return {"outputs": jax.tree.map(lambda a: a[batch * size : stop], rows)}


def fit(
    session: Session,
    x: Any = None,
    y: Any = None,
    batch_size: int | None = None,
    epochs: int = 1,
    verbose: Any = "auto",
    callbacks: Any = None,
    validation_split: float = 0.0,
    validation_data: Any = None,
    shuffle: bool | str = True,
    class_weight: Any = None,
    sample_weight: Any = None,
    initial_epoch: int = 0,
    steps_per_epoch: int | None = None,
    validation_steps: int | None = None,
    validation_batch_size: int | None = None,
    validation_freq: Any = 1,
) -> Any:
    """Train, as `keras.Model.fit` does."""
    model = session.model
    keras_private.assert_compiled(model, "fit")
    options = session.effective_options
    check_training(model, options)
    batch_size = positive("batch_size", batch_size, optional=True)
    steps_per_epoch = positive("steps_per_epoch", steps_per_epoch, optional=True)
    validation_steps = positive("validation_steps", validation_steps, optional=True)
    validation_batch_size = positive("validation_batch_size", validation_batch_size, optional=True)
    initial_epoch = positive("initial_epoch", initial_epoch, least=0)
    epochs = positive("epochs", epochs, least=0)
    if not 0 <= validation_split < 1:
        raise ValueError(
            f"`validation_split` is {validation_split!r}. Give the share of rows to hold out: 0 or more, and below 1."
        )
    epochs = limited("max_epochs", keras.config.max_epochs(), epochs)
    if validation_split and validation_data is None:
        (x, y, sample_weight), validation_data = keras_private.train_validation_split(
            (x, y, sample_weight), validation_split=validation_split
        )
    _build_early(session, x, y, sample_weight, batch_size)
    feed = make_feed(
        session.place, model.steps_per_execution, x, y, sample_weight,
        accumulated=options.accumulation.steps,
        batch_size=batch_size, steps=steps_per_epoch, shuffle=shuffle, class_weight=class_weight,
    )  # fmt: skip
    log.info("%s: %s", model.name, describe_updates(feed, session.place.replicas, options))
    build(model, feed.source.first_batch)
    callbacks = _callback_list(model, callbacks, add_history=True, verbose=verbose, epochs=epochs, steps=feed.num_steps)
    session.validation = session.resume = session.keeper = None
    session.callbacks = callbacks
    model.stop_training = False
    epoch_logs: Logs = {}
    callbacks.on_train_begin()
    try:
        start = keras_private.start_epoch(model, initial_epoch)
        if session.resume is not None and session.resume.epoch < start:
            session.resume = None
        for epoch in range(session.resume.epoch if session.resume else start, epochs):
            model.reset_metrics()
            callbacks.on_epoch_begin(epoch)
            epoch_logs = _run_metrics(session, "train", feed, callbacks, lambda: model.stop_training)
            if validation_data is not None and keras_private.should_evaluate(model, epoch, validation_freq):
                val_x, val_y, val_weight = keras.utils.unpack_x_y_sample_weight(validation_data)
                settings: Any = {"batch_size": validation_batch_size or batch_size, "steps": validation_steps}
                session.validation = session.validation or make_feed(
                    session.place, model.steps_per_execution, val_x, val_y, val_weight, **settings
                )
                # Through the model, because a user's class may have an `evaluate` of its own.
                values = model.evaluate(
                    val_x, val_y, sample_weight=val_weight, **settings,
                    callbacks=callbacks, return_dict=True, _use_cached_eval_dataset=True,
                )  # fmt: skip
                epoch_logs |= {f"val_{name}": value for name, value in values.items()}
            callbacks.on_epoch_end(epoch, epoch_logs)
            if model.stop_training:
                break
    finally:
        if session.keeper is not None:
            session.keeper.finish()
        session.validation = session.resume = session.keeper = session.callbacks = None
        if epochs > 0:
            _finalize(model)
    callbacks.on_train_end(logs=epoch_logs)
    return model.history


def evaluate(
    session: Session,
    x: Any = None,
    y: Any = None,
    batch_size: int | None = None,
    verbose: Any = "auto",
    sample_weight: Any = None,
    steps: int | None = None,
    callbacks: Any = None,
    return_dict: bool = False,
    *,
    _use_cached_eval_dataset: bool = False,
) -> Any:
    """Losses and metrics over the data, as `keras.Model.evaluate` gives them."""
    model = session.model
    keras_private.assert_compiled(model, "evaluate")
    feed = session.validation if _use_cached_eval_dataset else None
    _build_early(session, x, y, sample_weight, batch_size)
    feed = feed or make_feed(
        session.place, model.steps_per_execution, x, y, sample_weight, batch_size=batch_size, steps=steps
    )
    callbacks = _callback_list(model, callbacks, verbose=verbose, epochs=1, steps=feed.num_steps)
    logs = _evaluate(session, feed, callbacks)
    return logs if return_dict else keras_private.in_order(model, logs)


def _build_early(session: Session, x: Any, y: Any, sample_weight: Any, batch_size: int | None) -> None:
    """Build a pipelined model that is not built: how many devices it takes is known only then."""
    model = session.model
    if not session.pipelined or is_built(model) or isinstance(x, Iterator):
        return
    feed = make_feed(make_place(session.strategy.system), 1, x, y, sample_weight, batch_size=batch_size)
    build_for_predict(model, feed.source.first_batch)


def _evaluate(session: Session, feed: Feed, callbacks: Any) -> Logs:
    model = session.model
    feed.restart()
    build(model, feed.source.first_batch)
    model.stop_evaluating = False
    callbacks.on_test_begin()
    model.reset_metrics()
    logs = keras_private.pythonify_logs(_run_metrics(session, "test", feed, callbacks, lambda: model.stop_evaluating))
    callbacks.on_test_end(logs)
    return dict(logs)


def _run_metrics(session: Session, mode: Mode, feed: Feed, callbacks: Any, stopped: Callable[[], bool]) -> Logs:
    """One epoch of training or evaluation; its logs."""
    logs: Logs | None = None
    for latest in session.epoch(mode, feed, callbacks):
        logs = latest
        if stopped():
            break
    if logs is None:
        raise ValueError("The data source gave no batch for this epoch. Give at least one batch per epoch.")
    if session.options.metric_reduction is not MetricReduction.NONE:
        return dict(logs)
    return keras_private.final_logs(session.model, logs)


def predict(
    session: Session,
    x: Any,
    batch_size: int | None = None,
    verbose: Any = "auto",
    steps: int | None = None,
    callbacks: Any = None,
) -> Any:
    """The model's outputs for every row of the data, in its order."""
    model = session.model
    _build_early(session, x, None, None, batch_size)
    feed = make_feed(session.place, model.steps_per_execution, x, batch_size=batch_size, steps=steps)
    build_for_predict(model, feed.source.first_batch)
    callbacks = _callback_list(model, callbacks, verbose=verbose, epochs=1, steps=feed.num_steps)
    model.stop_predicting = False
    callbacks.on_predict_begin()
    blocks = []
    for outputs in session.epoch("predict", feed, callbacks):
        blocks.append(outputs)
        if model.stop_predicting:
            break
    callbacks.on_predict_end()
    if not blocks:
        raise ValueError("The data source gave no batch to predict. Give at least one batch.")
    return _concatenate(blocks)


def _rows(results: list[Result]) -> Any:
    return _concatenate([result.rows() for result in results])


def _concatenate(blocks: list[Any]) -> Any:
    return jax.tree.map(lambda *parts: np.concatenate(parts) if len(parts) > 1 else parts[0], *blocks)


def _callback_list(model: Any, callbacks: Any, **settings: Any) -> Any:
    """Keras' container of callbacks; one that is already there (validation inside `fit`) is used as is."""
    if isinstance(callbacks, keras.callbacks.CallbackList):
        return callbacks
    verbose = settings["verbose"]
    return keras.callbacks.CallbackList(callbacks, add_progbar=verbose != 0, model=model, **settings)


def _finalize(model: Any) -> None:
    """What an optimizer does to the weights when training ends, such as writing averages back."""
    if isinstance(model.optimizer, keras.optimizers.Optimizer):
        model.optimizer.finalize_variable_values(model.trainable_weights)
