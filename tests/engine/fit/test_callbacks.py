"""Keras' callbacks and progress bar, over loops that look at the host once per execution."""
# Keras decides the arguments of hooks, steps and metrics.
# ruff: noqa: ARG002, ARG005

import csv
import re

import keras
import numpy as np
import pytest

import zoo

pytestmark = zoo.KERAS_WARNINGS

X, Y = zoo.table(99)
HELD_OUT = zoo.table(21)


def fit(steps_per_execution, callbacks, case="dense", **settings):
    """Train a plain model (None) or one of a strategy; `callbacks` makes new ones for each model."""
    model = zoo.make(zoo.CASES[case], steps_per_execution)
    settings = {"batch_size": 8, "epochs": 4, "verbose": 0, "validation_data": HELD_OUT, **settings}
    history = model.fit(X, Y, callbacks=callbacks(), **settings)
    return model, history


def assert_same_training(callbacks, steps_per_execution=5, **settings):
    plain, expected = fit(None, callbacks, **settings)
    model, actual = fit(steps_per_execution, callbacks, **settings)
    assert actual.epoch == expected.epoch
    assert list(actual.history) == list(expected.history)
    for name, values in expected.history.items():
        np.testing.assert_allclose(actual.history[name], values, rtol=1e-5, atol=1e-6, err_msg=name)
    for a, b in zip(model.get_weights(), plain.get_weights(), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
    return model, actual


def test_early_stopping_restores_the_best_weights():
    def callbacks():
        return [keras.callbacks.EarlyStopping("val_loss", mode="max", patience=2, restore_best_weights=True)]

    _, history = assert_same_training(callbacks, epochs=9)
    assert len(history.epoch) == 3


def test_learning_rate_scheduler():
    def callbacks():
        return [keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.5)]

    model, history = assert_same_training(callbacks)
    np.testing.assert_allclose(history.history["learning_rate"], [0.005, 0.0025, 0.00125, 0.000625], rtol=1e-5)
    np.testing.assert_allclose(float(model.optimizer.learning_rate), 0.000625, rtol=1e-5)


def test_reduce_on_plateau():
    def callbacks():
        return [keras.callbacks.ReduceLROnPlateau("loss", mode="max", factor=0.1, patience=1)]

    _, history = assert_same_training(callbacks)
    assert history.history["learning_rate"][-1] < history.history["learning_rate"][0]


