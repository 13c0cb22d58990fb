"""What a user gets wrong is told with the numbers and the remedy, and leaves a model that can go on."""
# Keras decides the arguments of hooks, steps and metrics.
# ruff: noqa: ARG001, ARG002

import signal

from openipu.engine.fit import state_in_flight
from openipu.engine.loop.loop import Loop

import keras
import numpy as np
import pytest

import zoo

pytestmark = zoo.KERAS_WARNINGS

X, Y = zoo.table(99)


def model(steps_per_execution=4):
    return zoo.make(zoo.CASES["dense"], steps_per_execution)


def usable(trained):
    """Whether training, evaluating and predicting still work."""
    before = int(trained.optimizer.iterations)
    trained.fit(X, Y, batch_size=8, verbose=0)
    assert int(trained.optimizer.iterations) == before + 13
    assert np.isfinite(trained.evaluate(X, Y, verbose=0)).all()
    return trained.predict(X, verbose=0).shape == (99, 3)


# --- counts ----------------------------------------------------------------------------------------------------------

COUNTS = [0, -1, 2.5, True, "3", float("nan")]


@pytest.mark.parametrize("value", COUNTS)
@pytest.mark.parametrize(
    "name", ["batch_size", "steps_per_epoch", "validation_steps", "validation_batch_size", "epochs", "initial_epoch"]
)
def test_counts_of_fit(name, value):
    if (name == "epochs" and value == 0 and value is not True) or (name == "initial_epoch" and value == 0):
        pytest.skip("0 is a good value: nothing is trained")
    trained = model()
    before = trained.get_weights()
    with pytest.raises(ValueError, match=rf"`{name}` is .*whole number"):
        trained.fit(X, Y, verbose=0, validation_data=(X, Y), **{name: value})
    assert all(np.array_equal(a, b) for a, b in zip(trained.get_weights(), before, strict=True)), "it trained first"


@pytest.mark.parametrize("value", COUNTS)
@pytest.mark.parametrize(("call", "name"), [(c, n) for c in ("evaluate", "predict") for n in ("batch_size", "steps")])
def test_counts_of_evaluate_and_predict(call, name, value):
    data = (X, Y) if call == "evaluate" else (X,)
    with pytest.raises(ValueError, match=rf"`{name}` is .*whole number"):
        getattr(model(), call)(*data, verbose=0, **{name: value})


@pytest.mark.parametrize("value", COUNTS)
def test_steps_per_execution(value):
    trained = zoo.make(zoo.CASES["dense"], 1)
    trained.compile("sgd", "mse", steps_per_execution=value)
    with pytest.raises(ValueError, match=r"`steps_per_execution` is .*whole number"):
        trained.fit(X, Y)


@pytest.mark.parametrize("value", [np.int64(8), np.int32(8)])
def test_numpy_counts_are_counts(value):
    trained = model()
    trained.fit(X, Y, batch_size=value, epochs=np.int64(2), steps_per_epoch=np.int32(6), verbose=0)
    assert int(trained.optimizer.iterations) == 12


# --- data ------------------------------------------------------------------------------------------------------------

ARRAYS = {
    "lengths differ": ((X, Y[:90]), ValueError, r"(?s)99.*90"),
    "weights too short": ((X, Y, np.ones(5)), ValueError, r"(?s)99.*5"),
    "no rows": ((X[:0], Y[:0]), ValueError, "0 samples"),
    "no generator items": ((iter_ for iter_ in ()), ValueError, "at least one batch"),
    "not data": (object(), ValueError, "Unrecognized data type"),
    "wrong width": ((X[:, :5], Y), ValueError, "shape"),
}


@pytest.mark.parametrize("name", ARRAYS)
@pytest.mark.parametrize("call", ["fit", "evaluate"])
def test_data_that_does_not_fit(name, call):
    data, kind, words = ARRAYS[name]
    if name == "no generator items":
        data = (item for item in ())
    arguments = (data[0], data[1]) if isinstance(data, tuple) else (data,)
    weights = {"sample_weight": data[2]} if isinstance(data, tuple) and len(data) == 3 else {}
    settings = {"shuffle": False} if call == "fit" else {}
    trained = model()
    with pytest.raises(kind, match=words):
        getattr(trained, call)(*arguments, **weights, **settings, verbose=0)
    assert usable(trained)


