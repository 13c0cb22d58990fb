"""Losses that layers add inside loops and conditionals on values of the program: none is lost, none counts twice."""

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
X[8:16] += 3
Y = np.random.default_rng(1).normal(size=(32, 1)).astype(np.float32)
KERNEL = np.linspace(-1, 1, 4, dtype=np.float32)[:, None]


@pytest.fixture(autouse=True, scope="module")
def _systems() -> None:
    configure_all()


def penalised(call: Any) -> keras.Model:
    """A linear model whose layer adds losses in its `call`."""

    class Penalised(keras.layers.Layer):
        def build(self, shape):
            self.kernel = self.add_weight("kernel", shape=[shape[-1], 1])
            self.kernel.assign(KERNEL)

        def call(self, x):
            return call(self, x, tf.matmul(x, self.kernel))

    model = keras.Sequential([keras.layers.Input((4,)), Penalised()])
    model.compile(keras.optimizers.SGD(0.01), "mse")
    return model


def in_a_branch(layer, x, y):
    if tf.reduce_mean(x) > 1.0:
        layer.add_loss(tf.reduce_sum(tf.square(y)))
    else:
        layer.add_loss(0.5 * tf.reduce_mean(tf.abs(y)))
        layer.add_loss(tf.reduce_mean(y))
    return y


def by_hand_in_a_branch(x, y):
    return jnp.where(jnp.mean(x) > 1.0, jnp.sum(y**2), 0.5 * jnp.mean(jnp.abs(y)) + jnp.mean(y))


def in_a_loop(layer, x, y):
    for i in tf.range(3):
        layer.add_loss(tf.cast(i, tf.float32) * tf.reduce_mean(tf.square(y)))
        if tf.reduce_mean(x) > 1.0:
            layer.add_loss(tf.reduce_mean(y))
    return y


def by_hand_in_a_loop(x, y):
    return 3 * jnp.mean(y**2) + jnp.where(jnp.mean(x) > 1.0, 3 * jnp.mean(y), 0.0)


@pytest.mark.parametrize(
    ("call", "extra"), [(in_a_branch, by_hand_in_a_branch), (in_a_loop, by_hand_in_a_loop)], ids=["branch", "loop"]
)
def test_fit_trains_on_losses_that_are_added_in(call, extra):
    with strategy(1).scope():
        model = penalised(call)
        history = model.fit(X, Y, 8, shuffle=False, verbose=0).history
    kernel, losses = jnp.asarray(KERNEL), []

    def loss(kernel, x, y):
        found = x @ kernel
        return jnp.mean((found - y) ** 2) + extra(x, found)

    for i in range(0, 32, 8):
        value, slope = jax.value_and_grad(loss)(kernel, X[i : i + 8], Y[i : i + 8])
        losses.append(float(value))
        kernel = kernel - 0.01 * slope
    np.testing.assert_allclose(history["loss"], [np.mean(losses)], rtol=1e-5)
    np.testing.assert_allclose(model.layers[-1].kernel, kernel, atol=1e-6)


def steps(layer: keras.layers.Layer) -> tuple[Any, Any]:
    """Functions for `strategy.run` that look at the losses of a layer after and inside of branches and loops."""

    @tf.function
    def branches(x):
        total = 0.0
        if tf.reduce_sum(x) > 0:
            layer(x)
            total += sum(layer.losses)
        if tf.reduce_sum(x) > 0:
            total += 10 * sum(layer.losses)
        return total, sum(layer.losses)

    @tf.function
    def loop(x):
        total = 0.0
        for i in tf.range(3):
            layer(x * tf.cast(i, tf.float32))
            total += sum(layer.losses)
        return total, sum(layer.losses)

    return branches, loop


def test_own_steps_see_the_losses_of_layers_as_eager_code_does():
    layer = keras.layers.Dense(2, kernel_initializer="ones", activity_regularizer=keras.regularizers.L2(1.0))
    layer(np.ones((1, 4), np.float32))
    branches, loop = steps(layer)

    def penalty(x: np.ndarray) -> float:
        return float((x.sum(1) ** 2).sum() * 2 / len(x))

    x = np.abs(X[:4])
    for sign in (1, -1):
        found = strategy(1).run(branches, args=(sign * x,))
        expected = (11 * penalty(x), penalty(x)) if sign > 0 else (0.0, 0.0)
        np.testing.assert_allclose(found, expected, rtol=1e-5)
    # The next call of a layer begins anew, so that the losses of the last turn are left.
    np.testing.assert_allclose(strategy(1).run(loop, args=(x,)), (5 * penalty(x), 4 * penalty(x)), rtol=1e-5)