def test_model_checkpoint_writes_what_the_epoch_ended_with(tmp_path):
    seen = []

    class Weights(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            seen.append(self.model.get_weights())

    path = tmp_path / "at-{epoch}.weights.h5"
    fit(5, lambda: [keras.callbacks.ModelCheckpoint(path, save_weights_only=True), Weights()])
    assert sorted(p.name for p in tmp_path.iterdir()) == [f"at-{n}.weights.h5" for n in (1, 2, 3, 4)]
    model = zoo.dense()
    for n, weights in enumerate(seen, 1):
        model.load_weights(tmp_path / f"at-{n}.weights.h5")
        assert all(np.array_equal(a, b) for a, b in zip(model.get_weights(), weights, strict=True))


def test_model_checkpoint_in_the_middle_of_an_epoch(tmp_path):
    # Three executions of 5, 5 and 3 steps: the count passes 5 and 10 once each in every epoch.
    path = tmp_path / "e{epoch}b{batch}.weights.h5"
    fit(5, lambda: [keras.callbacks.ModelCheckpoint(path, save_weights_only=True, save_freq=5)], epochs=1)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["e1b10.weights.h5", "e1b5.weights.h5"]


def test_save_best_only(tmp_path):
    path = tmp_path / "best.keras"
    _, history = fit(5, lambda: [keras.callbacks.ModelCheckpoint(path, monitor="val_loss", save_best_only=True)])
    best = keras.models.load_model(path).evaluate(*HELD_OUT, verbose=0, return_dict=True)
    np.testing.assert_allclose(best["loss"], min(history.history["val_loss"]), rtol=1e-5)


def test_backup_and_restore_goes_on_after_an_interruption(tmp_path):
    class Interrupt(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            if epoch == 2:
                raise KeyboardInterrupt

    def backup():
        return keras.callbacks.BackupAndRestore(tmp_path / "backup")

    uninterrupted, expected = fit(5, list, shuffle=False)
    with pytest.raises(KeyboardInterrupt):
        fit(5, lambda: [backup(), Interrupt()], shuffle=False)
    model, history = fit(5, lambda: [backup()], shuffle=False)
    assert history.epoch == [2, 3]
    np.testing.assert_allclose(history.history["loss"], expected.history["loss"][2:], rtol=1e-5)
    for a, b in zip(model.get_weights(), uninterrupted.get_weights(), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_terminate_on_nan():
    x = X.copy()
    x[60:] = np.nan
    model = zoo.make(zoo.CASES["dense"], 5)
    history = model.fit(x, Y, 8, 5, 0, shuffle=False, callbacks=[keras.callbacks.TerminateOnNaN()])
    assert history.epoch == [0]
    assert np.isnan(history.history["loss"][0])


def test_csv_logger(tmp_path):
    _, history = fit(5, lambda: [keras.callbacks.CSVLogger(tmp_path / "log.csv")])
    with (tmp_path / "log.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [int(row["epoch"]) for row in rows] == [0, 1, 2, 3]
    np.testing.assert_allclose([float(row["val_loss"]) for row in rows], history.history["val_loss"], rtol=1e-5)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_tensorboard_writes_what_plain_keras_writes(tmp_path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")

    def events_of(steps_per_execution, folder):
        fit(steps_per_execution, lambda: [keras.callbacks.TensorBoard(folder, update_freq=5, histogram_freq=1)])
        events = {}
        for path in folder.rglob("events.out.tfevents.*"):
            read = accumulator.EventAccumulator(str(path))
            read.Reload()
            events[path.parent.name] = read.Tags()["tensors"]
        return events

    events = events_of(1, tmp_path / "strategy")
    assert events == events_of(None, tmp_path / "keras")
    assert "batch_loss" in events["train"]


def test_lambda_callback_and_the_order_of_all_hooks():
    def calls_of(steps_per_execution):
        calls = []

        class Order(keras.callbacks.Callback):
            pass

        for name in dir(keras.callbacks.Callback):
            if name.startswith("on_") and name not in ("on_batch_begin", "on_batch_end"):
                setattr(Order, name, lambda self, *args, _name=name, **kwargs: calls.append(_name))
        fit(steps_per_execution, lambda: [Order()], epochs=2)
        return calls

    assert calls_of(1) == calls_of(None)
    ends = []
    fit(5, lambda: [keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: ends.append(batch))])
    assert ends == [4, 9, 12] * 4


def test_logs_of_an_execution_are_those_of_the_steps_so_far():
    def logs_of(steps_per_execution):
        seen = {}

        def keep(batch, logs):
            seen[batch] = {name: float(value) for name, value in logs.items()}

        fit(steps_per_execution, lambda: [keras.callbacks.LambdaCallback(on_train_batch_end=keep)], epochs=1)
        return seen

    each, some = logs_of(None), logs_of(5)
    assert sorted(some) == [4, 9, 12]
    for batch, logs in some.items():
        assert logs == pytest.approx(each[batch], rel=1e-5)


def test_a_callback_reads_and_changes_the_model_between_executions():
    class Nudge(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            kernel = self.model.layers[0].kernel
            kernel.assign(kernel + 0.01)
            self.model.optimizer.learning_rate = 0.001 * (batch + 1)

        def on_test_batch_end(self, batch, logs=None):
            assert np.isfinite(self.model.get_weights()[0]).all()

    model, _ = assert_same_training(lambda: [Nudge()], steps_per_execution=1)
    np.testing.assert_allclose(float(model.optimizer.learning_rate), 0.013)


def test_a_callback_evaluates_and_predicts_in_the_middle_of_training():
    class Look(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            self.model.predict(X[:5], verbose=0)

        def on_epoch_end(self, epoch, logs=None):
            logs["extra"] = self.model.evaluate(*HELD_OUT, verbose=0)[0]

    assert_same_training(lambda: [Look()], steps_per_execution=5, epochs=2)


def test_stopping_in_the_middle_of_an_epoch():
    class Stop(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            self.model.stop_training = True

    model, history = fit(5, lambda: [Stop()])
    assert history.epoch == [0]
    assert int(model.optimizer.iterations) == 5
    model.fit(X, Y, 8, 1, 0)
    assert int(model.optimizer.iterations) == 5 + 13


def test_history_is_kept_on_the_model():
    model, history = fit(5, list)
    assert model.history is history
    assert set(history.history) == {"loss", "accuracy", "val_loss", "val_accuracy"}
    assert history.params == {"verbose": 0, "epochs": 4, "steps": 13}
    assert all(isinstance(value, float) for values in history.history.values() for value in values)


# --- progress bar ----------------------------------------------------------------------------------------------------


def bars(text):
    """(steps done, steps in all) of every state that the progress bars showed."""
    plain = re.sub(r"\x1b\[[0-9;]*m|\x08", "", text)
    return [(int(a), int(b)) for a, b in re.findall(r"(\d+)/(\d+) .?[━\s]", plain)]


@pytest.mark.parametrize("steps_per_execution", [1, 5, 13, 100])
def test_the_progress_bar_ends_at_its_target(capsys, steps_per_execution):
    fit(steps_per_execution, list, verbose=1, epochs=2)
    shown = bars(capsys.readouterr().out)
    assert {total for _, total in shown} == {13}
    assert max(done for done, _ in shown) == 13
    assert shown[-1] == (13, 13)


def test_evaluate_and_predict_end_at_their_target(capsys):
    model = zoo.make(zoo.CASES["dense"], 5)
    model.evaluate(X, Y, batch_size=8)
    model.predict(X, batch_size=8)
    shown = bars(capsys.readouterr().out)
    assert shown.count((13, 13)) >= 2
    assert all(done <= total == 13 for done, total in shown)


def test_verbose_2_prints_one_line_per_epoch(capsys):
    fit(5, list, verbose=2, epochs=2)
    lines = capsys.readouterr().out.strip().splitlines()
    assert [bool(re.match(r"13/13 - .*loss: .*val_loss: ", line)) for line in lines] == [False, True] * 2


def test_a_stream_of_unknown_length_learns_its_target(capsys):
    def stream():
        for start in range(0, 99, 8):
            yield X[start : start + 8], Y[start : start + 8]

    zoo.make(zoo.CASES["dense"], 5).fit(stream(), shuffle=False)
    assert bars(capsys.readouterr().out)[-1] == (13, 13)
