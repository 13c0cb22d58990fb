"""Where replicas, accumulation or stages could silently differ from one device: sums, masks, counts, new calls."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from typing import Any

import openipu as ipu

import keras
import numpy as np
import pytest
from keras import layers, ops

import replication
import zoo

pytestmark = zoo.KERAS_WARNINGS

rng = np.random.default_rng(1)
X, Y = rng.normal(size=(24, 5)).astype("float32"), rng.normal(size=(24, 2)).astype("float32")


def both(run: Callable[[bool], Any]) -> tuple[Any, Any]:
    """What `run` returns in plain Keras and in a scope, from the same seed."""
    found = []
    for ours in (False, True):
        keras.utils.set_random_seed(0)
        with ipu.ipu_strategy.IPUStrategy().scope() if ours else contextlib.nullcontext():
            found.append(run(ours))
    return found[0], found[1]


def assert_equal(run: Callable[[bool], Any]) -> None:
    plain, ours = both(run)
    for a, b in zip(plain, ours, strict=True):
        np.testing.assert_allclose(b, a, rtol=1e-5, atol=1e-6)


def two_stages(model: Any, stages: list[int], steps: int) -> None:
    model.set_pipeline_stage_assignment(stages)
    model.set_pipelining_options(gradient_accumulation_steps_per_replica=steps, pipeline_schedule="Sequential")


# --- losses that are sums --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [16, 20, 22])
@pytest.mark.parametrize("way", ["replicas", "accumulation", "stages"])
def test_a_sum_over_samples_is_a_sum_in_incomplete_updates_too(rows: int, way: str) -> None:
    replication.configure(1 if way == "accumulation" else 2)

    def run(ours: bool) -> list[np.ndarray]:
        model = keras.Sequential([keras.Input((5,)), layers.Dense(3), layers.Dense(2)])
        if ours and way == "accumulation":
            model.set_gradient_accumulation_options(2)
        elif ours and way == "stages":
            two_stages(model, [0, 1], 2)
        per_execution = 2 if ours and way != "replicas" else 1
        loss = keras.losses.MeanSquaredError(reduction="sum")
        model.compile(keras.optimizers.SGD(0.01), loss, steps_per_execution=per_execution)
        model.fit(X[:rows], Y[:rows], batch_size=4 if ours else 8, verbose=0, shuffle=False)
        weights: list[np.ndarray] = model.get_weights()
        return weights

    assert_equal(run)


def test_losses_that_are_partly_sums_are_mentioned(caplog: pytest.LogCaptureFixture) -> None:
    replication.configure(2)
    inputs = keras.Input((5,))
    with ipu.ipu_strategy.IPUStrategy().scope():
        model = keras.Model(inputs, [layers.Dense(2)(inputs), layers.Dense(2)(inputs)])
        model.compile("sgd", [keras.losses.MeanSquaredError(reduction="sum"), "mse"])
    with caplog.at_level(logging.WARNING, "openipu"):
        model.fit(X, [Y, Y], batch_size=4, verbose=0)
    assert "add up their samples and others do not (['sum', 'sum_over_batch_size'])" in caplog.text


# --- masks -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("masked", [9.0, 0.0], ids=["nothing", "zeros"])
def test_batch_statistics_of_a_group_weigh_replicas_by_what_their_masks_leave(masked: float) -> None:
    replication.configure(2, batch_norm_group=2)
    x = rng.normal(size=(16, 6, 3)).astype("float32")
    for row in range(16):
        x[row, 1 + row % 6 :] = 0

    def run(ours: bool) -> list[Any]:
        parts = [layers.Masking(masked), layers.BatchNormalization(momentum=0.5), layers.GlobalAveragePooling1D()]
        model = keras.Sequential([keras.Input((6, 3)), *parts, layers.Dense(2)])
        model.compile(keras.optimizers.SGD(0.01 if ours else 0.02), "mse")
        history = model.fit(x, Y[:16], batch_size=4 if ours else 8, verbose=0, shuffle=False).history
        return [history["loss"], *model.get_weights()]

    assert_equal(run)


def test_metrics_see_the_mask_of_an_output_in_training_as_in_evaluation() -> None:
    """Plain Keras on JAX forgets the mask in `fit`, though not in `evaluate`."""
    replication.configure(1)
    tokens = np.array([[1, 2, 0, 0], [3, 0, 0, 0], [1, 2, 3, 4], [2, 0, 0, 0]])
    values = np.arange(16.0, dtype="float32").reshape(4, 4, 1)

    def run(ours: bool) -> list[float]:
        del ours
        embedding = layers.Embedding(5, 2, mask_zero=True)
        model = keras.Sequential([keras.Input((4,), dtype="int32"), embedding, layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.0), "mae", metrics=["mae"])
        trained = model.fit(tokens, values, verbose=0).history["mae"][0]
        return [trained, model.evaluate(tokens, values, verbose=0, return_dict=True)["mae"]]

    plain, ours = both(run)
    assert ours[0] == pytest.approx(ours[1])
    assert ours[1] == pytest.approx(plain[1])
    assert abs(plain[0] - plain[1]) > 0.1, "Keras has changed: docs/keras-behaviour.md lists this as a difference"


# --- state that counts -----------------------------------------------------------------------------------------------


class Counting(layers.Layer):
    """Counts positive numbers, or its own calls."""

    def __init__(self, calls: bool) -> None:
        super().__init__()
        self.calls = calls

    def build(self, input_shape: Any) -> None:
        del input_shape
        self.seen = self.add_weight(shape=(), dtype="int32", initializer="zeros", trainable=False, name="seen")

    def call(self, x: Any, training: bool = False) -> Any:
        if training:
            self.seen.assign_add(1 if self.calls else ops.sum(ops.cast(x > 0, "int32")))
        return x


@pytest.mark.parametrize("calls", [True, False], ids=["calls", "samples"])
def test_counts_that_differ_between_replicas_are_mentioned(calls: bool, caplog: pytest.LogCaptureFixture) -> None:
    replication.configure(2)
    with ipu.ipu_strategy.IPUStrategy().scope():
        model = keras.Sequential([keras.Input((5,)), Counting(calls), layers.Dense(2)])
        model.compile("sgd", "mse")
    with caplog.at_level(logging.WARNING, "openipu"):
        model.fit(X, Y, batch_size=4, verbose=0, shuffle=False)
    assert ("seen' consists of whole numbers and differs between replicas" in caplog.text) is not calls
    if calls:
        assert int(model.layers[0].seen) == 3, "each of the two replicas has seen 3 micro-batches"


# --- stages ----------------------------------------------------------------------------------------------------------


class Switched(keras.Model):
    """A model whose `call` depends on an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.skip = False
        self.first, self.second, self.last = layers.Dense(4, "tanh"), layers.Dense(4, "tanh"), layers.Dense(2)

    def call(self, x: Any) -> Any:
        hidden = self.first(x)
        deep = self.second(hidden)
        return self.last(deep + hidden if self.skip else deep)


