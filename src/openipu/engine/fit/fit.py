"""fit, evaluate and predict on the host: feed a slab, launch it, tell the callbacks, repeat.

Who does what: data/make_feed.py decides, session.py runs an epoch. Here is only the order in which things happen, which
is Keras' order.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

from openipu import _validate as validate
from openipu.engine.core.options import MetricReduction
from openipu.engine.core.state import Logs, Mode
from openipu.engine.core.update_rules import check_training
from openipu.engine.data.feed import Feed
from openipu.engine.data.make_feed import limited, make_feed
from openipu.engine.devices.placement import placement_on
from openipu.engine.keras_compat import api as keras_api
from openipu.engine.keras_compat.build_model import build, build_for_predict, is_built

import keras

from .epoch import concatenate
from .notices import describe_updates
from .session import ResumePoint, Session

log = logging.getLogger("openipu")


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
    _build_early(session, x, y, sample_weight, batch_size)
    place = session.reserve_place()
    feed = make_feed(
        place, model.steps_per_execution, x, y, sample_weight,
        accumulated=options.updates.steps,
        batch_size=batch_size, steps=steps_per_epoch, shuffle=shuffle, class_weight=class_weight,
    )  # fmt: skip
    log.info("%s: %s", model.name, describe_updates(feed, place.replicas, options))
    build(model, feed.source.first_batch)
    callbacks = _callback_list(model, callbacks, add_history=True, verbose=verbose, epochs=epochs, steps=feed.num_steps)
    session.validation = session.resume = session.keeper = None
    session.callbacks = callbacks
    model.stop_training = False
    epoch_logs: Logs = {}
    callbacks.on_train_begin()
    try:
        if session.resume is None:
            todo = range(keras_api.start_epoch(model, initial_epoch), epochs)
        else:
            todo = _left(session.resume, initial_epoch, epochs)
        for epoch in todo:
            model.reset_metrics()
            callbacks.on_epoch_begin(epoch)
            epoch_logs = _run_metrics(session, "train", feed, callbacks, lambda: model.stop_training)
            if validation_data is not None and keras_api.should_evaluate(model, epoch, validation_freq):
                val_x, val_y, val_weight = keras.utils.unpack_x_y_sample_weight(validation_data)
                settings: Any = {"batch_size": validation_batch_size or batch_size, "steps": validation_steps}
                session.validation = session.validation or make_feed(
                    session.reserve_place(), model.steps_per_execution, val_x, val_y, val_weight, **settings
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


def _left(resume: ResumePoint, initial_epoch: int, epochs: int) -> range:
    """The epochs left to a run that goes on, with the one it is in, of which perhaps only the end is left.

    The moment knows where it is, so `initial_epoch` decides nothing; it must only not be beyond what was trained.
    """
    here = resume.epoch
    if initial_epoch > here + 1:
        raise ValueError(
            f"`initial_epoch` is {initial_epoch}, but the newest checkpoint is in epoch {here} (counted from 0), so "
            f"epochs are missing. Give at most {here + 1} to go on from it, or another folder to begin anew."
        )
    if here >= epochs:
        log.warning(
            "`epochs` is %d, but the newest checkpoint is in epoch %d (counted from 0): nothing is left to train. The "
            "weights are those of the checkpoint.", epochs, here,
        )  # fmt: skip
    return range(here, max(epochs, here + 1) if resume.ended else epochs)


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
    keras_api.assert_compiled(model, "evaluate")
    feed = session.validation if _use_cached_eval_dataset else None
    _build_early(session, x, y, sample_weight, batch_size)
    feed = feed or make_feed(
        session.reserve_place(), model.steps_per_execution, x, y, sample_weight, batch_size=batch_size, steps=steps
    )
    callbacks = _callback_list(model, callbacks, verbose=verbose, epochs=1, steps=feed.num_steps)
    logs = _evaluate(session, feed, callbacks)
    return logs if return_dict else keras_api.in_order(model, logs)


def _build_early(session: Session, x: Any, y: Any, sample_weight: Any, batch_size: int | None) -> None:
    """Build a pipelined model that is not built: how many devices it takes is known only then."""
    model = session.model
    if not session.pipelined or is_built(model) or isinstance(x, Iterator):
        return
    feed = make_feed(placement_on(session.strategy.system), 1, x, y, sample_weight, batch_size=batch_size)
    build_for_predict(model, feed.source.first_batch)


def _evaluate(session: Session, feed: Feed, callbacks: Any) -> Logs:
    model = session.model
    feed.restart()
    build(model, feed.source.first_batch)
    model.stop_evaluating = False
    callbacks.on_test_begin()
    model.reset_metrics()
    logs = keras_api.pythonify_logs(_run_metrics(session, "test", feed, callbacks, lambda: model.stop_evaluating))
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
    return keras_api.final_logs(session.model, logs)


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
    feed = make_feed(session.reserve_place(), model.steps_per_execution, x, batch_size=batch_size, steps=steps)
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
    return concatenate(blocks)


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
