"""Outputs without a loss, given in each of Keras' forms: as in plain Keras, on replicas, in stages and in own steps."""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import openipu as ipu

import keras
import numpy as np
import pytest
from keras import layers, ops

import replication
import zoo

pytestmark = zoo.KERAS_WARNINGS

X = np.random.default_rng(0).normal(size=(24, 6)).astype("float32")
A, B = X[:, :1] * 2, X[:, 1:3] - 1


@pytest.fixture(autouse=True, scope="module")
def _systems() -> None:
    replication.configure_all()


class OwnStep(keras.Model):
    def train_step(self, state: Any, data: Any) -> Any:
        logs, state = super().train_step(state, data)
        return {**logs, "seen": ops.mean(data[0])}, state


def heads(kind: type, cls: type = keras.Model, stages: bool = False) -> keras.Model:
    def stage(number: int) -> contextlib.AbstractContextManager[Any]:
        return ipu.keras.PipelineStage(number) if stages else contextlib.nullcontext()

    inputs = keras.Input((6,))
    with stage(0):
        x = layers.Dense(5, "tanh", name="body")(inputs)
    with stage(1):
        a, b = layers.Dense(1, name="a")(x), layers.Dense(2, name="b")(x)
    return cls(inputs, {"a": a, "b": b} if kind is dict else [a, b])


FORMS: dict[str, tuple[type, Any, Any, str]] = {
    "dict": (dict, {"a": "mse", "b": None}, {"a": A, "b": B}, "b"),
    "dict without the label": (dict, {"a": "mse", "b": None}, {"a": A}, "b"),
    "dict without the loss": (dict, {"a": "mse"}, {"a": A, "b": B}, "b"),
    "first in a list": (list, [None, "mse"], [A, B], "a"),
    "last in a list": (list, ["mse", None], [A, B], "b"),
    "label of the other only": (list, [None, "mse"], B, "a"),
    "named outputs of a list": (list, {"a": None, "b": "mse"}, [A, B], "a"),
}
"""Structure of the outputs, loss, labels, and the output without a loss."""
STRENGTH = {"one": 1, "replicas": 2, "stages": 1, "own step": 1, "own step on replicas": 2}


def compiled(model: Any, loss: Any, strength: int = 1, steps: int = 1) -> Any:
    # Weights decay whether or not they have a gradient, as they do in Keras.
    model.compile(keras.optimizers.SGD(0.1 / strength, weight_decay=0.1 * strength), loss, steps_per_execution=steps)
    return model


def made(where: str | None, form: str) -> Any:
    """A model that trains on 12 samples per update: plain for None.

    No batch has 2 rows: plain Keras takes labels of 2 rows for a list of the labels of 2 outputs.
    """
    kind, loss, _, _ = FORMS[form]
    keras.utils.set_random_seed(3)
    if where is None:
        return compiled(heads(kind), loss)
    with replication.strategy(2 if where in ("replicas", "stages", "own step on replicas") else 1).scope():
        model = heads(kind, OwnStep if "own" in where else keras.Model, where == "stages")
    if where == "stages":
        model.set_pipelining_options(
            gradient_accumulation_steps_per_replica=4, gradient_accumulation_reduction_method="mean"
        )
    return compiled(model, loss, STRENGTH[where], 4 if where == "stages" else 1)


def run(model: Any, y: Any, batch: int) -> tuple[list[Any], list[np.ndarray]]:
    history = model.fit(X, y, batch_size=batch, epochs=2, shuffle=False, verbose=0).history
    weights = model.get_weights()
    logs = [model.evaluate(X, y, batch_size=batch, verbose=0, return_dict=True)]
    logs += [model.train_on_batch(X, y, return_dict=True), model.test_on_batch(X, y, return_dict=True)]
    return [history["loss"], *(log["loss"] for log in logs)], [*weights, *model.get_weights()]


@functools.cache
def of_keras(form: str) -> tuple[list[Any], list[np.ndarray]]:
    return run(made(None, form), FORMS[form][2], 12)


ALWAYS = ("dict", "label of the other only")
CASES = [
    pytest.param(where, form, marks=() if where == "one" or form in ALWAYS else pytest.mark.slow)
    for where in STRENGTH
    for form in FORMS
]


@pytest.mark.parametrize(("where", "form"), CASES)
def test_training_and_evaluation_are_those_of_keras(where: str, form: str, caplog: pytest.LogCaptureFixture) -> None:
    _, _, y, idle = FORMS[form]
    expected, model = of_keras(form), made(where, form)
    actual = run(model, y, {"replicas": 6, "stages": 3, "own step on replicas": 6}.get(where, 12))
    for a, b in zip(actual[0], expected[0], strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5)
    replication.assert_close(actual[1], expected[1])
    if "own" not in where:
        [notice] = [record.message for record in caplog.records if "no gradient" in record.message]
        assert f"{idle}/kernel, {idle}/bias" in notice
