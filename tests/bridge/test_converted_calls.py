"""Loops and conditionals on values of the program in what Keras calls: layers, losses and metrics."""

from __future__ import annotations

from typing import Any

import openipu  # noqa: F401 - puts Keras on JAX

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest

import zoo
from replication import configure_all, strategy

pytestmark = zoo.KERAS_WARNINGS
tf: Any = None  # conftest.py puts TensorFlow here
X = np.random.default_rng(0).normal(size=(32, 4)).astype(np.float32)
Y = np.random.default_rng(1).normal(size=(32, 1)).astype(np.float32)


@pytest.fixture(autouse=True, scope="module")
def _systems() -> None:
    configure_all()


def shrink(x):
    if tf.reduce_max(tf.abs(x)) > 1.0:
        x = x / tf.reduce_max(tf.abs(x))
    return x


def bent_layer() -> keras.layers.Layer:
    class Bent(keras.layers.Layer):
        def build(self, shape):
            self.kernel = self.add_weight("kernel", shape=[shape.as_list()[-1], 1], initializer="ones")
            self.seen = self.add_weight("seen", shape=[], initializer="zeros", trainable=False)

        def call(self, x, training=None):
            x = shrink(x)
            total = tf.zeros_like(x)
            for i in tf.range(3):
                total += x * tf.cast(i, tf.float32)
            if training and tf.reduce_mean(x) > -10.0:
                self.seen.assign_add(1.0)
            n = 0
            while n < 2:
                n += 1
            return tf.matmul(total, self.kernel) if tf.reduce_sum(x) > -1e6 else tf.matmul(x, self.kernel) * n

    return Bent()


def huber(y, p):
    error = tf.abs(y - p)
    if tf.reduce_mean(error) > 100.0:  # noqa: SIM108
        result = tf.reduce_mean(error)
    else:
        result = tf.reduce_mean(tf.square(error))
    return result


def far(y, p):
    found = tf.reduce_mean(tf.abs(y - p))
    while found > 1.0:
        found = found / 2.0
    return found


def by_hand(x: np.ndarray) -> np.ndarray:
    return x / max(1.0, np.abs(x).max()) * 3


def fitted() -> tuple[dict[str, list[float]], keras.Model]:
    model = keras.Sequential([keras.layers.Input((4,)), bent_layer()])
    model.compile(keras.optimizers.SGD(0.1), huber, metrics=[far])
    return model.fit(X, Y, 8, epochs=2, shuffle=False, verbose=0).history, model


def test_a_model_with_conditions_trains_as_by_hand():
    with strategy(1).scope():
        history, model = fitted()
    kernel, losses = jnp.ones((4, 1)), []

    def loss(kernel, x, y):
        return jnp.mean(jnp.square(by_hand(x) @ kernel - y))

    for _ in range(2):
        for i in range(0, 32, 8):
            value, slope = jax.value_and_grad(loss)(kernel, X[i : i + 8], Y[i : i + 8])
            losses.append(float(value))
            kernel = kernel - 0.1 * slope
    np.testing.assert_allclose(history["loss"], np.reshape(losses, (2, 4)).mean(1), rtol=1e-5)
    np.testing.assert_allclose(model.layers[-1].kernel, kernel, atol=1e-6)
    assert float(model.layers[-1].seen.value) == 8
    assert 0 < history["far"][0] <= 1


@pytest.mark.slow
def test_plain_keras_trains_it_equally():
    history, model = fitted()
    with strategy(1).scope():
        again, other = fitted()
    for name, values in history.items():
        np.testing.assert_allclose(values, again[name], rtol=1e-5)
    for one, two in zip(model.weights, other.weights, strict=True):
        np.testing.assert_allclose(one, two, atol=1e-6)


def test_outside_of_a_trace_nothing_is_converted():
    np.testing.assert_allclose(bent_layer()(X), by_hand(X).sum(1, keepdims=True), rtol=1e-5)


def test_a_metric_with_a_condition():
    class Largest(keras.metrics.Metric):
        def __init__(self) -> None:
            super().__init__(name="largest")
            self.value = self.add_weight(name="value", initializer="zeros")

        def update_state(self, y_true, y_pred, sample_weight=None):  # noqa: ARG002
            found = tf.reduce_max(tf.abs(y_true - y_pred))
            if found > self.value:
                self.value.assign(found)

        def result(self):
            return tf.convert_to_tensor(self.value)

    with strategy(1).scope():
        model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(1)])
        model.compile(loss="mse", metrics=[Largest()])
        found = model.evaluate(X, Y, 8, 0, return_dict=True)["largest"]
        expected = np.abs(Y - model.predict(X, verbose=0)).max()
    assert found == pytest.approx(float(expected), rel=1e-5)


def test_a_variable_of_tensorflow_cannot_count_in_a_layer():
    counter = tf.Variable(0.0)

    class Counts(keras.layers.Layer):
        def call(self, x):
            counter.assign_add(1.0)
            return x

    Counts()(X)
    assert float(counter) == 1
    with pytest.raises(NotImplementedError, match=r"which would do it only once, while it is traced"):
        jax.jit(Counts())(X)


def test_a_condition_that_cannot_be_part_of_a_program_names_its_line():
    class Layer(keras.layers.Layer):
        def call(self, x):
            if tf.reduce_sum(x) > 0:
                x = x[:, :2]
            return x

    model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(4)])
    with pytest.raises(TypeError, match="Give each of them a value of one shape and dtype in both branches"):
        jax.jit(lambda x: Layer()(model(x)))(X)
