"""Optimizers that scale the loss and keep exact means of half-precision gradients."""

from __future__ import annotations

from typing import Any

import openipu as ipu
from openipu.keras.optimizers import ALSOptimizerAdam, ALSOptimizerRMSProp, ALSOptimizerSGD
from openipu.keras.optimizers.rmsprop import RMSpropFloat32

import jax.numpy as jnp
import keras
import numpy as np
import pytest

from zoo import KERAS_WARNINGS, policy

pytestmark = KERAS_WARNINGS

PAIRS = [
    (ALSOptimizerSGD(0.1, 0.9), keras.optimizers.SGD(0.1, 0.9)),
    (ALSOptimizerAdam(0.1, 0.8, 0.9, 1e-6, True), keras.optimizers.Adam(0.1, 0.8, 0.9, 1e-6, True)),
    (ALSOptimizerRMSProp(0.1, 0.8, 0.5, 1e-6), keras.optimizers.RMSprop(0.1, 0.8, 0.5, 1e-6)),
    (ALSOptimizerRMSProp(0.1, centered=True), keras.optimizers.RMSprop(0.1, centered=True)),
    (RMSpropFloat32(0.1, 0.7), keras.optimizers.RMSprop(0.1, 0.7)),
]
IDS = ["SGD", "Adam", "RMSProp", "centered", "plain"]


def trained(optimizer: Any, dtype: str, steps: int = 6) -> np.ndarray:
    weight = keras.Variable(np.array([1.0, -2.0, 3.0]), dtype=dtype)
    optimizer = type(optimizer).from_config(optimizer.get_config())
    optimizer.build([weight])
    for step in range(steps):
        gradient = np.random.default_rng(step).normal(size=3) * 1e-2
        optimizer.apply([jnp.asarray(optimizer.scale_loss(jnp.asarray(gradient, "float32")), dtype)], [weight])
    return np.asarray(weight.value, "float64")


@pytest.mark.parametrize(("ours", "plain"), PAIRS, ids=IDS)
def test_the_same_updates_as_keras(ours, plain):
    np.testing.assert_allclose(trained(ours, "float32"), trained(plain, "float32"), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(trained(ours, "float16"), trained(plain, "float32"), rtol=2e-2, atol=1e-2)


@pytest.mark.parametrize("kind", [ALSOptimizerSGD, ALSOptimizerAdam, ALSOptimizerRMSProp])
def test_small_gradients_are_not_lost(kind):
    """A gradient of 1e-8 is zero in float16, but not if the loss is scaled."""
    options = {"initial_loss_scaling_factor": 2**14, "max_loss_scaling_factor": 2**16}
    optimizer = kind(**options, **({"momentum": 0.9} if kind is ALSOptimizerSGD else {}))
    weight = keras.Variable(np.zeros(4), dtype="float16")
    optimizer.build([weight])
    before = [np.asarray(v.value) for v in optimizer.variables]
    optimizer.apply([jnp.asarray(optimizer.scale_loss(jnp.full(4, 1e-8, "float32")), "float16")], [weight])
    slots = [
        v for v, old in zip(optimizer.variables, before, strict=True) if v.shape == (4,) and (v.value != old).all()
    ]
    assert slots
    assert all(v.dtype == "float32" for v in slots)
    assert type(optimizer).from_config(optimizer.get_config()).get_config() == optimizer.get_config()
    assert optimizer.get_config()["initial_loss_scaling_factor"] == 2**14


def test_names_and_defaults():
    sgd = ALSOptimizerSGD(0.5, 0.0, 4)
    assert (sgd.name, sgd.initial_loss_scaling_factor, sgd.update_frequency) == ("ALSOptimizerSGD", 4, 8)
    assert float(sgd.learning_rate) == 0.5
    assert float(ALSOptimizerSGD().learning_rate) == pytest.approx(0.01)


def test_in_a_model(tmp_path):
    rng = np.random.default_rng(2)
    x = rng.normal(size=(64, 4)).astype("float16")
    with policy("float16"), ipu.ipu_strategy.IPUStrategy().scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        model.compile(ALSOptimizerAdam(0.02, update_frequency=1), "mse", steps_per_execution=4)
        losses = model.fit(x, x.sum(1, keepdims=True), batch_size=8, epochs=6, verbose=0).history["loss"]
    assert losses[-1] < losses[0] / 2
    assert float(model.optimizer.loss_scaling_factor) > 1
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert loaded.optimizer.get_config() == model.optimizer.get_config()
