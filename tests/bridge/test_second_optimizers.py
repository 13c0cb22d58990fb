"""Models whose `train_step` has several optimizers, as in a GAN: the numbers of two optimizers of plain Keras."""

from __future__ import annotations

from typing import Any

import openipu as ipu

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest

import zoo
from replication import amplified, configure_all, strategy

pytestmark = zoo.KERAS_WARNINGS
tf: Any = None  # conftest.py puts TensorFlow here
REAL = np.random.default_rng(0).normal(size=(40, 3)).astype(np.float32)
NOISE = np.random.default_rng(1).normal(size=(40, 2)).astype(np.float32)


@pytest.fixture(autouse=True, scope="module")
def _systems() -> None:
    configure_all()


def halves() -> tuple[keras.Model, keras.Model]:
    keras.utils.set_random_seed(3)
    generator = keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(4, "tanh"), keras.layers.Dense(3)])
    critic = keras.Sequential([keras.layers.Input((3,)), keras.layers.Dense(4, "tanh"), keras.layers.Dense(1)])
    return generator, critic


class OneDense(keras.Model):
    def __init__(self) -> None:
        super().__init__()
        self.dense = keras.layers.Dense(1)

    def call(self, x):
        return self.dense(x)


def make(strength: int = 1, drawn: bool = False) -> keras.Model:
    """A model of two halves that train each other.

    Args:
        strength: How many replicas' updates one update has to be worth.
        drawn: Whether noise is drawn in the step.
    """

    class Rivals(keras.Model):
        def __init__(self):
            super().__init__()
            self.generator, self.critic = halves()
            self.mean = keras.metrics.Mean("loss_of_critic")

        def compile(self, g_optimizer, d_optimizer):
            super().compile()
            self.g_optimizer, self.d_optimizer = g_optimizer, d_optimizer

        @property
        def metrics(self):
            return [self.mean]

        def train_step(self, data):
            noise, real = data
            if drawn:
                noise = tf.random.normal(tf.shape(noise))
            with tf.GradientTape() as tape:
                made = self.generator(noise, training=True)
                loss = tf.reduce_mean(self.critic(made)) - tf.reduce_mean(tf.tanh(self.critic(real)))
            gradients = tape.gradient(loss, self.critic.trainable_weights)
            self.d_optimizer.apply_gradients(zip(gradients, self.critic.trainable_weights, strict=True))
            self.g_optimizer.minimize(
                lambda: -tf.reduce_mean(self.critic(self.generator(noise))), self.generator.trainable_weights
            )
            self.mean.update_state(loss)
            return {"loss_of_critic": self.mean.result()}

    model = Rivals()
    model.compile(
        amplified(keras.optimizers.SGD(0.05, momentum=0.9), strength),
        amplified(keras.optimizers.Adam(0.01), strength),
    )
    return model


def state(model: keras.Model) -> list[np.ndarray]:
    owners = (model.generator, model.critic, model.g_optimizer, model.d_optimizer)
    return [np.asarray(v.value) for owner in owners for v in owner.variables]


def by_hand(batches: list[slice]) -> list[np.ndarray]:
    """The same training with gradients of JAX and two optimizers of plain Keras."""
    generator, critic = halves()
    one, other = keras.optimizers.SGD(0.05, momentum=0.9), keras.optimizers.Adam(0.01)

    def call(model, weights, x):
        return model.stateless_call(weights, [], x)[0]

    def of_critic(weights, noise, real):
        made = call(generator, [v.value for v in generator.trainable_variables], noise)
        return jnp.mean(call(critic, weights, made)) - jnp.mean(jnp.tanh(call(critic, weights, real)))

    def of_generator(weights, noise):
        return -jnp.mean(call(critic, [v.value for v in critic.trainable_variables], call(generator, weights, noise)))

    for rows in batches:
        slopes = jax.grad(of_critic)([v.value for v in critic.trainable_variables], NOISE[rows], REAL[rows])
        other.apply(slopes, critic.trainable_variables)
        slopes = jax.grad(of_generator)([v.value for v in generator.trainable_variables], NOISE[rows])
        one.apply(slopes, generator.trainable_variables)
    return [np.asarray(v.value) for owner in (generator, critic, one, other) for v in owner.variables]