def test_stages_follow_a_call_that_has_changed_before_compile() -> None:
    replication.configure(2)

    def run(ours: bool) -> list[Any]:
        model = Switched()
        model(X[:1])
        if ours:
            calls = model.get_pipeline_stage_assignment()
            for call, stage in zip(calls, (0, 0, 1), strict=True):
                call.pipeline_stage = stage
            two_stages(model, calls, 1)
        found: list[Any] = []
        for skip in (False, True):
            model.skip = skip
            model.compile("sgd", "mse")
            found += [model.fit(X, Y, batch_size=8, verbose=0).history["loss"], model.evaluate(X, Y, verbose=0)]
            found.append(model.predict(X, verbose=0))
        return found

    assert_equal(run)


class LargestPenalty(keras.Sequential):
    """Only the largest of its penalties and added losses counts."""

    def compute_loss(
        self, x: Any = None, y: Any = None, y_pred: Any = None, sample_weight: Any = None, training: bool = True
    ) -> Any:
        del x, sample_weight, training
        return ops.mean((y - y_pred) ** 2) + ops.max(ops.stack(self.losses)) + 0.1 * self.losses[0]


def test_a_loss_of_the_users_own_sees_each_loss_that_layers_add() -> None:
    replication.configure(2)

    def run(ours: bool) -> list[Any]:
        first = layers.Dense(4, kernel_regularizer="l2", activity_regularizer="l2")
        second = layers.Dense(3, kernel_regularizer="l2", activity_regularizer="l1")
        model = LargestPenalty([keras.Input((5,)), first, second, layers.Dense(2)])
        if ours:
            two_stages(model, [0, 0, 1], 1)
        model.compile("sgd")
        history = model.fit(X, Y, batch_size=8, verbose=0, shuffle=False).history
        return [history["loss"], model.evaluate(X, Y, verbose=0), *model.get_weights()]

    assert_equal(run)


