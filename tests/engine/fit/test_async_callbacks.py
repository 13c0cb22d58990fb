"""Asynchronous callbacks: every step is told, in order, while the execution runs, and nothing else changes."""

from __future__ import annotations

import itertools
import threading
import time
from typing import Any

import openipu as ipu

import jax
import keras
import numpy as np
import pytest

from replication import configure_all, programs, strategy
from zoo import KERAS_WARNINGS

pytestmark = KERAS_WARNINGS
ROWS, BATCH = 203, 8
STEPS = -(-ROWS // BATCH)
X = np.random.default_rng(0).normal(size=(ROWS, 4)).astype("float32")
Y = X.sum(-1, keepdims=True)


@pytest.fixture(autouse=True, scope="module")
def systems():
    configure_all()


class Told(keras.callbacks.Callback):
    """Keeps what it is told, and in which thread."""

    def __init__(self, look: Any = None) -> None:
        super().__init__()
        self.begun: list[int] = []
        self.ended: list[tuple[int, Any]] = []
        self.threads: set[int] = set()
        self._look = look

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        del logs
        self.begun.append(batch)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.ended.append((batch, dict(logs)))
        self.threads.add(threading.get_ident())
        if self._look is not None:
            self._look(self, batch)  # not `self.model`: Keras takes that for looking at its state

    on_test_batch_begin = on_predict_batch_begin = on_train_batch_begin
    on_test_batch_end = on_predict_batch_end = on_train_batch_end


def small_model() -> Any:
    hidden = [keras.layers.Dense(6, activation="relu"), keras.layers.Dropout(0.2)]
    return keras.Sequential([keras.Input((4,)), *hidden, keras.layers.Dense(1)])


def make_model(replicas: int = 1, *, live: bool, steps: int = 10, accumulate: int = 1, model: Any = None) -> Any:
    keras.utils.set_random_seed(1)
    with strategy(replicas).scope():
        model = (model or small_model)()
    model.set_asynchronous_callbacks(live)
    model.set_gradient_accumulation_options(accumulate)
    model.compile(keras.optimizers.SGD(0.01), "mse", metrics=["mae"], steps_per_execution=steps)
    return model


@pytest.fixture(scope="module")
def shared() -> Any:
    """A model that is compiled once for many tests. Its callbacks may not fall behind."""
    model = make_model(live=True)
    model.set_outfeed_queue_options(buffer_depth=1)
    return model


def updates(model: Any) -> int:
    return int(model.optimizer.iterations.value)


def fit(model: Any, **settings: Any) -> tuple[Told, Any]:
    told = Told(settings.pop("look", None))
    settings = {"batch_size": BATCH, "epochs": 2, "verbose": 0, "shuffle": False, **settings}
    history = model.fit(settings.pop("x", X), settings.pop("y", Y), callbacks=[told], **settings)
    return told, history.history


@pytest.mark.parametrize(
    ("replicas", "accumulate"),
    [(1, 1), (2, 1), pytest.param(1, 5, marks=pytest.mark.slow), pytest.param(4, 2, marks=pytest.mark.slow)],
)
def test_every_step_is_told_and_nothing_else_changes(replicas, accumulate):
    plain, live = (make_model(replicas, live=kind, accumulate=accumulate) for kind in (False, True))
    (_, expected), (told, history) = fit(plain), fit(live)
    assert history == expected
    for a, b in zip(live.get_weights(), plain.get_weights(), strict=True):
        np.testing.assert_array_equal(a, b)
    assert told.begun == [batch for batch, _ in told.ended] == [*range(STEPS)] * 2
    assert told.threads == {threading.get_ident()}
    assert len(programs(live)) == len(programs(plain)) == 2
    final = told.ended[-1][1]
    assert final == {name: pytest.approx(values[-1]) for name, values in history.items()}
    assert all(type(value) is float for value in final.values())


def test_logs_are_those_of_single_steps():
    single, live = make_model(live=False, steps=1), make_model(live=True, steps=13)
    (one_by_one, _), (told, _) = fit(single), fit(live)
    for (a, logs), (b, expected) in zip(told.ended, one_by_one.ended, strict=True):
        assert a == b
        for name in expected:
            np.testing.assert_allclose(logs[name], expected[name], rtol=1e-6)


@pytest.mark.parametrize("replicas", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_evaluate_and_predict(replicas):
    plain, live = (make_model(replicas, live=kind) for kind in (False, True))
    told = Told()
    settings = {"batch_size": BATCH, "verbose": 0}
    assert live.evaluate(X, Y, callbacks=[told], **settings) == plain.evaluate(X, Y, **settings)
    assert [batch for batch, _ in told.ended] == list(range(STEPS))
    told = Told()
    outputs = live.predict(X, callbacks=[told], **settings)
    np.testing.assert_array_equal(outputs, plain.predict(X, **settings))
    assert told.begun == [batch for batch, _ in told.ended] == list(range(STEPS))
    np.testing.assert_array_equal(np.concatenate([logs["outputs"] for _, logs in told.ended]), outputs)


def test_a_pipelined_model_tells_its_steps():
    def train(live: bool) -> Any:
        keras.utils.set_random_seed(1)
        with strategy(4).scope():
            inputs = keras.Input((4,))
            with ipu.keras.PipelineStage(0):
                x = keras.layers.Dense(6, activation="relu")(inputs)
            with ipu.keras.PipelineStage(1):
                x = keras.layers.Dense(1)(x)
            model = keras.Model(inputs, x)
        model.set_pipelining_options(gradient_accumulation_steps_per_replica=4)
        model.set_asynchronous_callbacks(live)
        model.compile(keras.optimizers.SGD(0.01), "mse", steps_per_execution=8)
        return model, *fit(model, epochs=1)

    (plain, _, expected), (live, told, history) = train(False), train(True)
    assert history == expected
    for a, b in zip(live.get_weights(), plain.get_weights(), strict=True):
        np.testing.assert_array_equal(a, b)
    assert told.begun == [batch for batch, _ in told.ended] == list(range(STEPS))
    assert told.ended[-1][1]["loss"] == pytest.approx(history["loss"][0])
    assert len({logs["loss"] for _, logs in told.ended}) > STEPS // 4, "not only the last one of each execution"
    told = Told()
    outputs = live.predict(X, batch_size=BATCH, verbose=0, callbacks=[told])
    np.testing.assert_array_equal(np.concatenate([logs["outputs"] for _, logs in told.ended]), outputs)
    assert len(told.ended) == STEPS


def test_streams_and_own_steps():
    class Own(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.dense = keras.layers.Dense(1)

        def call(self, x: Any) -> Any:
            return self.dense(x)

        def test_step(self, state: Any, data: Any) -> Any:
            logs, state = super().test_step(state, data)
            return {**logs, "twice": 2 * logs["loss"]}, state

    def batches():
        for start in range(0, ROWS, BATCH):
            yield X[start : start + BATCH], Y[start : start + BATCH]

    model = make_model(live=True, model=Own)
    told = Told()
    model.fit(batches(), verbose=0, shuffle=False, callbacks=[told])
    assert [batch for batch, _ in told.ended] == list(range(STEPS)), "the unforeseen last batch included"
    told = Told()
    model.evaluate(X, Y, batch_size=BATCH, verbose=0, callbacks=[told])
    assert all(logs["twice"] == pytest.approx(2 * logs["loss"]) for _, logs in told.ended)
    assert len(told.ended) == STEPS


def slow_model() -> Any:
    """A model whose step takes some milliseconds, so that an execution takes a while."""

    @keras.saving.register_keras_serializable("tests")
    class Slow(keras.layers.Layer):
        def call(self, x: Any) -> Any:
            y = jax.lax.fori_loop(0, 300, lambda _, m: jax.numpy.tanh(m @ m), jax.numpy.eye(64) + x[0, 0])
            return x + 0 * jax.lax.stop_gradient(y)[0, 0]

    return keras.Sequential([keras.Input((4,)), Slow(), keras.layers.Dense(1)])


def test_callbacks_are_called_while_the_execution_runs(slow):
    running: list[bool] = []

    def look(*_: Any) -> None:
        running.append(any(thread.name == "openipu-execution" for thread in threading.enumerate()))

    fit(slow, epochs=1, look=look)
    assert len(running) == STEPS
    assert sum(running) > STEPS // 2


def test_a_slow_callback_holds_the_program_up_and_loses_nothing(shared):
    told, _ = fit(shared, epochs=1, look=lambda *_: time.sleep(0.005))
    assert [batch for batch, _ in told.ended] == list(range(STEPS))


def test_a_callback_may_look_at_the_model_and_change_it(shared):
    seen: list[Any] = []

    def look(callback: Any, batch: int) -> None:
        if batch == 3:
            model = callback.model
            seen.append((updates(model), model.get_weights()[0].copy()))
            model.optimizer.learning_rate = 0.0

    before = updates(shared)
    told, _ = fit(shared, epochs=1, look=look)
    shared.optimizer.learning_rate = 0.01
    [(after, weights)] = seen
    assert after == before + 10, "the weights are there when the execution has ended"
    np.testing.assert_array_equal(shared.get_weights()[0], weights)
    assert updates(shared) == before + STEPS
    assert [batch for batch, _ in told.ended] == list(range(STEPS))


def test_an_error_in_a_callback_is_raised_and_the_model_lives_on(shared):
    def fail(_: Any, batch: int) -> None:
        if batch == 4:
            raise ArithmeticError("mine")

    before = updates(shared)
    with pytest.raises(ArithmeticError, match="mine"):
        fit(shared, look=fail)
    assert updates(shared) == before + 10
    told, _ = fit(shared, epochs=1)
    assert len(told.ended) == STEPS
    assert not any(t.name == "openipu-execution" for t in threading.enumerate())


def test_training_can_be_stopped_and_single_batches_work(shared):
    def stop(callback: Any, batch: int) -> None:
        callback.model.stop_training = batch >= 5

    told, _ = fit(shared, look=stop)
    assert [batch for batch, _ in told.ended] == list(range(10)), "an execution that runs is finished"
    assert np.isfinite(shared.train_on_batch(X[:BATCH], Y[:BATCH])).all()


REMAINDERS = pytest.mark.parametrize(
    ("replicas", "accumulate", "rows"), [(1, 1, 10 * BATCH + 1), (1, 5, 13 * BATCH), (2, 1, 19 * BATCH)],
    ids=["tail", "accumulation", "replicas"],
)  # fmt: skip
"""Executions that take two programs: callbacks of the first one come before the second one starts."""


def fit_remainder(replicas: int, accumulate: int, rows: int, look: Any) -> Any:
    model = make_model(replicas, live=True, steps=15, accumulate=accumulate)
    fit(model, epochs=1, x=X[:rows], y=Y[:rows], look=look)
    return model


@REMAINDERS
def test_an_error_in_a_callback_is_raised_after_the_remainder(replicas, accumulate, rows):
    made: list[Any] = []

    def fail(callback: Any, batch: int) -> None:
        if batch == 1:
            made.append(callback)
            raise ArithmeticError("mine")

    with pytest.raises(ArithmeticError, match="mine"):
        fit_remainder(replicas, accumulate, rows, fail)
    assert updates(made[0].model) == -(-rows // (BATCH * replicas * accumulate)), "the execution was finished"


@REMAINDERS
def test_what_a_callback_changes_counts_for_the_remainder(replicas, accumulate, rows):
    def change(callback: Any, batch: int) -> None:
        if batch == 1:
            callback.model.predict(X[:BATCH], verbose=0)
            callback.model.set_weights([np.zeros_like(w) for w in callback.model.get_weights()])
            callback.model.optimizer.learning_rate = 0.0

    model = fit_remainder(replicas, accumulate, rows, change)
    assert float(model.optimizer.learning_rate.numpy()) == 0.0
    assert not any(w.any() for w in model.get_weights())


@pytest.fixture(scope="module")
def slow() -> Any:
    return make_model(live=True, steps=STEPS, model=slow_model)


def test_the_progress_bar_moves_within_an_execution(slow, capsys):
    slow.fit(X, Y, batch_size=BATCH, verbose=1)
    bars = capsys.readouterr().out
    assert sum(f"{step}/{STEPS}" in bars for step in range(1, STEPS)) >= 3


def test_validation_inside_fit(shared):
    told, history = fit(shared, epochs=1, validation_data=(X, Y))
    assert [batch for batch, _ in told.ended] == [*range(STEPS), *range(STEPS)]
    assert set(history) == {"loss", "mae", "val_loss", "val_mae"}


def test_batches_are_read_as_far_ahead_as_asked():
    read: list[int] = []
    seen: list[int] = []

    def batches():
        for number in range(20):
            read.append(number)
            yield X[:BATCH], Y[:BATCH]

    model = make_model(live=False, steps=2)
    model.set_infeed_queue_options(prefetch_depth=8)
    fit(model, x=batches(), y=None, batch_size=None, epochs=1, look=lambda *_: seen.append(len(read)))
    assert seen[0] == 2 + 8
    assert max(b - a for a, b in itertools.pairwise(seen)) <= 2


def test_options_are_saved_with_the_model(tmp_path):
    model = make_model(live=True)
    model.set_infeed_queue_options(prefetch_depth=9)
    model.set_outfeed_queue_options(buffer_depth=4)
    model.save(tmp_path / "m.keras")
    with strategy(1).scope():
        loaded = keras.models.load_model(tmp_path / "m.keras")
    assert loaded._ipu_session.options == model._ipu_session.options
    assert loaded._ipu_session.options.live_callbacks


def test_errors(caplog):
    model = make_model(live=False)
    with pytest.raises(ValueError, match="`asynchronous` is 1"):
        model.set_asynchronous_callbacks(1)
    for name in ("dataset", "infeed_spec", "element_spec", "_internal_id"):
        with pytest.raises(ValueError, match=f"`{name}` is set by the model itself"):
            model.set_infeed_queue_options(**{name: 1})
    for name in ("outfeed_mode", "device_ordinal"):
        with pytest.raises(ValueError, match=f"`{name}` is set by the model itself"):
            model.set_outfeed_queue_options(**{name: 1})
    with pytest.raises(ValueError, match="There is no option"):
        model.set_outfeed_queue_options(nonsense=1)
    with pytest.raises(ValueError, match="`prefetch_depth` is 0"):
        model.set_infeed_queue_options(prefetch_depth=0)
    with pytest.raises(ValueError, match="`buffer_depth` is 0"):
        model.set_outfeed_queue_options(buffer_depth=0)
    model.set_outfeed_queue_options(optimise_latency=True)
    assert "optimise_latency of a model's feeds" in caplog.text


def test_a_callback_may_run_another_model_on_the_same_devices():
    """It waits for its turn, so the program must not wait for the callback, however many logs there are."""
    other = make_model(live=False, replicas=2)
    model = make_model(live=True, steps=STEPS, replicas=2)
    model.set_outfeed_queue_options(buffer_depth=1)
    told, _ = fit(model, epochs=1, look=lambda *_: other.predict(X[:16], batch_size=BATCH, verbose=0))
    assert [batch for batch, _ in told.ended] == list(range(STEPS))