@pytest.mark.parametrize("call", ["fit", "evaluate", "train_on_batch"])
def test_a_model_that_was_not_compiled(call):
    with zoo.scope_if(True):
        raw = zoo.dense()
    with pytest.raises(ValueError, match=r"must call `compile\(\)`"):
        getattr(raw, call)(X, Y)


def test_predicting_needs_no_compile():
    with zoo.scope_if(True):
        raw = zoo.dense()
    assert raw.predict(X, verbose=0).shape == (99, 3)


def test_class_weight_and_sample_weight_exclude_each_other():
    with pytest.raises(ValueError, match="class_weight"):
        model().fit(X, Y, class_weight={0: 1.0, 1: 1.0, 2: 1.0}, sample_weight=np.ones(99), verbose=0)


def test_validation_split_needs_arrays():
    with pytest.raises(ValueError, match="validation_split"):
        model().fit(((X, Y) for _ in range(3)), validation_split=0.2, verbose=0, shuffle=False)


@pytest.mark.parametrize("split", [1.0, -0.1, 0.999])
def test_validation_split_must_leave_rows_on_both_sides(split):
    with pytest.raises(ValueError, match="split"):
        model().fit(X, Y, validation_split=split, verbose=0)


def short():
    for start in range(0, 40, 8):
        yield X[start : start + 8], Y[start : start + 8]


@pytest.mark.parametrize("steps_per_execution", [1, 2, 4, 50])
def test_data_that_ends_early_trains_on_what_is_there(steps_per_execution):
    trained = model(steps_per_execution)
    with pytest.warns(UserWarning, match="The data ended after 5 of the 9 steps"):
        history = trained.fit(short(), steps_per_epoch=9, verbose=0, shuffle=False)
    assert int(trained.optimizer.iterations) == 5
    assert np.isfinite(history.history["loss"]).all()
    assert usable(trained)


def test_arrays_that_end_early_start_again_in_the_next_epoch():
    trained = model()
    with pytest.warns(UserWarning, match="The data ended after 3 of the 5 steps"):
        trained.fit(X[:24], Y[:24], batch_size=8, steps_per_epoch=5, epochs=2, verbose=0)
    assert int(trained.optimizer.iterations) == 6


def test_validation_data_that_ends_early():
    with pytest.warns(UserWarning, match="The data ended after 3 of the 5 steps"):
        model().fit(X, Y, 8, 1, 0, validation_data=(X[:24], Y[:24]), validation_steps=5)


# --- numbers that are no numbers -------------------------------------------------------------------------------------


def test_nan_does_not_stop_training():
    x = X.copy()
    x[50] = np.nan
    trained = model()
    history = trained.fit(x, Y, 8, 2, 0).history
    assert np.isnan(history["loss"]).all()
    assert int(trained.optimizer.iterations) == 26


# --- errors on the way -----------------------------------------------------------------------------------------------


class BrokenError(Exception):
    pass


def reference(executions, steps_per_execution=4):
    """Weights after so many whole executions on unshuffled data."""
    expected = model(steps_per_execution)
    rows = 8 * steps_per_execution * executions
    if rows:
        expected.fit(X[:rows], Y[:rows], 8, 1, 0, shuffle=False)
    return expected


def assert_weights(trained, expected):
    for a, b in zip(trained.get_weights(), expected.get_weights(), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7)
    assert int(trained.optimizer.iterations) == int(expected.optimizer.iterations)


@pytest.mark.parametrize(("good", "executions"), [(3, 0), (4, 1), (6, 1), (8, 2), (11, 2)])
def test_an_error_in_a_generator_keeps_the_last_finished_execution(good, executions):
    def source():
        for step in range(good):
            yield X[8 * step : 8 * step + 8], Y[8 * step : 8 * step + 8]
        raise BrokenError("disk is gone")

    trained = model()
    with pytest.raises(BrokenError, match="disk is gone"):
        trained.fit(source(), verbose=0, shuffle=False)
    assert_weights(trained, reference(executions))
    assert usable(trained)


