"""`fit`, `evaluate` and `predict` on the host: feed a slab, launch it, call the callbacks, repeat.

Who does what: data/make_feed.py decides how data is fed, session.py runs an epoch, and validation.py validates after
one. This file only defines the order in which things happen, which is Keras' order.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from openipu import _validate as validate
from openipu.engine.core.model_state import prepare_step
from openipu.engine.core.options import MetricReduction
from openipu.engine.core.state import Logs, Mode
from openipu.engine.core.update_rules import check_training
from openipu.engine.data.feed import Feed
from openipu.engine.data.make_feed import limited, make_feed
from openipu.engine.devices import group
from openipu.engine.devices.placement import placement_on
from openipu.engine.facts.calls import doing
from openipu.engine.interrupts import interruptible
from openipu.engine.keras_compat import api as keras_api
from openipu.engine.keras_compat.build_model import build, build_for_predict, is_built
from openipu.engine.loop.loop import concatenate
from openipu.engine.types import Data, Tree

import keras
from keras.callbacks import Callback, CallbackList

from .about_to_train import tell
from .notices import describe_updates
from .session import ResumePoint, Session
from .together import may_act_alone, one_end, without_writers
from .validation import Validation

log = logging.getLogger("openipu")

Callbacks: TypeAlias = Callback | Sequence[Callback] | CallbackList | None
"""What users pass as `callbacks`."""


def fit(
    session: Session,
    x: Data = None,
    y: Data = None,
    batch_size: int | None = None,
    epochs: int = 1,
    verbose: str | int = "auto",
    callbacks: Callbacks = None,
    validation_split: float = 0.0,
    validation_data: Data = None,
    shuffle: bool | str = True,
    class_weight: Mapping[int, float] | None = None,
    sample_weight: Data = None,
    initial_epoch: int = 0,
    steps_per_epoch: int | None = None,
    validation_steps: int | None = None,
    validation_batch_size: int | None = None,
    validation_freq: int | Collection[int] = 1,
) -> keras.callbacks.History:
    """Train, as `keras.Model.fit` does."""
    model = session.model
    keras_api.assert_compiled(model, "fit")
    options = session.effective_options
    check_training(model, options)
    batch_size = validate.count("batch_size", batch_size, optional=True)
    steps_per_epoch = validate.count("steps_per_epoch", steps_per_epoch, optional=True)
    validation_steps = validate.count("validation_steps", validation_steps, optional=True)
    validation_batch_size = validate.count("validation_batch_size", validation_batch_size, optional=True)
    initial_epoch = validate.count("initial_epoch", initial_epoch, least=0)
    epochs = validate.count("epochs", epochs, least=0)
    validation_split = validate.number("validation_split", validation_split, least=0, below=1)
    epochs = limited("max_epochs", keras.config.max_epochs(), epochs)
    if validation_split and validation_data is None:
        (x, y, sample_weight), validation_data = keras_api.train_validation_split(
            (x, y, sample_weight), validation_split=validation_split
        )
    validation = Validation(validation_data, validation_freq, validation_batch_size or batch_size, validation_steps)
    _build_early(session, x, y, sample_weight, batch_size)
    place = session.reserve_place("train")
    with doing("feed"), interruptible():
        feed = make_feed(
            place, model.steps_per_execution, x, y, sample_weight,
            accumulated=options.updates.steps,
            batch_size=batch_size, steps=steps_per_epoch, shuffle=shuffle, class_weight=class_weight,
        )  # fmt: skip
    log.info("%s: %s", model.name, describe_updates(feed, place.replicas, options))
    with doing("plan"):
        build(model, feed.source.first_batch)
        prepare_step(model, feed.source.first_batch)
        session.check_labels("train", feed)
    tell(session, feed)
    container = _callback_list(model, callbacks, add_history=True, verbose=verbose, epochs=epochs, steps=feed.num_steps)
    return _train(session, feed, container, validation, initial_epoch, epochs)


def _train(
    session: Session, feed: Feed, callbacks: CallbackList, validation: Validation, initial_epoch: int, epochs: int
) -> keras.callbacks.History:
    """All epochs of a `fit`, with what happens before and after them."""
    model = session.model
    # A callback may call `fit` again, after which the outer one continues with what it had.
    outer = session.validation, session.resume, session.keeper, session.callbacks
    session.validation = session.resume = session.keeper = None
    session.callbacks = callbacks
    model.stop_training = False
    try:
        with doing("callbacks"), interruptible():
            callbacks.on_train_begin()
        logs = _train_epochs(session, feed, callbacks, validation, initial_epoch, epochs)
    finally:
        keeper = session.keeper
        session.validation, session.resume, session.keeper, session.callbacks = outer
        if keeper is not None:
            with doing("checkpoint"):
                keeper.finish()
    with doing("callbacks"), interruptible():
        callbacks.on_train_end(logs=logs)
    return model.history


def _train_epochs(
    session: Session, feed: Feed, callbacks: CallbackList, validation: Validation, initial_epoch: int, epochs: int
) -> Logs:
    """The epochs that are left to train. Returns the logs of the last one."""
    model, place = session.model, session.place("train")
    logs: Logs = {}
    try:
        for epoch in _epochs(session, initial_epoch, epochs):
            logs = _train_epoch(session, feed, callbacks, validation, epoch)
            if place.any_of("the end of an epoch", model.stop_training):
                break
    finally:
        if epochs > 0:
            _finalize(model)
    return logs


def _train_epoch(session: Session, feed: Feed, callbacks: CallbackList, validation: Validation, epoch: int) -> Logs:
    """One epoch of training, and the validation after it if that is due. Returns the logs of both."""
    model = session.model
    model.reset_metrics()
    with doing("callbacks"), interruptible():
        callbacks.on_epoch_begin(epoch)
    logs = _run_metrics(session, "train", feed, callbacks, lambda: model.stop_training)
    if validation.is_due(model, epoch):
        logs |= validation.run(session, callbacks)
    with doing("callbacks"), interruptible():
        callbacks.on_epoch_end(epoch, logs)
    return logs


def _epochs(session: Session, initial_epoch: int, epochs: int) -> range:
    """The epochs to train, from the first one or from where a checkpoint resumes."""
    if session.resume is not None:
        return _left(session.resume, initial_epoch, epochs)
    first = keras_api.start_epoch(session.model, initial_epoch)
    return range(session.place("train").of_first("the first epoch", first), epochs)


def _left(resume: ResumePoint, initial_epoch: int, epochs: int) -> range:
    """The epochs left to a resumed run, including the one it is in, of which perhaps only the end is left.

    The checkpoint says where the run is, so `initial_epoch` has no effect. It only must not skip epochs.
    """
    here = resume.epoch
    if initial_epoch > here + 1:
        raise ValueError(
            f"`initial_epoch` is {initial_epoch}, but the newest checkpoint is in epoch {here} (counted from 0), so "
            f"epochs are missing. Give at most {here + 1} to resume from it, or another folder to start over."
        )
    if here >= epochs:
        log.warning(
            "The newest checkpoint is in epoch %d, and `epochs` is %d: nothing is left to train. The weights are "
            "those of the checkpoint.", here + 1, epochs,
        )  # fmt: skip
    elif resume.ended and here == epochs - 1:
        log.warning(
            "The newest checkpoint has %s: nothing is left to train. Give more `epochs` to train further, or another "
            "folder to start over.", "the only epoch" if epochs == 1 else f"all {epochs} epochs",
        )  # fmt: skip
    return range(here, max(epochs, here + 1) if resume.ended else epochs)


def evaluate(
    session: Session,
    x: Data = None,
    y: Data = None,
    batch_size: int | None = None,
    verbose: str | int = "auto",
    sample_weight: Data = None,
    steps: int | None = None,
    callbacks: Callbacks = None,
    return_dict: bool = False,
    *,
    _use_cached_eval_dataset: bool = False,
) -> Any:
    """Losses and metrics over the data, as `keras.Model.evaluate` returns them."""
    model = session.model
    keras_api.assert_compiled(model, "evaluate")
    feed = session.validation if _use_cached_eval_dataset else None
    _build_early(session, x, y, sample_weight, batch_size)
    place = session.reserve_place("test")
    with doing("feed"), interruptible():
        feed = feed or make_feed(
            place, model.steps_per_execution, x, y, sample_weight, batch_size=batch_size, steps=steps
        )
    container = _callback_list(model, callbacks, verbose=verbose, epochs=1, steps=feed.num_steps)
    logs = _evaluate(session, feed, container)
    return logs if return_dict else keras_api.in_order(model, logs)


def _build_early(session: Session, x: Data, y: Data, sample_weight: Data, batch_size: int | None) -> None:
    """Build a pipelined model that is not built yet, because only then the number of its devices is known."""
    model = session.model
    if not session.pipelined or is_built(model) or isinstance(x, Iterator):
        return
    feed = make_feed(placement_on(session.strategy.system), 1, x, y, sample_weight, batch_size=batch_size, told=True)
    with doing("plan"):
        build_for_predict(model, feed.source.first_batch)


def _evaluate(session: Session, feed: Feed, callbacks: CallbackList) -> Logs:
    model = session.model
    feed.restart()
    with doing("plan"):
        build(model, feed.source.first_batch)
        session.check_labels("test", feed)
    model.stop_evaluating = False
    with doing("callbacks"), interruptible():
        callbacks.on_test_begin()
    model.reset_metrics()
    logs = keras_api.pythonify_logs(_run_metrics(session, "test", feed, callbacks, lambda: model.stop_evaluating))
    with doing("callbacks"), interruptible():
        callbacks.on_test_end(logs)
    return dict(logs)


def _run_metrics(
    session: Session, mode: Mode, feed: Feed, callbacks: CallbackList, stopped: Callable[[], bool]
) -> Logs:
    """Run one epoch of training or evaluation, and return its logs."""
    logs: Logs | None = None
    place = session.place(mode)
    alone = may_act_alone(place, callbacks)
    stopped = one_end(place, alone, stopped)
    with contextlib.closing(session.epoch(mode, feed, callbacks, alone)) as epoch:
        for latest in epoch:
            logs = latest
            if stopped():
                break
    if logs is None:
        raise ValueError("The data source gave no batch for this epoch. Give at least one batch per epoch.")
    if session.options.metric_reduction is not MetricReduction.NONE:
        return dict(logs)
    return keras_api.final_logs(session.model, logs)


def predict(
    session: Session,
    x: Data,
    batch_size: int | None = None,
    verbose: str | int = "auto",
    steps: int | None = None,
    callbacks: Callbacks = None,
) -> Tree:
    """The model's outputs for every row of the data, in data order."""
    model = session.model
    _build_early(session, x, None, None, batch_size)
    place = session.reserve_place("predict")
    with doing("feed"), interruptible():
        feed = make_feed(place, model.steps_per_execution, x, batch_size=batch_size, steps=steps)
    with doing("plan"):
        build_for_predict(model, feed.source.first_batch)
    container = _callback_list(model, callbacks, verbose=verbose, epochs=1, steps=feed.num_steps)
    model.stop_predicting = False
    with doing("callbacks"), interruptible():
        container.on_predict_begin()
    blocks = []
    alone = may_act_alone(place, container)
    stopped = one_end(place, alone, lambda: model.stop_predicting)
    with contextlib.closing(session.epoch("predict", feed, container, alone)) as epoch:
        for outputs in epoch:
            blocks.append(outputs)
            if stopped():
                break
    with doing("callbacks"), interruptible():
        container.on_predict_end()
    if not blocks:
        raise ValueError("The data source gave no batch to predict. Give at least one batch.")
    return concatenate(blocks)


def _callback_list(model: keras.Model, callbacks: Callbacks, **settings: Any) -> CallbackList:
    """Keras' container of callbacks. If there is one already (validation inside `fit`), it is used as is."""
    if isinstance(callbacks, keras.callbacks.CallbackList):
        return callbacks
    if model._ipu_session.strategy.shared and group.index() > 0:
        callbacks, settings["verbose"] = without_writers(callbacks), 0
    return keras.callbacks.CallbackList(callbacks, add_progbar=settings["verbose"] != 0, model=model, **settings)


def _finalize(model: keras.Model) -> None:
    """Let the optimizer do what it does to the weights when training ends, such as writing back averages."""
    if isinstance(model.optimizer, keras.optimizers.Optimizer):
        model.optimizer.finalize_variable_values(model.trainable_weights)
