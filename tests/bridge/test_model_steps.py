"""Models with steps in TensorFlow's style, trained by `fit`: the numbers of plain Keras."""

from __future__ import annotations

import functools
from typing import Any

import openipu as ipu

import keras
import numpy as np
import pytest

import zoo
from replication import amplified, configure_all, strategy

pytestmark = zoo.KERAS_WARNINGS
tf: Any = None  # conftest.py puts TensorFlow here
X = np.random.default_rng(0).normal(size=(40, 5)).astype(np.float32)
Y = np.random.default_rng(1).integers(0, 3, 40).astype(np.int32)


@pytest.fixture(autouse=True, scope="module")
def _systems() -> None:
    configure_all()


def layers() -> list[keras.layers.Layer]:
    keras.utils.set_random_seed(7)
    penalty = keras.regularizers.L2(0.01)
    return [
        keras.layers.Dense(8, activation="tanh", kernel_regularizer=penalty),
        keras.layers.BatchNormalization(),
        keras.layers.Dense(3),
    ]


class Chain(keras.Model):
    """A model with Keras' own steps."""

    statistics = True
    """Whether it takes statistics over the batch, which each replica has of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = [part for part in layers() if self.statistics or isinstance(part, keras.layers.Dense)]

    def call(self, x, training=False):
        for part in self.parts:
            x = part(x, training=training) if isinstance(part, keras.layers.BatchNormalization) else part(x)
        return x


def compiled_parts() -> type[Chain]:
    class Model(Chain):
        def train_step(self, data):
            x, y = data
            with tf.GradientTape() as tape:
                y_pred = self(x, training=True)
                loss = self.compiled_loss(y, y_pred, regularization_losses=self.losses)
            gradients = tape.gradient(loss, self.trainable_variables)
            self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
            self.compiled_metrics.update_state(y, y_pred)
            return {m.name: m.result() for m in self.metrics}

        def test_step(self, data):
            x, y = data
            y_pred = self(x, training=False)
            self.compiled_loss(y, y_pred, regularization_losses=self.losses)
            self.compiled_metrics.update_state(y, y_pred)
            return {m.name: m.result() for m in self.metrics}

        def predict_step(self, data):
            return self(data, training=False) * 2.0

    return Model


def computed_loss() -> type[Chain]:
    class Model(Chain):
        @tf.function
        def train_step(self, data):
            x, y = data
            with tf.GradientTape() as tape:
                y_pred = self(x, training=True)
                loss = self.compute_loss(x, y, y_pred)
            gradients = tape.gradient(loss, self.trainable_weights)
            self.optimizer.apply_gradients(zip(gradients, self.trainable_weights, strict=True))
            self.compiled_metrics.update_state(y, y_pred)
            return {m.name: m.result() for m in self.metrics}

    return Model


def updated_metrics() -> type[Chain]:
    class Model(Chain):
        def train_step(self, data):
            x, y = data
            with tf.GradientTape() as tape:
                y_pred = self(x, training=True)
                loss = self.compute_loss(y=y, y_pred=y_pred)
            self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
            for metric in self.metrics:
                if metric.name == "loss":
                    metric.update_state(3.0 * loss)
                else:
                    metric.update_state(y, y_pred)
            return {m.name: m.result() for m in self.metrics}

    return Model


def keras_own_step() -> type[Chain]:
    class Model(Chain):
        def train_step(self, data):
            return super().train_step(data)

    return Model


def decorated_step() -> type[Chain]:
    def watched(step):
        @functools.wraps(step)
        def run(*args, **kwargs):
            return step(*args, **kwargs)

        return run

    class Model(Chain):
        @watched
        def train_step(self, data):
            x, y = data
            with tf.GradientTape() as tape:
                y_pred = self(x, training=True)
                loss = self.compute_loss(x, y, y_pred)
            gradients = tape.gradient(loss, self.trainable_weights)
            self.optimizer.apply_gradients(zip(gradients, self.trainable_weights, strict=True))
            self.compiled_metrics.update_state(y, y_pred)
            return {m.name: m.result() for m in self.metrics}

    return Model


def trained(
    kind: type[Chain], replicas: int | None, batch: int, strength: int = 1, scale: int = 0, **options: Any
) -> tuple[dict[str, list[float]], list[np.ndarray], dict[str, float]]:
    """The history, the weights and the evaluation of a model; without a strategy if `replicas` is None."""

    def run() -> Any:
        model = kind()
        optimizer = amplified(keras.optimizers.SGD(0.05, momentum=0.9), strength)
        if scale:
            optimizer = keras.optimizers.LossScaleOptimizer(optimizer, initial_scale=scale)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(optimizer, loss, metrics=["accuracy"], **options)
        history = model.fit(X, Y, batch, epochs=2, shuffle=False, verbose=0).history
        return history, [np.asarray(v.value) for v in model.weights], model.evaluate(X, Y, batch, 0, return_dict=True)

    if replicas is None:
        return run()
    with strategy(replicas).scope():
        return run()


def check_equal(found: Any, expected: Any) -> None:
    for one, other in zip((found[0], found[2]), (expected[0], expected[2]), strict=True):
        assert one.keys() == other.keys()
        for name, values in one.items():
            np.testing.assert_allclose(values, other[name], rtol=1e-5, atol=1e-6)
    for one, other in zip(found[1], expected[1], strict=True):
        np.testing.assert_allclose(one, other, atol=1e-6)


@pytest.fixture(scope="module")
def plain() -> Any:
    return trained(Chain, None, 8)


@pytest.mark.parametrize("kind", [compiled_parts, computed_loss, keras_own_step, decorated_step])
def test_one_device_gives_the_numbers_of_plain_keras(kind, plain):
    check_equal(trained(kind(), 1, 8, steps_per_execution=3), plain)


def test_a_step_that_updates_the_metric_of_the_loss_decides_about_it(plain):
    history, *rest = trained(updated_metrics(), 1, 8)
    check_equal((history | {"loss": [loss / 3 for loss in history["loss"]]}, *rest), plain)


def test_outside_of_a_strategy_keras_trains_it(plain):
    check_equal(trained(compiled_parts(), None, 8), plain)


def test_a_step_that_does_not_scale_its_loss_updates_as_it_says(plain):
    check_equal(trained(compiled_parts(), 1, 8, scale=64), plain)


def test_a_step_that_scales_its_loss_updates_equally(plain):
    class Model(Chain):
        def train_step(self, data):
            x, y = data
            with tf.GradientTape() as tape:
                y_pred = self(x, training=True)
                loss = self.optimizer.scale_loss(self.compute_loss(x, y, y_pred))
            gradients = tape.gradient(loss, self.trainable_variables)
            self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
            self.compiled_metrics.update_state(y, y_pred)
            return {m.name: m.result() for m in self.metrics}

    check_equal(trained(Model, 1, 8, scale=64), plain)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [compiled_parts, keras_own_step])
def test_replicas_give_the_numbers_of_one_device(kind):
    def without_statistics() -> type[Chain]:
        class Model(kind()):
            statistics = False

        return Model

    # 40 samples: the last step has data for one replica only.
    expected = trained(without_statistics(), 1, 16, strength=2)
    check_equal(trained(without_statistics(), 2, 8, steps_per_execution=2), expected)


def test_predictions_are_those_of_the_models_own_step():
    with strategy(1).scope():
        model = compiled_parts()()
        np.testing.assert_allclose(model.predict(X, verbose=0), 2 * np.asarray(model(X)), atol=1e-6)


def test_a_step_has_conditions_and_outfeeds():
    class Model(Chain):
        def train_step(self, data):
            x, y = data
            with tf.GradientTape() as tape:
                loss = self.compute_loss(x, y, self(x, training=True))
            gradients = tape.gradient(loss, self.trainable_variables)
            norm = tf.linalg.global_norm(gradients)
            if norm > 0.01:
                gradients = [g * (0.01 / norm) for g in gradients]
            outfeed.enqueue(tf.linalg.global_norm(gradients))
            self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
            return {"loss": loss}

    with strategy(1).scope():
        outfeed = ipu.ipu_outfeed_queue.IPUOutfeedQueue()
        model = Model()
        model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True), steps_per_execution=5)
        model.fit(X, Y, 8, verbose=0)
    np.testing.assert_allclose(outfeed.dequeue(), np.full(5, 0.01), rtol=1e-5)


def test_what_a_step_cannot_do_is_refused_with_the_remedy():
    class Second(Chain):
        def train_step(self, data):
            x, y = data
            with tf.GradientTape() as tape:
                loss = self.compute_loss(x, y, self(x, training=True))
            gradients = tape.gradient(loss, self.trainable_variables)
            second.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
            return {"loss": loss}

    class Staged(keras.Sequential):
        train_step = compiled_parts().train_step

    second = keras.optimizers.SGD(0.1)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    with strategy(1).scope():
        model = Second()
        model.compile("sgd", loss)
        with pytest.raises(ValueError, match=r"that `fit` does not carry.*a function for `strategy.run`"):
            model.fit(X, Y, 8, verbose=0)
        staged = Staged([keras.layers.Input((5,)), *layers()])
        staged.compile("sgd", loss, steps_per_execution=4)
        staged.set_pipeline_stage_assignment([0, 0, 1])
        staged.set_pipelining_options(gradient_accumulation_steps_per_replica=4)
        with pytest.raises((RuntimeError, ValueError), match=r"has its own `train_step`.*Remove `train_step`"):
            staged.fit(X, Y, 2, verbose=0)