@pytest.mark.parametrize("hook", ["on_train_batch_begin", "on_train_batch_end", "on_epoch_end", "on_test_batch_end"])
def test_an_error_in_a_callback(hook):
    class Failing(keras.callbacks.Callback):
        pass

    def fail(self, index, logs=None):
        if index >= 4 or "epoch" in hook or "test" in hook:
            raise BrokenError(hook)

    setattr(Failing, hook, fail)
    trained = model()
    with pytest.raises(BrokenError, match=hook):
        trained.fit(X[:96], Y[:96], 8, 1, 0, shuffle=False, callbacks=[Failing()], validation_data=(X, Y))
    executions = {"on_train_batch_begin": 1, "on_train_batch_end": 2}.get(hook, 3)
    assert_weights(trained, reference(executions))
    assert usable(trained)


@pytest.mark.parametrize(("mode", "call"), [("train", "fit"), ("test", "evaluate"), ("train", "train_on_batch")])
def test_a_step_for_tensorflow(mode, call):
    def step(self, data):
        pytest.fail(f"the step of {self.name} ran with {len(data)} arrays")

    with zoo.scope_if(True):
        model = type("ForTensorFlow", (keras.Sequential,), {f"{mode}_step": step})(
            [keras.Input((3,)), keras.layers.Dense(1)]
        )
        model.compile("sgd", "mse")
    with pytest.raises(
        TypeError, match=rf"`{mode}_step\(self, data\)` of model .* is written for TensorFlow.*openipu run"
    ):
        getattr(model, call)(np.ones((4, 3)), np.ones((4, 1)))


@pytest.mark.parametrize("call", ["fit", "train_on_batch", "evaluate", "predict"])
def test_an_error_in_a_users_step(call):
    switch = {"broken": False}

    class Fragile(keras.Model):
        def call(self, inputs):
            return self.head(inputs)

        def build(self, shape):
            self.head = keras.layers.Dense(3)
            self.head.build(shape)

        def train_step(self, state, data):
            self._check()
            return super().train_step(state, data)

        def test_step(self, state, data):
            self._check()
            return super().test_step(state, data)

        def predict_step(self, state, data):
            self._check()
            return super().predict_step(state, data)

        def _check(self):
            if switch["broken"]:
                raise BrokenError(call)

    with zoo.scope_if(True):
        trained = Fragile()
    trained.compile(**zoo.CASES["dense"].compile(), steps_per_execution=4)
    trained.fit(X, Y, 8, 1, 0)
    before = trained.get_weights()
    switch["broken"] = True
    # Another batch size, so that the step is traced again.
    data = (X[:40],) if call == "predict" else (X[:40], Y[:40])
    with pytest.raises(BrokenError, match=call):
        getattr(trained, call)(*data)
    switch["broken"] = False
    assert all(np.array_equal(a, b) for a, b in zip(trained.get_weights(), before, strict=True))
    assert usable(trained)


@pytest.fixture
def _listening_to_ctrl_c():
    """As in a terminal; a process in the background may ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize(("owner", "name"), [(Loop, "execute"), (state_in_flight, "assign")])
@pytest.mark.usefixtures("_listening_to_ctrl_c")
def test_ctrl_c_while_the_state_is_on_its_way(monkeypatch, owner, name):
    """Pressed when the variables are empty: it is heard when they have their values again."""
    real, trained = getattr(owner, name), model()
    fresh = trained.get_weights()

    def interrupted(*args):
        result = real(*args)
        signal.raise_signal(signal.SIGINT)
        return result

    monkeypatch.setattr(owner, name, interrupted)
    with pytest.raises(KeyboardInterrupt):
        trained.fit(X, Y, 8, 3, 0, shuffle=False)
    monkeypatch.undo()
    assert not np.array_equal(trained.get_weights()[0], fresh[0])
    assert usable(trained)


def test_an_interruption_from_the_keyboard():
    class Interrupt(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch == 7:
                raise KeyboardInterrupt

    trained = model()
    with pytest.raises(KeyboardInterrupt):
        trained.fit(X, Y, 8, 3, 0, shuffle=False, callbacks=[Interrupt()])
    assert_weights(trained, reference(2))
    assert usable(trained)
