"""The cases of Keras' own trainer tests, each run on a plain model and on models of a strategy with equal outcome."""

# Keras decides the arguments of hooks, steps and metrics.
# ruff: noqa: ARG001, ARG002

import warnings

import jax
import keras
import numpy as np
import pytest
from keras import layers, ops

import zoo
from one_layer import Example, compiled, ones

pytestmark = zoo.KERAS_WARNINGS


class Struct(keras.Model):
    def __init__(self):
        super().__init__()
        self.one, self.two = ones(), ones()

    def call(self, x):
        return {"y_one": self.one(x["x_one"]), "y_two": self.two(x["x_two"])}


class ListIn(keras.Model):
    def __init__(self):
        super().__init__()
        self.one, self.two = ones(2), ones(2)

    def call(self, x):
        return self.one(x[0]) + self.two(x[1])


class ListOut(keras.Model):
    def __init__(self):
        super().__init__()
        self.one, self.two = ones(), ones()

    def call(self, x):
        return [self.one(x), self.two(x)]


CASES = {}


def case(function):
    CASES[function.__name__] = function
    return function


def flow(spe, make=Example, rows=100, **fit):
    model = compiled(make, spe)
    history = model.fit(np.ones((rows, 4)), np.zeros((rows, 3)), batch_size=20, epochs=3, verbose=0, **fit)
    return history.history, model.get_weights()


@case
def fit_flow(spe):
    history, weights = flow(spe)
    np.testing.assert_allclose(history["mse"], [14.402393, 10.991339, 8.388159], rtol=1e-4)
    return history, weights


@case
def fit_flow_ragged(spe):
    return flow(spe, rows=93)


@case
def fit_flow_with_validation_split(spe):
    return flow(spe, validation_split=0.2), flow(spe, validation_split=0.3, validation_batch_size=7)


@case
def fit_with_a_train_step_of_ones_own(spe):
    class Own(Example):
        def train_step(self, state, data):
            logs, state = super().train_step(state, data)
            return {"my_metric": 10.0 * logs["mse"]}, state

        def test_step(self, state, data):
            logs, state = super().test_step(state, data)
            return {"my_metric": 5.0 * logs["mse"]}, state

    model = compiled(Own, spe)
    x, y = np.ones((100, 4)), np.zeros((100, 3))
    history = model.fit(x, y, batch_size=20, epochs=2, verbose=0).history
    assert list(history) == ["my_metric"]
    as_list, as_dict = model.evaluate(x, y, 20, 0), model.evaluate(x, y, 20, 0, return_dict=True)
    assert list(as_dict) == ["my_metric"]
    return history, as_list, as_dict


@case
def evaluate_flow(spe):
    model = compiled(Example, spe)
    out = model.evaluate(np.ones((100, 4)), np.zeros((100, 3)), batch_size=16, verbose=0, return_dict=True)
    np.testing.assert_allclose(out["mse"], 16.0)
    return out


@case
def predict_flow_and_structures(spe):
    x = np.random.default_rng(0).normal(size=(93, 4))
    plain = Example().predict(x, batch_size=16, verbose=0)
    model = compiled(Struct, spe)
    out = model.predict({"x_one": x, "x_two": 2 * x}, batch_size=16, verbose=0)
    assert out["y_one"].shape == out["y_two"].shape == (93, 3)
    return plain, out, compiled(ListOut, spe).predict(x, batch_size=16, verbose=0)


@case
def loss_weights_of_one_dict_and_list_outputs(spe):
    x, y = np.ones((40, 4)), np.zeros((40, 3))
    fit = {"batch_size": 20, "epochs": 3, "verbose": 0}
    single = compiled(Example, spe, loss_weights=0.2).fit(x, y, **fit).history
    both = compiled(Struct, spe, loss={"y_one": "mse", "y_two": "mse"}, metrics={"y_one": "mse", "y_two": "mse"},
                    loss_weights={"y_one": 0.1, "y_two": 0.2})  # fmt: skip
    both = both.fit({"x_one": x, "x_two": x}, {"y_one": y, "y_two": y}, **fit).history
    listed = compiled(ListOut, spe, loss=["mse", "mse"], metrics=["mse", "mse"], loss_weights=[0.1, 0.2])
    listed = listed.fit(x, [y, y], **fit).history
    np.testing.assert_allclose(single["loss"], [3.182979, 3.115617, 3.049681], atol=1e-3)
    np.testing.assert_allclose(both["loss"], [4.778718, 4.694403, 4.611693], atol=1e-3)
    return single, both, listed


