"""What differs from plain Keras on purpose; docs/keras-behaviour.md lists it."""

# Keras decides the arguments of hooks, steps and metrics.
# ruff: noqa: ARG002, ARG005

import keras
import numpy as np
import pytest

import zoo
from one_layer import Example, compiled

pytestmark = zoo.KERAS_WARNINGS


def steps_seen(model, rows, **settings):
    ends = []
    note = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: ends.append(batch))
    model.fit(np.ones((rows, 4)), np.zeros((rows, 3)), batch_size=4, verbose=0, callbacks=[note], **settings)
    return ends


def test_the_last_execution_reports_the_last_step_that_there_was():
    with zoo.scope_if(True):
        ours = compiled(Example, 3)
    assert steps_seen(ours, 28) == [2, 5, 6]
    assert steps_seen(compiled(Example, 3), 28) == [2, 5, 8], "plain Keras counts steps that did not happen"


def test_callbacks_that_count_steps_do_not_drift(tmp_path):
    """14 steps are two epochs of 7; that is why short last executions do not report Keras' index."""

    def saved(model):
        found = []

        class Noted(keras.callbacks.ModelCheckpoint):
            def _save_model(self, epoch, batch, logs):
                found.append((epoch, batch))

        model.fit(np.ones((28, 4)), np.zeros((28, 3)), batch_size=4, epochs=6, verbose=0,
                  callbacks=[Noted(tmp_path / "model.keras", save_freq=14)])  # fmt: skip
        return found

    with zoo.scope_if(True):
        ours = compiled(Example, 3)
    assert saved(ours) == [(1, 6), (3, 6), (5, 6)]
    assert saved(compiled(Example, 3)) == [(1, 5), (3, 2), (4, 8)], "plain Keras drifts"


def test_a_model_of_a_scope_has_a_class_of_its_own():
    with zoo.scope_if(True):
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    assert type(model) is not keras.Sequential
    assert isinstance(model, keras.Sequential)
    assert (type(model).__name__, type(model).__module__) == ("Sequential", keras.Sequential.__module__)


def test_steps_per_epoch_is_exact():
    with zoo.scope_if(True):
        ours = compiled(Example, 3)
    steps_seen(ours, 40, steps_per_epoch=4, epochs=2)
    assert int(ours.optimizer.iterations) == 8
    plain = compiled(Example, 3)
    steps_seen(plain, 40, steps_per_epoch=4, epochs=2)
    assert int(plain.optimizer.iterations) > 8, "plain Keras rounds up to whole executions"


def test_a_finite_stream_of_unknown_length_needs_no_warning():
    def batches():
        for _ in range(5):
            yield np.ones((2, 4)), np.zeros((2, 3))

    with zoo.scope_if(True):
        ours = compiled(Example, 2)
    ours.fit(batches(), verbose=0, shuffle=False)
    with pytest.warns(UserWarning, match="ran out of data"):
        compiled(Example, 1).fit(batches(), verbose=0, shuffle=False)


def test_limits_on_epochs_and_steps_are_kept_and_told():
    keras.config.set_max_epochs(2)
    keras.config.set_max_steps_per_epoch(3)
    try:
        with zoo.scope_if(True):
            model = compiled(Example, 2)
        with pytest.warns(UserWarning, match="max_epochs"), pytest.warns(UserWarning, match="max_steps_per_epoch"):
            history = model.fit(np.ones((80, 4)), np.zeros((80, 3)), batch_size=8, epochs=5, verbose=0)
        keras.config.set_max_epochs(None)
        with pytest.warns(UserWarning, match="max_steps_per_epoch") as warned:
            model.fit(np.ones((40, 4)), np.zeros((40, 3)), batch_size=8, verbose=0, validation_split=0.5)
        assert len(warned) == 1, "training and validation have the same limit"
    finally:
        keras.config.set_max_epochs(None)
        keras.config.set_max_steps_per_epoch(None)
    assert history.epoch == [0, 1]
    assert int(model.optimizer.iterations) == 6 + 3
