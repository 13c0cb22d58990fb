"""Models whose variables change after their programs were compiled: frozen layers, LoRA, another optimizer."""

from __future__ import annotations

from typing import Any

import openipu as ipu

import keras
import numpy as np
import pytest
from keras import layers

import replication
import zoo

pytestmark = [zoo.KERAS_WARNINGS, pytest.mark.parametrize("stages", [False, True], ids=["whole", "stages"])]

STEPS = 4
rng = np.random.default_rng(2)
X, Y = rng.normal(size=(32, 6)).astype("float32"), rng.normal(size=(32, 6)).astype("float32")


def stack() -> keras.Model:
    keras.utils.set_random_seed(3)
    return keras.Sequential([keras.Input((6,)), *(layers.Dense(6, "tanh") for _ in range(4))])


def made(stages: bool) -> Any:
    """A model of equal layers, on one device or in two stages."""
    replication.configure(2 if stages else 1)
    with ipu.ipu_strategy.IPUStrategy().scope():
        model: Any = stack()
    if stages:
        model.set_pipeline_stage_assignment([0, 0, 1, 1])
        model.set_pipelining_options(STEPS, gradient_accumulation_reduction_method="mean")
    else:
        model.set_gradient_accumulation_options(STEPS, "mean")
    return model


def compiled(model: Any, rate: float = 0.2, **settings: Any) -> Any:
    steps = STEPS if hasattr(model, "_ipu_session") else 1
    model.compile(keras.optimizers.SGD(rate, **settings), "mse", steps_per_execution=steps)
    return model


def trained(model: Any) -> Any:
    rows = 16 // STEPS if hasattr(model, "_ipu_session") else 16
    model.fit(X, Y, batch_size=rows, shuffle=False, verbose=0)
    return model


def test_other_layers_are_frozen_without_compile(stages: bool) -> None:
    """Plain Keras keeps the program of the first time, in which the weights of the two layers have changed places."""
    model = compiled(made(stages))
    first, second, *_ = model.layers
    first.trainable = False
    model.predict(X, verbose=0)
    loss = model.evaluate(X, Y, verbose=0)
    first.trainable, second.trainable = True, False
    np.testing.assert_allclose(model.predict(X, verbose=0), model(X), rtol=0, atol=1e-5)
    np.testing.assert_allclose(model.evaluate(X, Y, verbose=0), loss, rtol=1e-5)


def test_lora_after_training(stages: bool) -> None:
    def run(model: Any) -> Any:
        trained(compiled(model))
        for layer in model.layers:
            layer.enable_lora(2)
        return trained(compiled(model))

    expected, model = run(stack()), run(made(stages))
    assert any(np.abs(v.numpy()).max() > 0 for v in model.trainable_variables if "lora_kernel_b" in v.path)
    replication.assert_close([v.numpy() for v in model.variables], [v.numpy() for v in expected.variables])


@pytest.mark.slow
def test_another_optimizer_without_compile(stages: bool) -> None:
    expected = trained(compiled(trained(compiled(stack(), 0.1, momentum=0.9)), 0.3))
    model = trained(compiled(made(stages), 0.1, momentum=0.9))
    model.optimizer = keras.optimizers.SGD(0.3)
    replication.assert_close(trained(model).get_weights(), expected.get_weights())
    model.optimizer = keras.optimizers.SGD(0.1, momentum=0.9, nesterov=True)
    expected = trained(compiled(expected, 0.1, momentum=0.9, nesterov=True))
    replication.assert_close(trained(model).get_weights(), expected.get_weights())


def test_training_after_freezing_needs_compile(stages: bool) -> None:
    model = trained(compiled(made(stages)))
    model.layers[0].trainable = False
    with pytest.raises(ValueError, match=r"(== 6 whereas .* with 8|for 8 trainable weights, but there are 6 now)"):
        trained(model)
    model.layers[0].trainable = True
    trained(model)