@case
def nested_inputs(spe):
    model = compiled(ListIn, spe)
    x, y = [np.ones((3, 2)), np.ones((3, 3))], np.ones((3, 2))
    history = model.fit(x, y, verbose=0).history
    np.testing.assert_allclose(history["loss"], 16.0)
    rest = model.train_on_batch(x, y), model.evaluate(x, y, verbose=0), model.test_on_batch(x, y)
    return history, rest, model.predict(x, verbose=0), model.predict_on_batch(x)


@case
def partial_losses(spe):
    inputs = keras.Input((2,))
    x = layers.Dense(3, kernel_initializer="ones", name="head")(inputs)
    model = keras.Model(inputs, [x, x, x])
    model.compile(loss=["mse", None, None], steps_per_execution=spe)
    full = keras.Model(inputs, [x, x, x])
    full.compile(loss=["mse", "mse", "mse"], steps_per_execution=spe)
    data, target = np.ones((32, 2)), np.ones((32, 3))
    part = model.evaluate(data, target, verbose=0, return_dict=True)
    whole = full.evaluate(data, [target] * 3, verbose=0, return_dict=True)
    np.testing.assert_allclose(3 * part["loss"], whole["loss"])
    return part, whole


@case
def only_internal_losses(spe):
    class Lossy(layers.Layer):
        def call(self, x):
            self.add_loss(ops.mean(x**2))
            return x

    # The last layer has no part in the loss.
    model = keras.Sequential([ones(2), Lossy(), ones(2)])
    model.compile("adam", steps_per_execution=spe)
    return model.fit(np.ones((16, 2)), np.zeros((16, 2)), batch_size=4, epochs=2, verbose=0).history


@case
def an_output_without_a_loss(spe):
    x = keras.Input((2,))
    model = keras.Model(x, {"a": ones(2)(x), "b": ones(2)(x)})
    model.compile(keras.optimizers.AdamW(0.1), {"a": "mse", "b": None}, steps_per_execution=spe)
    target = {"a": np.zeros((16, 2)), "b": np.zeros((16, 2))}
    history = model.fit(np.ones((16, 2)), target, batch_size=4, epochs=2, verbose=0).history
    return history, model.get_weights()


@case
def metrics_updated_in_compute_loss(spe):
    class Own(Example):
        def __init__(self):
            super().__init__()
            self.custom = keras.metrics.Mean(name="custom")

        def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
            loss = super().compute_loss(x, y, y_pred, sample_weight, training)
            self.custom.update_state(loss * 4)
            return loss

    model = compiled(Own, spe, metrics=None)
    x, y = np.ones((32, 4)), 2 * np.ones((32, 3))
    history = model.fit(x, y, verbose=0).history
    np.testing.assert_allclose(history["custom"][0], 4 * history["loss"][0], rtol=1e-6)
    return history, model.evaluate(x, y, verbose=0, return_dict=True)


@case
def compute_loss_without_a_training_argument(spe):
    class Own(Example):
        def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None):
            return super().compute_loss(x, y, y_pred, sample_weight) + 1.0

    return flow(spe, Own)


@case
def forward_losses_are_there_in_compute_loss(spe):
    class Own(keras.Model):
        def __init__(self):
            super().__init__()
            self.custom = keras.metrics.Mean(name="custom")
            self.dense = layers.Dense(2, kernel_initializer="ones", activity_regularizer="l2")

        def call(self, x):
            return self.dense(x)

        def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
            loss = super().compute_loss(x, y, y_pred, sample_weight, training)
            self.custom.update_state(sum(self.losses))
            return loss

    history = compiled(Own, spe, metrics=None).fit(np.ones((32, 4)), np.ones((32, 2)), verbose=0).history
    assert history["custom"][0] > 0
    return history


@case
def a_metric_that_the_model_only_owns(spe):
    class Own(Example):
        def __init__(self):
            super().__init__()
            self.my_metric = keras.metrics.MeanSquaredError(name="my_metric")

    model = compiled(Own, spe)
    history = model.fit(np.ones((2, 4)), np.zeros((2, 3)), verbose=0).history
    assert [metric.name for metric in model.metrics] == ["loss", "compile_metrics", "my_metric"]
    assert len(model.metrics_variables) == 6
    return history


@case
def metrics_in_evaluate_keep_their_order(spe):
    def zero(y_true, y_pred):
        return 0.0 * ops.sum(y_pred)

    def one(y_true, y_pred):
        return 1.0 + 0.0 * ops.sum(y_pred)

    x, y = np.ones((3, 2)), np.ones((3, 3))
    first = compiled(Example, spe, metrics=[zero, one]).evaluate(x, y, verbose=0)
    second = compiled(Example, spe, metrics=[one, zero]).evaluate(x, y, verbose=0)
    assert first[1:] == [0.0, 1.0]
    assert second[1:] == [1.0, 0.0]
    return first, second


