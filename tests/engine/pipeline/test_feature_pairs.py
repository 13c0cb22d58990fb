"""Pipelines where two features meet: loss scaling, clipping, tied weights, statistics, as on one device.

Plain SGD on purpose: Adam hides the scale of a gradient.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import openipu as ipu

import keras
import numpy as np
import pytest
from keras import layers, ops

import gradient_maps
import pipeline_zoo
import replication
import zoo

pytestmark = zoo.KERAS_WARNINGS

STEPS = 4
BATCH = 4
CLASSES = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


class Root(layers.Layer):
    """Adds the root of a weighted sum of its inputs. For a row of zeros, the gradient of the weight is not finite.

    The gradient that it hands back to earlier layers is finite, so only its own stage overflows.
    """

    def build(self, shape: Any) -> None:
        self.scale = self.add_weight(shape=(), initializer="ones")
        super().build(shape)

    def call(self, inputs: Any) -> Any:
        size = ops.stop_gradient(ops.sum(ops.abs(inputs), axis=-1, keepdims=True))
        return inputs + ops.sqrt(self.scale * size)


def dense() -> list[Any]:
    return [layers.Dense(6, use_bias=False) for _ in range(3)]


def rooted(place: int) -> Callable[[], keras.Model]:
    def make() -> keras.Model:
        stack = dense()
        stack.insert(place, Root())
        return keras.Sequential([keras.Input((6,)), *stack])

    return make


def plain() -> keras.Model:
    return keras.Sequential([keras.Input((6,)), *dense()])


def normalised() -> keras.Model:
    norm = [layers.BatchNormalization(momentum=0.6) for _ in range(2)]
    return keras.Sequential([keras.Input((6,)), norm[0], layers.Dense(8, "tanh"), norm[1], layers.Dense(3)])


def rows(count: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(3)
    return rng.normal(1, size=(count, 6)).astype("float32"), rng.integers(0, 3, count)


def trained(
    make: Callable[[], keras.Model],
    stages: list[int] | None,
    optimizer: Any,
    x: Any,
    y: Any,
    replicas: int = 1,
    divided: bool = False,
) -> keras.Model:
    """The model after two epochs, on one device per replica or in stages on two."""
    config = ipu.config.IPUConfig()
    config.auto_select_ipus = replicas * (1 if stages is None else 2)
    config.configure_ipu_system()
    keras.utils.set_random_seed(5)
    with ipu.ipu_strategy.IPUStrategy().scope():
        model = make()
    if stages is None:
        model.set_gradient_accumulation_options(STEPS)
    else:
        assignment = model.get_pipeline_stage_assignment()
        for part, stage in zip(assignment, stages, strict=True):
            part.pipeline_stage = stage
        model.set_pipeline_stage_assignment(assignment)
        model.set_pipelining_options(STEPS, replicated_optimizer_state_sharding=divided)
    model.compile(optimizer, CLASSES, steps_per_execution=2 * STEPS)
    model.fit(x, y, batch_size=BATCH, epochs=2, shuffle=False, verbose=0)
    return model


def values(model: keras.Model) -> list[np.ndarray]:
    return [v.numpy() for v in (*model.weights, *model.optimizer.variables) if v.dtype != "uint32"]


def assert_as_on_one_device(
    make: Callable[[], keras.Model],
    stages: list[int],
    optimizer: Callable[[], Any],
    x: Any,
    y: Any,
    replicas: int = 1,
    divided: bool = False,
) -> keras.Model:
    one = trained(make, None, optimizer(), x, y, replicas)
    staged = trained(make, stages, optimizer(), x, y, replicas, divided)
    replication.assert_close(values(staged), values(one))
    return staged


@pytest.mark.parametrize(("place", "stages"), [(0, [0, 0, 1, 1]), (2, [0, 0, 1, 1])], ids=["first", "last"])
def test_an_overflow_in_one_stage_skips_the_update_of_all(place: int, stages: list[int]) -> None:
    def optimizer() -> Any:
        return keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.002, 0.9), initial_scale=256.0)

    x, y = rows(64)
    x[5] = 0  # in the second micro-batch of the first update
    model = assert_as_on_one_device(rooted(place), stages, optimizer, x, y)
    assert all(np.isfinite(v).all() for v in values(model))
    assert int(model.optimizer.inner_optimizer.iterations) == 6  # of 8 updates, each epoch skips its first
    assert float(model.optimizer.dynamic_scale) == 64.0


def test_clipping_by_global_norm_inside_loss_scaling() -> None:
    def optimizer() -> Any:
        return keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1, global_clipnorm=0.5), initial_scale=256.0)

    assert_as_on_one_device(plain, [0, 1, 1], optimizer, *rows(64))


def test_a_tied_weight_counts_once_in_the_global_norm() -> None:
    def sgd() -> Any:
        return keras.optimizers.SGD(0.5, global_clipnorm=0.05)

    x = np.concatenate([pipeline_zoo.tokens(np.random.default_rng(i)) for i in range(8)])
    assert_as_on_one_device(pipeline_zoo.tied_layers, [0, 0, 1], sgd, x, x)


@pytest.mark.parametrize("count", [44, pytest.param(42, marks=pytest.mark.slow)])
def test_statistics_of_replicas_in_an_incomplete_update_inside_a_full_execution(count: int) -> None:
    """On two replicas, 44 rows are a whole update, one more step, and a micro-batch for the first replica alone."""
    assert_as_on_one_device(normalised, [0, 0, 1, 1], lambda: keras.optimizers.SGD(0.02, 0.9), *rows(count), replicas=2)


@pytest.mark.parametrize("divided", [False, True])
def test_gradients_are_averaged_over_replicas_of_a_pipeline(divided: bool) -> None:
    def averaged() -> Any:
        return ipu.optimizers.CrossReplicaOptimizer(keras.optimizers.SGD(0.05, 0.9))

    assert_as_on_one_device(plain, [0, 1, 1], averaged, *rows(64), replicas=2, divided=divided)


def test_tied_weights_and_divided_optimizer_state() -> None:
    x = np.concatenate([pipeline_zoo.tokens(np.random.default_rng(i)) for i in range(8)])
    momentum = functools.partial(keras.optimizers.SGD, 0.05, momentum=0.9)
    assert_as_on_one_device(pipeline_zoo.tied_layers, [0, 0, 1], momentum, x, x, replicas=2, divided=True)


def test_gradients_of_stages_are_mapped_without_the_loss_scale() -> None:
    """Each micro-batch adds half of the weight to the gradient, whatever the scale of the loss."""

    def optimizer() -> Any:
        scaled = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.02), initial_scale=256.0)
        return ipu.optimizers.MapGradientOptimizer(scaled, gradient_maps.decayed)

    assert_as_on_one_device(plain, [0, 1, 1], optimizer, *rows(60))


@pytest.mark.parametrize("divided", [False, True])
def test_a_device_without_weights_counts_updates(divided: bool) -> None:
    """It uses the count for the learning rate of later updates, as all devices do."""

    def decaying() -> Any:
        return keras.optimizers.SGD(keras.optimizers.schedules.ExponentialDecay(0.1, 1, 0.5))

    def make() -> keras.Model:
        last = [layers.Dense(6), layers.Dense(3)]
        return keras.Sequential([keras.Input((6,)), layers.Rescaling(2.0), layers.Activation("tanh"), *last])

    model = assert_as_on_one_device(make, [0, 0, 1, 1], decaying, *rows(64), replicas=2, divided=divided)
    assert int(model.optimizer.iterations) == 4


class Activity(layers.Dense):
    """Adds a loss of its own."""

    def call(self, inputs: Any) -> Any:
        outputs = super().call(inputs)
        self.add_loss(0.1 * ops.mean(outputs**2))
        return outputs


def test_penalties_and_added_losses_of_all_stages_count() -> None:
    def make() -> keras.Model:
        penalties = keras.regularizers.L2(0.05)
        hidden = [layers.Dense(6, "tanh", kernel_regularizer=penalties), Activity(6)]
        return keras.Sequential([keras.Input((6,)), *hidden, Activity(6), layers.Dense(3, bias_regularizer=penalties)])

    assert_as_on_one_device(make, [0, 0, 1, 1], lambda: keras.optimizers.SGD(0.05), *rows(64))


def test_clipping_by_global_norm_what_the_optimizer_accumulates_is_refused() -> None:
    sgd = keras.optimizers.SGD(0.1, global_clipnorm=0.5, gradient_accumulation_steps=2)
    with pytest.raises(ValueError, match=r"accumulates itself over 2 updates .* or use `clipnorm`"):
        trained(plain, [0, 1, 1], sgd, *rows(64))


def test_weights_that_gradients_overwrite_are_refused() -> None:
    def make() -> keras.Model:
        policy = keras.dtype_policies.QuantizedFloat8DTypePolicy("float8", "float32")
        return keras.Sequential([keras.Input((6,)), layers.Dense(6, dtype=policy, name="small"), layers.Dense(3)])

    with pytest.raises(ValueError, match=r"replaces the weight '.*small/.* the stages of a pipeline"):
        trained(make, [0, 1], keras.optimizers.SGD(0.1), *rows(64))


class Twice(keras.Model):
    """Its loss compares the outputs with those for other inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = layers.Dense(6, "tanh", name="first"), layers.Dense(3, name="last")
        self(np.ones((1, 6), "float32"))

    def call(self, inputs: Any) -> Any:
        return self.last(self.first(inputs))

    def compute_loss(self, x: Any = None, y: Any = None, y_pred: Any = None, *others: Any, **settings: Any) -> Any:
        del y, others, settings
        trainable, others = [v.value for v in self.trainable_variables], [v.value for v in self.non_trainable_variables]
        again, _ = self.stateless_call(trainable, others, 2 * x)
        return ops.mean((y_pred - again) ** 2)