def test_a_pipeline_without_trainable_weights_trains_nothing() -> None:
    replication.configure(2)

    def run(ours: bool) -> list[Any]:
        model = keras.Sequential([keras.Input((5,)), layers.Dense(3), layers.Dense(2)])
        model.trainable = False
        if ours:
            two_stages(model, [0, 1], 2)
        model.compile("adam", "mse", steps_per_execution=2 if ours else 1)
        history = model.fit(X, Y, batch_size=4, verbose=0, shuffle=False).history
        return [history["loss"], model.evaluate(X, Y, verbose=0), *model.get_weights()]

    assert_equal(run)


def test_optimizers_of_stages_search_in_the_paths_of_weights() -> None:
    replication.configure(2)

    def run(ours: bool) -> list[Any]:
        model = keras.Sequential([keras.Input((5,)), layers.Dense(4, name="first"), layers.Dense(2, name="second")])
        if ours:
            two_stages(model, [0, 1], 1)
        model.compile(keras.optimizers.Muon(0.05, exclude_layers=["second/kernel"]), "mse")
        return [model.fit(X, Y, batch_size=8, verbose=0, shuffle=False).history["loss"], *model.get_weights()]

    assert_equal(run)


# --- means over replicas ---------------------------------------------------------------------------------------------


class Lowest(layers.Layer):
    """Keeps the lowest number of the latest micro-batch."""

    def __init__(self, first: float, kind: str) -> None:
        super().__init__()
        self.first, self.kind = first, kind

    def build(self, input_shape: Any) -> None:
        del input_shape
        start = keras.initializers.Constant(self.first)
        self.low = self.add_weight(shape=(), dtype=self.kind, initializer=start, trainable=False)
        self.still = self.add_weight(shape=(2,), initializer=lambda *_, **__: np.array([0.1, np.inf]), trainable=False)

    def call(self, x: Any, training: bool = False) -> Any:
        if training:
            self.low.assign(ops.cast(ops.min(x), self.kind))
        return x


@pytest.mark.parametrize(
    ("first", "value", "kind"),
    [(np.inf, 0.5, "float32"), (1e9, 0.5, "float32"), (3e38, -1e38, "float32"), (0.0, 50000.0, "float16")],
)
@pytest.mark.parametrize("rows", [8, 10], ids=["whole", "remainder"])
def test_the_mean_of_equal_states_is_that_state(first: float, value: float, kind: str, rows: int) -> None:
    replication.configure(2)
    with ipu.ipu_strategy.IPUStrategy().scope():
        model = keras.Sequential([keras.Input((3,)), Lowest(first, kind), layers.Dense(1, kernel_initializer="zeros")])
        model.compile(keras.optimizers.SGD(0.0), "mse", steps_per_execution=2)
    model.fit(np.full((rows, 3), value, "float32"), np.zeros((rows, 1), "float32"), batch_size=2, verbose=0)
    np.testing.assert_allclose(np.asarray(model.layers[0].low), np.asarray(value, kind))
    np.testing.assert_array_equal(np.asarray(model.layers[0].still), np.array([0.1, np.inf], "float32"))


@pytest.mark.parametrize("replicas", [1, 2])
def test_the_mean_of_gradients_in_half_precision_does_not_overflow(replicas: int) -> None:
    replication.configure(replicas)
    weight = keras.Variable([1.0], dtype="float16")
    optimizer = ipu.optimizers.CrossReplicaOptimizer(keras.optimizers.SGD(2.0**-16))
    optimizer.build([weight])

    def step() -> Any:
        return ipu.training.minimize(optimizer, lambda: ops.sum(weight * ops.cast(40000.0, "float16")), [weight])

    with ipu.ipu_strategy.IPUStrategy().scope():
        ipu.ipu_strategy.IPUStrategy().run(step)
    np.testing.assert_allclose(weight.numpy(), [0.39], rtol=1e-2)