@case
def compiling_again(spe):
    model = compiled(Example, spe)
    x, y = np.ones((9, 2)), np.ones((9, 3))
    first = model.fit(x, y, verbose=0).history, model.evaluate(x, y, verbose=0, return_dict=True)
    model.compile("sgd", "mse", metrics=["mae"], steps_per_execution=spe)
    second = model.fit(x, y, verbose=0).history, model.evaluate(x, y, verbose=0, return_dict=True)
    assert [sorted(logs) for logs in (*first, *second)] == [["loss", "mse"]] * 2 + [["loss", "mae"]] * 2
    return first, second


@case
def metrics_are_reset_between_calls(spe):
    model = compiled(Example, spe, metrics=["mae"], optimizer=keras.optimizers.SGD(0.0))
    x, y = np.ones((32, 4)), np.zeros((32, 3))
    model.fit(10 * x, y, verbose=0)
    out = model.evaluate(x, y, verbose=0), model.fit(x, y, epochs=2, verbose=0).history
    np.testing.assert_allclose(out[0][1], 4.0)
    return out


@case
def loss_scaling_is_added_and_prevents_underflow(spe):
    with zoo.policy("mixed_float16"):
        model = keras.Sequential([keras.Input((4,)), layers.Dense(1, kernel_initializer="ones")])
        model.compile(keras.optimizers.SGD(1e9), "mse", steps_per_execution=spe)
    assert type(model.optimizer).__name__ == "LossScaleOptimizer"
    # Gradients of about 1e-7 are zero in half precision unless the loss is scaled.
    x, y = np.full((16, 4), 1e-4), np.full((16, 1), 0.0)
    before = model.get_weights()
    history = model.fit(x, y, batch_size=4, epochs=2, verbose=0).history
    assert not np.array_equal(model.get_weights()[0], before[0])
    return history, model.get_weights()


