"""Layers that `call` does not use, but a loss does: a pipeline gives the numbers of one device."""

from __future__ import annotations

from typing import Any

import openipu as ipu

import keras
import numpy as np
import pytest
from keras import layers, ops

import replication
import zoo
from stages import accumulating

pytestmark = zoo.KERAS_WARNINGS

ROWS, WIDTH = 64, 3
rng = np.random.default_rng(3)
X, Y = rng.normal(size=(ROWS, 6)).astype("float32"), rng.normal(size=(ROWS, WIDTH)).astype("float32")


def averaging() -> Any:
    """An optimizer that averages over replicas instead of adding up."""
    return ipu.optimizers.CrossReplicaOptimizer(keras.optimizers.SGD(0.05))


class WithTeacher(keras.Model):
    """A model of two layers, and a teacher that `call` does not use."""

    def __init__(self, teacher: Any) -> None:
        super().__init__()
        self.first, self.last, self.teacher = layers.Dense(6, "tanh"), layers.Dense(WIDTH), teacher
        self.first.build((None, 6))
        self.last.build((None, 6))
        self.teacher.build((None, WIDTH))

    def call(self, inputs: Any) -> Any:
        return self.last(self.first(inputs))


class LossWithState(WithTeacher):
    """Its teacher has moving statistics and draws random numbers."""

    def __init__(self) -> None:
        parts = [layers.Dense(WIDTH), layers.BatchNormalization(momentum=0.8), layers.Dropout(0.3)]
        super().__init__(keras.Sequential(parts))

    def compute_loss(self, x: Any, y: Any, y_pred: Any, sample_weight: Any = None, training: bool = True) -> Any:
        del x, sample_weight
        return ops.mean((y_pred - self.teacher(y, training=training)) ** 2)


def loss_in_a_closure() -> keras.Model:
    model = WithTeacher(layers.Dense(WIDTH))
    model.compile(averaging(), lambda y, p: ops.mean((p - model.teacher(y)) ** 2, -1))
    return model


def metric_in_a_closure() -> keras.Model:
    def distance(y: Any, p: Any) -> Any:
        return ops.mean(ops.abs(p - model.teacher(y)), -1)

    model = WithTeacher(layers.Dense(WIDTH, trainable=False))
    model.compile(averaging(), "mse", metrics=[distance])
    return model


def loss_with_state() -> keras.Model:
    model = LossWithState()
    model.compile(averaging())
    return model


def trained(make: Any, stages: bool, replicas: int = 1) -> tuple[list[np.ndarray], dict[str, Any], dict[str, float]]:
    """The weights, the history and an evaluation, all from updates of 16 rows."""
    config = ipu.config.IPUConfig()
    config.auto_select_ipus = replicas * (2 if stages else 1)
    config.configure_ipu_system()
    keras.utils.set_random_seed(4)
    with ipu.ipu_strategy.IPUStrategy().scope():
        model = make()
        model(X[:4])
        accumulating(model, stages)
    model.steps_per_execution = 4 * replicas
    history = model.fit(X, Y, batch_size=4 // replicas, epochs=2, shuffle=False, verbose=0).history
    return model.get_weights(), history, model.evaluate(X, Y, batch_size=4, verbose=0, return_dict=True)


# The statistics of half a batch are others, so a teacher with statistics is compared without replicas.
@pytest.mark.parametrize(("make", "replicas"), [(loss_in_a_closure, 1), (loss_in_a_closure, 2), (loss_with_state, 1)])
def test_the_numbers_of_one_device(make: Any, replicas: int) -> None:
    weights, history, evaluated = trained(make, stages=True, replicas=replicas)
    one_weights, one_history, one_evaluated = trained(make, stages=False)
    replication.assert_close(weights, one_weights, 1e-5)
    assert history.keys() == one_history.keys()
    for name, values in one_history.items():
        np.testing.assert_allclose(history[name], values, rtol=1e-5, err_msg=name)
        np.testing.assert_allclose(evaluated[name], one_evaluated[name], rtol=1e-5, err_msg=name)


@pytest.mark.parametrize("stages", [False, True])
def test_a_metric_that_calls_a_layer_of_the_model_is_an_error_as_in_keras(stages: bool) -> None:
    """On JAX, Keras gives metrics their own variables only. They never see zeros instead of weights."""
    with pytest.raises(RuntimeError, match="The values of this variable are in a running program"):
        trained(metric_in_a_closure, stages)
