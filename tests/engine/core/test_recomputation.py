"""Recomputation in parts: the same numbers, measurably less memory, and nothing done twice that must be done once."""

from __future__ import annotations

from typing import Any

import openipu as ipu
from openipu.engine.core.recomputation import recomputed_in_parts
from openipu.keras.layers import RecomputationCheckpoint

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest
from keras import layers

import replication
import zoo

pytestmark = zoo.KERAS_WARNINGS

WIDTH, ROWS, BLOCKS = 32, 1024, 6


def configure(devices: int, recompute: bool) -> None:
    config = ipu.config.IPUConfig()
    config.auto_select_ipus = devices
    config.allow_recompute = recompute
    config.configure_ipu_system()


def blocks(marks: bool) -> keras.Model:
    x = inputs = keras.Input((WIDTH,))
    for _ in range(BLOCKS):
        for _ in range(4):
            x = layers.Dense(WIDTH, "tanh")(x)
        x = layers.BatchNormalization(scale=False, center=False)(x)
        x = RecomputationCheckpoint()(x) if marks else x
    return keras.Model(inputs, layers.Dense(1)(x))


def trained(marks: bool, recompute: bool, stages: int = 1, **options: Any) -> tuple[int, list[np.ndarray]]:
    """How much memory the program takes besides its inputs and outputs, in activations; and the weights."""
    configure(1, recompute)
    keras.utils.set_random_seed(5)
    with ipu.ipu_strategy.IPUStrategy().scope():
        model = blocks(marks)
        model.compile(keras.optimizers.SGD(0.01), "mse", steps_per_execution=4)
        if stages > 1:
            calls = model.get_pipeline_stage_assignment()
            for number, call in enumerate(calls):
                call.pipeline_stage = number * stages // len(calls)
            model.set_pipeline_stage_assignment(calls)
            model.set_pipelining_options(4, device_mapping=[0] * stages, **options)
    x = np.random.default_rng(0).normal(size=(4 * ROWS, WIDTH)).astype("float32")
    model.fit(x, x[:, :1], batch_size=ROWS, shuffle=False, verbose=0)
    (program,) = replication.programs(model)
    return program.memory_analysis().temp_size_in_bytes // (ROWS * WIDTH * 4), model.get_weights()


def test_marks_save_memory() -> None:
    """There are 24 activations. A block has 4, and each of the 6 marks is one."""
    whole, expected = trained(marks=True, recompute=False)
    parts, weights = trained(marks=True, recompute=True)
    assert whole >= 24
    assert parts <= 6 + 2 * 4
    replication.assert_close(weights, expected)


@pytest.mark.slow
def test_marks_save_memory_in_a_pipeline() -> None:
    """Each of two stages keeps 12 activations, or its input and 3 marks; Sequential has one micro-batch in flight."""
    sequential = {"stages": 2, "pipeline_schedule": "Sequential"}
    whole, expected = trained(True, False, **sequential)
    parts, weights = trained(True, True, **sequential)
    assert parts <= whole - 12
    replication.assert_close(weights, expected)


class Odd(keras.Model):
    """Marks between layers with state, random numbers, whole numbers that are used later, and a loss of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.table = layers.Embedding(10, 8, mask_zero=True)
        self.mark = RecomputationCheckpoint()
        self.lstm = layers.LSTM(8, return_sequences=True)
        self.norm, self.drop = layers.BatchNormalization(), layers.Dropout(0.25, seed=3)
        self.out = layers.Dense(1, activity_regularizer="l2")

    def call(self, numbers: Any, training: bool = False) -> Any:
        x, kept = self.mark([self.table(numbers), numbers])
        x = self.mark(self.drop(self.norm(self.lstm(x), training=training), training=training))
        return self.out(x * keras.ops.cast(kept, x.dtype)[..., None])


@pytest.mark.parametrize("devices", [2, pytest.param(1, marks=pytest.mark.slow)])
def test_state_and_random_numbers(devices: int) -> None:
    results = []
    for recompute in (False, True):
        configure(devices, recompute)
        keras.utils.set_random_seed(5)
        with ipu.ipu_strategy.IPUStrategy().scope():
            model = Odd()
            model.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"], steps_per_execution=2)
        numbers = np.random.default_rng(1).integers(0, 10, (24, 5))
        history = model.fit(numbers, numbers[..., None], batch_size=4, epochs=2, shuffle=False, verbose=0)
        results.append(([np.asarray(v) for v in model.variables], history.history))
    replication.assert_close(results[1][0], results[0][0])
    replication.assert_same_history(results[1][1], results[0][1])


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
def test_gradients(platform: str) -> None:
    def function(weights: list[Any], numbers: Any) -> Any:
        mark = ipu.ops.pipelining_ops.recomputation_checkpoint
        x, count = mark(jnp.sin(weights[0])), mark(numbers + 1)
        y = mark(jnp.exp(x) * count + weights[1])
        return jnp.sum(jnp.tanh(y) * x), (y, count, 3)

    weights, numbers = [jnp.arange(3.0), jnp.float32(2.0)], jnp.arange(3)
    expected = jax.grad(function, has_aux=True)(weights, numbers)
    got = jax.jit(jax.grad(recomputed_in_parts(function, platform), has_aux=True))(weights, numbers)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_parts_of_no_size() -> None:
    def function(x: Any) -> Any:
        return jnp.sum(ipu.ops.pipelining_ops.recomputation_checkpoint(jnp.sin(x)) ** 2)

    assert jax.jit(jax.grad(recomputed_in_parts(function, "cpu")))(jnp.zeros((0, 3))).shape == (0, 3)


def test_not_finite_gradients_arrive() -> None:
    def function(x: Any) -> Any:
        return jnp.sum(jnp.sqrt(ipu.ops.pipelining_ops.recomputation_checkpoint(2 * x)))

    given = jnp.array([0.0, -1.0, 4.0])
    got, expected = jax.jit(jax.grad(recomputed_in_parts(function, "cpu")))(given), jax.grad(function)(given)
    np.testing.assert_array_equal(got, expected)
    assert np.isinf(got[0])
    assert np.isnan(got[1])


def test_what_calls_the_host_is_done_once() -> None:
    seen: list[float] = []

    def function(x: Any) -> Any:
        y = jnp.sin(x)
        jax.debug.callback(lambda value: seen.append(float(value)), y)
        return jnp.square(ipu.ops.pipelining_ops.recomputation_checkpoint(y))

    gradient = jax.jit(jax.grad(recomputed_in_parts(function, "cpu")))(0.5)
    jax.effects_barrier()
    np.testing.assert_allclose(gradient, 2 * np.sin(0.5) * np.cos(0.5), rtol=5e-6)
    assert seen == pytest.approx([np.sin(0.5)])