def check_equal(found: list[np.ndarray], expected: list[np.ndarray]) -> None:
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


def test_two_optimizers_train_as_in_plain_keras():
    with strategy(1).scope():
        model = make()
        model.fit(NOISE, REAL, 8, epochs=2, shuffle=False, verbose=0)
        model.fit(NOISE, REAL, 8, shuffle=False, verbose=0)
    check_equal(state(model), by_hand([slice(i, i + 8) for i in range(0, 40, 8)] * 3))


@pytest.mark.slow
def test_replicas_give_the_numbers_of_one_device():
    with strategy(1).scope():
        one = make(strength=2)
        one.fit(NOISE, REAL, 16, epochs=2, shuffle=False, verbose=0)
    with strategy(2).scope():
        two = make()
        two.fit(NOISE, REAL, 8, epochs=2, shuffle=False, verbose=0)
    check_equal(state(two), state(one))


def test_a_checkpoint_of_tensorflow_restores_both_optimizers(tmp_path):
    with strategy(1).scope():
        model, other = make(), make()
        model.fit(NOISE, REAL, 8, verbose=0)
        path = tf.train.Checkpoint(model=model).write(str(tmp_path / "model"))
        tf.train.Checkpoint(model=other).read(path).assert_consumed()
        check_equal(state(other), state(model))
        apart = tf.train.Checkpoint(
            g=model.generator, d=model.critic, of_g=model.g_optimizer, of_d=model.d_optimizer
        ).write(str(tmp_path / "apart"))
        third = make()
        tf.train.Checkpoint(g=third.generator, d=third.critic, of_g=third.g_optimizer, of_d=third.d_optimizer).read(
            apart
        ).assert_consumed()
    check_equal(state(third), state(model))


@pytest.mark.slow
def test_training_that_was_stopped_goes_on_with_both_optimizers(tmp_path):
    def trained(epochs: int, folder: str) -> keras.Model:
        with strategy(1).scope():
            model = make(drawn=True)
            kept = ipu.callbacks.Checkpoint(str(tmp_path / folder))
            model.fit(NOISE, REAL, 8, epochs=epochs, verbose=0, callbacks=[kept])
        return model

    expected = state(trained(3, "whole"))
    trained(1, "parts")
    for a, b in zip(state(trained(3, "parts")), expected, strict=True):
        np.testing.assert_array_equal(a, b)


def test_random_numbers_of_a_step_differ_from_step_to_step():
    class Draws(OneDense):
        def train_step(self, data):
            outfeed.enqueue(tf.random.normal([2]))
            return super().train_step(data)

    with strategy(1).scope():
        outfeed = ipu.ipu_outfeed_queue.IPUOutfeedQueue()
        model = Draws()
        model.compile("sgd", "mse", steps_per_execution=5)
        model.fit(NOISE, NOISE[:, :1], 8, verbose=0)
    assert len(np.unique(outfeed.dequeue())) == 10


def test_what_is_not_carried_is_refused_with_the_remedy():
    class Second(OneDense):
        def train_step(self, data):
            x, y = data
            with tf.GradientTape() as tape:
                loss = self.compute_loss(x, y, self(x, training=True))
            second.minimize(loss, self.trainable_variables, tape=tape)
            return {"loss": loss}

    second = keras.optimizers.SGD(0.1)
    with strategy(1).scope():
        model = Second()
        model.compile("sgd", "mse")
        with pytest.raises(ValueError, match=r"Make them, or the optimizer that they belong to, attributes"):
            model.fit(NOISE, NOISE[:, :1], 8, verbose=0)
        model.other = ipu.optimizers.GradientAccumulationOptimizer(keras.optimizers.SGD(0.1), 4)
        with pytest.raises(ValueError, match="`other` of the model accumulates 4 micro-batches"):
            model.fit(NOISE, NOISE[:, :1], 8, verbose=0)
    with pytest.raises(ValueError, match="without the tape"):
        second.minimize(1.0, [])
