"""The cases of Keras' own trainer tests in which callbacks act on the model: they stop it, or change its weights."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import pytest
from keras import layers

import replication
import zoo
from one_layer import Example, compiled

pytestmark = zoo.KERAS_WARNINGS

WAYS: dict[str, dict[str, Any]] = {"compiled": {}, "eager": {"run_eagerly": True}, "uncompiled": {"jit_compile": False}}


@pytest.fixture(autouse=True, scope="module")
def _systems() -> None:
    replication.configure_all()


def endless(labels: bool) -> Iterator[Any]:
    while True:
        yield (np.ones((2, 4)), np.ones((2, 3))) if labels else (np.ones((2, 4)),)


class Stop(keras.callbacks.Callback):
    """Stops after the fifth batch callback."""

    def __init__(self, flag: str) -> None:
        super().__init__()
        self.flag, self.calls = flag, 0

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:  # noqa: ARG002
        self.calls += 1
        if self.calls == 5:
            setattr(self.model, self.flag, True)

    on_test_batch_end = on_predict_batch_end = on_train_batch_end


@pytest.mark.parametrize(("way", "spe"), [("compiled", 1), ("eager", 2), ("uncompiled", 2)])
@pytest.mark.parametrize(
    ("call", "flag"), [("fit", "stop_training"), ("evaluate", "stop_evaluating"), ("predict", "stop_predicting")]
)
def test_a_callback_stops_an_endless_source(call: str, flag: str, spe: int, way: str) -> None:
    with replication.strategy(1).scope():
        model = compiled(Example, spe, **WAYS[way])
    stop = Stop(flag)
    settings = {"shuffle": False} if call == "fit" else {}
    result = getattr(model, call)(endless(call != "predict"), callbacks=[stop], verbose=0, **settings)
    assert stop.calls == 5
    if call == "predict":
        assert result.shape == (10 * spe, 3)
    if call == "fit":
        assert int(model.optimizer.iterations) == 5 * spe


class Counting(keras.Model):
    """Has weights that only callbacks change."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = {name: self.add_weight(shape=(), initializer="zeros") for name in ("train", "test", "predict")}
        self.dense = layers.Dense(3, kernel_initializer="ones")

    def call(self, x: Any) -> Any:
        return self.dense(x)


class Count(keras.callbacks.Callback):
    """Counts batch callbacks, in Python and in the model."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = {"train": 0, "test": 0, "predict": 0}

    def _count(self, name: str) -> None:
        self.model.counts[name].assign_add(1)
        self.calls[name] += 1

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:  # noqa: ARG002
        self._count("train")

    def on_test_batch_end(self, batch: int, logs: Any = None) -> None:  # noqa: ARG002
        self._count("test")

    def on_predict_batch_end(self, batch: int, logs: Any = None) -> None:  # noqa: ARG002
        self._count("predict")


@pytest.mark.parametrize(
    ("way", "spe", "replicas"),
    [("compiled", 1, 1), ("compiled", 3, 1), ("compiled", 1, 2), ("eager", 1, 1), ("uncompiled", 3, 1)],
)
def test_what_callbacks_write_into_weights_stays(way: str, spe: int, replicas: int) -> None:
    def run(model: Any) -> Any:
        count = Count()
        x, y = np.ones((8, 3), "float32"), np.ones((8, 3), "float32")
        held_out = {"validation_data": (x[:4], y[:4]), "batch_size": 1}
        history = model.fit(x, y, callbacks=[count], epochs=2, verbose=0, **held_out).history
        outputs = model.predict(x, callbacks=[count], batch_size=1, verbose=0)
        steps = -(-8 // (spe * replicas)), -(-4 // (spe * replicas))
        assert count.calls == {"train": 2 * steps[0], "test": 2 * steps[1], "predict": steps[0]}
        assert {name: int(v) for name, v in model.counts.items()} == count.calls
        return history["loss"], history["val_loss"], outputs, model.dense.get_weights()

    with replication.strategy(replicas).scope():
        ours = run(compiled(Counting, spe, optimizer=keras.optimizers.SGD(0.01), **WAYS[way]))
    if replicas == 1:
        plain = run(compiled(Counting, spe, optimizer=keras.optimizers.SGD(0.01), **WAYS[way]))
        for a, b in zip(keras.tree.flatten(ours), keras.tree.flatten(plain), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5)