@case
def training_argument(spe):
    class Modal(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = ones(1)

        def call(self, x, training=False):
            return self.dense(x) * (1.0 if training else 0.0)

    model = compiled(Modal, spe)
    x, y = np.ones((4, 1)), np.zeros((4, 1))
    out = model.fit(x, y, verbose=0).history, model.evaluate(x, y, verbose=0), model.predict(x, verbose=0)
    assert out[0]["loss"] == [1.0]
    assert out[1][0] == 0.0
    return out


@case
def same_loss_for_any_batch_size_of_evaluate(spe):
    model = compiled(Example, spe)
    x, y = np.random.default_rng(1).normal(size=(100, 4)), np.zeros((100, 3))
    return [model.evaluate(x, y, batch_size=size, verbose=0) for size in (80, 100, 7)]


@case
def constraints(spe):
    model = keras.Sequential([layers.Dense(2, kernel_constraint="non_neg")])
    model.compile("rmsprop", "mse", steps_per_execution=spe)
    model.fit(np.ones((4, 3)), np.ones((4, 2)), batch_size=2, verbose=0)
    assert model.get_weights()[0].min() >= 0
    return model.get_weights()


@case
def random_numbers_go_on_in_predict(spe):
    class Always(layers.Layer):
        def __init__(self):
            super().__init__()
            self.seeds = keras.random.SeedGenerator(1337)

        def call(self, x):
            return keras.random.dropout(x, 0.5, seed=self.seeds)

    inputs = keras.Input((20,))
    model = keras.Model(inputs, Always()(inputs))
    model.compile(steps_per_execution=spe)
    x = np.ones((12, 20))
    first, second = model.predict(x, batch_size=4, verbose=0), model.predict(x, batch_size=4, verbose=0)
    assert np.abs(first[:4] - first[4:8]).sum() > 5
    assert np.abs(first - second).mean() > 0.01
    return first, second, model.predict_on_batch(x), model.predict_on_batch(x)


@case
def steps_per_epoch_that_do_not_match(spe):
    out = []
    x, y = np.random.default_rng(3).normal(size=(80, 4)), np.ones((80, 1))
    for steps in (10, 5, 4, 12):
        model = compiled(lambda: Example(1), spe)
        with warnings.catch_warnings():
            # The third of epochs of 4 steps has only 2 of the 10 batches left, and 12 steps are never there.
            warnings.simplefilter("ignore" if steps in (4, 12) else "error")
            out += [model.fit(x, y, batch_size=8, epochs=4, steps_per_epoch=steps, verbose=0, shuffle=False).history]
    return out


@case
def infinite_generators_in_fit_and_validation(spe):
    def endless():
        while True:
            yield np.ones((2, 2)), np.ones((2, 3))

    counts = {"train": 0, "test": 0}

    class Count(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            counts["train"] = batch + 1

        def on_test_batch_end(self, batch, logs=None):
            counts["test"] = batch + 1

    model = compiled(Example, spe)
    settings = {"steps_per_epoch": 3, "validation_steps": 4, "shuffle": False, "verbose": 0}
    history = model.fit(endless(), validation_data=endless(), callbacks=[Count()], **settings).history
    assert counts == {"train": 3, "test": 4}
    return history


@case
def validation_data_that_failed_once_is_forgotten(spe):
    model = compiled(Example, spe)
    x, y = np.ones((16, 4)), np.zeros((16, 3))
    model.fit(x, y, batch_size=4, validation_data=(x, y), verbose=0)
    with pytest.raises(ValueError, match="expected axis -1 of input shape to have value 4"):
        model.fit(x, y, batch_size=4, validation_data=(x[:, :3], y), verbose=0)
    return model.fit(x, y, batch_size=4, validation_data=(x, y), verbose=0).history


@case
def methods_on_batches_without_training(spe):
    model = Example()
    model.compile(loss="mse", metrics=["mse"], steps_per_execution=spe)
    x, y = np.ones((3, 4)), np.zeros((3, 3))
    return model.test_on_batch(x, y), model.test_on_batch(x, y, return_dict=True), model.predict_on_batch(x)


@case
def evaluating_without_an_optimizer(spe):
    model = Example()
    model.compile(loss="mse", optimizer=None, metrics=["mse"], steps_per_execution=spe)
    x, y = np.ones((20, 4)), np.zeros((20, 3))
    return model.evaluate(x, y, batch_size=3, verbose=0), model.predict(x, batch_size=3, verbose=0)


@case
def models_inside_compiled_models(spe):
    inner = compiled(Example, spe)
    inputs = keras.Input((4,))
    outer = keras.Model(inputs, ones(2)(inner(inputs)))
    outer.compile("sgd", "mse", metrics=["mse"], steps_per_execution=spe)
    history = outer.fit(np.ones((8, 4)), np.zeros((8, 2)), batch_size=2, verbose=0).history
    assert len(outer.metrics) == 2
    return history, inner.predict(np.ones((8, 4)), verbose=0)


@case
def keys_of_all_logs(spe):
    keys = {}

    class Keys(keras.callbacks.Callback):
        pass

    for name in dir(keras.callbacks.Callback):
        if name.startswith("on_") and name not in ("on_batch_begin", "on_batch_end"):

            def note(self, *args, _name=name, logs=None):
                given = logs if logs is not None else args[-1] if args and isinstance(args[-1], dict) else {}
                keys.setdefault(_name, set()).add(tuple(sorted(given)))

            setattr(Keys, name, note)
    model = compiled(Example, spe)
    x, y = np.ones((16, 4)), np.zeros((16, 3))
    model.fit(x, y, batch_size=4, validation_data=(x, y), verbose=0, callbacks=[Keys()])
    model.predict(x, batch_size=4, verbose=0, callbacks=[Keys()])
    assert keys["on_epoch_end"] == {("loss", "mse", "val_loss", "val_mse")}
    assert keys["on_predict_batch_end"] == {("outputs",)}
    return sorted(keys), [sorted(keys[name]) for name in sorted(keys)]


@case
def targets_of_another_dtype_and_rank(spe):
    model = compiled(lambda: Example(1), spe, metrics=["mae"])
    x = np.random.default_rng(2).normal(size=(21, 4))
    return [model.fit(x, y, batch_size=8, verbose=0, shuffle=False).history
            for y in (np.ones(21), np.ones((21, 1), int), np.ones((21, 1), bool))]  # fmt: skip


def run(name, side):
    keras.utils.set_random_seed(11)
    with zoo.scope_if(side is not None):
        return CASES[name](side or 1)


@pytest.mark.parametrize("name", CASES)
def test_case(name):
    expected = run(name, None)
    for steps_per_execution in (1, 3):
        actual = run(name, steps_per_execution)
        if name != "keys_of_all_logs":
            jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), actual, expected)
        else:
            assert actual == expected


@pytest.mark.parametrize("method", ["fit", "evaluate", "predict"])
def test_stopping_an_endless_loop(method):
    words = {"fit": ("training", "train"), "evaluate": ("evaluating", "test"), "predict": ("predicting", "predict")}
    word, kind = words[method]
    counted = []

    def stop(batch, logs=None):
        counted.append(batch)
        if len(counted) == 5:
            setattr(callback.model, f"stop_{word}", True)

    callback = keras.callbacks.Callback()
    setattr(callback, f"on_{kind}_batch_end", stop)

    def endless():
        while True:
            yield (np.ones((2, 2)),) if method == "predict" else (np.ones((2, 2)), np.ones((2, 3)))

    with zoo.scope_if(True):
        model = compiled(Example, 2)
    settings = {"shuffle": False} if method == "fit" else {}
    getattr(model, method)(endless(), callbacks=[callback], verbose=0, **settings)
    assert counted == [1, 3, 5, 7, 9]