def test_a_loss_that_runs_the_whole_model_again_is_refused() -> None:
    with pytest.raises(ValueError, match=r"read .*first/kernel.*, which earlier stages hold"):
        trained(Twice, [0, 1], keras.optimizers.SGD(0.1), *rows(64))


class Masked(layers.Layer):
    """Adds a mask of zeros and minus infinities that it keeps as a weight."""

    def build(self, shape: Any) -> None:
        self.mask = self.add_weight(shape=(shape[-1],), trainable=False)
        self.mask.assign(np.where(np.arange(shape[-1]) < 2, -np.inf, 0.0))

    def call(self, inputs: Any) -> Any:
        return ops.softmax(inputs + self.mask)


@pytest.mark.slow
def test_infinite_weights_on_replicas_of_a_pipeline() -> None:
    """44 rows end with a step that only one replica has data for."""

    def make() -> keras.Model:
        return keras.Sequential([keras.Input((6,)), layers.Dense(6), Masked(), layers.Dense(3)])

    model = trained(make, [0, 1, 1], keras.optimizers.SGD(0.05), *rows(44), replicas=2)
    assert model.layers[1].mask.numpy().tolist() == [-np.inf, -np.inf, 0, 0, 0, 0]
    assert all(np.isfinite(v.numpy()).all() for v in model.trainable_variables)
