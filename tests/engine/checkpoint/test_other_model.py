"""A run resumes with the model, optimizer, metrics and callbacks that it was saved with, found by their names."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import openipu as ipu
from openipu import _validate as validate
from openipu.engine.checkpoint import Checkpoints
from openipu.engine.core import state_names
from openipu.engine.core.model_state import variables_of
from openipu.engine.core.state_names import names_of
from openipu.engine.fit import callback_counters as implementation

import keras
import numpy as np
import pytest

import zoo

pytestmark = zoo.KERAS_WARNINGS

X = np.random.default_rng(0).random((32, 4), np.float32)
Y = X.sum(1, keepdims=True)


def network(frozen: int | None = None, optimizer: str = "sgd", names: Any = (None, None), **compiled: Any) -> Any:
    with ipu.ipu_strategy.IPUStrategy().scope():
        model = keras.Sequential([keras.Input((4,)), *(keras.layers.Dense(4, name=name) for name in names)])
        model.add(keras.layers.Dense(1))
    if frozen is not None:
        model.layers[frozen].trainable = False
    model.compile(optimizer, "mse", **compiled)
    return model


def fit(model: Any, folder: Path, epochs: int = 1, callbacks: Any = (), **settings: Any) -> Any:
    checkpoint = ipu.callbacks.Checkpoint(folder, max_share=1)
    return model.fit(X, Y, 8, epochs, verbose=0, callbacks=[*callbacks, checkpoint], **settings)


# --- names -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        (
            {"frozen": 0},
            {"frozen": 1},
            "`dense/kernel` is not trainable in the checkpoint and trainable in the model. Freeze the same layers",
        ),
        (
            {"names": "ab"},
            {"names": "ba"},
            "trainable variable 1 is `a/kernel` in the checkpoint and `b/kernel` in the",
        ),
        ({"names": "ab"}, {"names": "ac"}, "only the model has the variable `c/kernel`, and the checkpoint does not"),
        (
            {"optimizer": "rmsprop"},
            {"optimizer": "adagrad"},
            "`RMSprop (iteration, learning_rate, velocity)` in the checkpoint and `Adagrad (",
        ),
        ({"optimizer": "adam"}, {"optimizer": "adamax"}, "momentum, velocity)` in the checkpoint and `Adamax ("),
        (
            {"optimizer": keras.optimizers.SGD(momentum=0.9)},
            {"optimizer": keras.optimizers.SGD(use_ema=True)},
            "learning_rate, momentum)` in the checkpoint and `SGD (iteration, learning_rate, average)`",
        ),
        (
            {"optimizer": keras.optimizers.RMSprop(momentum=0.9)},
            {"optimizer": keras.optimizers.RMSprop(centered=True)},
            "velocity, momentum)` in the checkpoint and `RMSprop (iteration, learning_rate, velocity, average_grad",
        ),
        (
            {"metrics": ["mae"]},
            {"metrics": ["mape"]},
            "metric variable 3 is `mae/total` in the checkpoint and `mape/total`",
        ),
    ],
)
def test_an_error_names_the_first_difference(tmp_path: Path, before: Any, after: Any, words: str) -> None:
    fit(network(**before), tmp_path)
    model = network(**after)
    weights = model.get_weights()
    with pytest.raises(ValueError, match=f"{tmp_path}/4 does not match: .*{re.escape(words)}"):
        fit(model, tmp_path, 2)
    for a, b in zip(weights, model.get_weights(), strict=True):
        np.testing.assert_array_equal(a, b, "the model is not changed")


@pytest.mark.parametrize("frozen", [None, 1, "all"])
def test_weights_are_loaded_by_name_whatever_is_frozen(tmp_path: Path, frozen: Any) -> None:
    saved = network(frozen=0)
    fit(saved, tmp_path)
    model = network(frozen=None if frozen == "all" else frozen)
    model.trainable = frozen != "all"
    assert ipu.callbacks.Checkpoint(tmp_path).load_weights(model) == 4
    for layer, other in zip(model.layers, saved.layers, strict=True):
        for a, b in zip(layer.get_weights(), other.get_weights(), strict=True):
            np.testing.assert_array_equal(a, b)


def test_weights_of_other_layers_are_not_loaded(tmp_path: Path) -> None:
    fit(network(names="ab"), tmp_path)
    with pytest.raises(ValueError, match=r"only the model has the variable `dense_1/kernel`.*same layers and names"):
        ipu.callbacks.Checkpoint(tmp_path).load_weights(network())


def test_a_checkpoint_with_the_class_of_the_optimizer_alone_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as older:
        older.setattr(state_names, "_optimizer_name", lambda *_: "SGD")
        fit(network(), tmp_path)
    with pytest.raises(ValueError, match=r"`SGD` in the checkpoint and `Adam \("):
        fit(network(optimizer="adam"), tmp_path, 2)
    assert fit(network(), tmp_path, 2).epoch == [0, 1]


def test_a_checkpoint_without_names_is_read_by_position(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save = Checkpoints.save
    monkeypatch.setattr(Checkpoints, "save", lambda self, step, tree: save(self, step, _as_before(tree)))
    saved = network(names="ab")
    fit(saved, tmp_path)
    model = network()
    assert ipu.callbacks.Checkpoint(tmp_path).load_weights(model) == 4
    np.testing.assert_array_equal(model.get_weights()[0], saved.get_weights()[0])
    assert fit(network(), tmp_path, 2).epoch == [0, 1]


def _as_before(tree: dict[str, Any]) -> dict[str, Any]:
    return {key: part for key, part in tree.items() if key != "names"}


class Scaled(keras.layers.Layer):
    def build(self, _shape: Any) -> None:
        self.factors = [self.add_weight(shape=(), initializer="ones") for _ in range(2)]

    def call(self, x: Any) -> Any:
        return x * self.factors[0] * self.factors[1]


def test_names_do_not_depend_on_counters_or_on_what_is_frozen() -> None:
    def names(freeze: bool) -> dict[str, list[str]]:
        rows = keras.Input((3, 4))
        x = keras.layers.Bidirectional(keras.layers.LSTM(2))(rows)
        x = keras.layers.Dropout(0.1)(keras.layers.BatchNormalization()(Scaled()(Scaled()(x))))
        x = keras.Sequential([keras.layers.Dense(4), keras.layers.Dense(4, name="mine_7")])(x)
        model = keras.Model(rows, [keras.layers.Dense(1)(x), keras.layers.Dense(1)(x)])
        model.layers[1].trainable = not freeze
        model.compile("adam", ["mse", "mse"], metrics=[[keras.metrics.MeanSquaredError()], ["mae"]])
        model.fit(np.ones((2, 3, 4)), [np.ones((2, 1))] * 2, verbose=0)
        return names_of(model, variables_of(model, "train"))

    first, second, frozen = names(False), names(False), names(True)
    assert first == second
    weights = first["trainable"] + first["non_trainable"]
    assert len(set(weights)) == len(weights)
    assert {"mine_7/kernel", "dense/kernel", "dense_1/kernel", "scaled_1/variable", "scaled_1/variable_1"} <= {*weights}
    assert sorted(frozen["trainable"] + frozen["non_trainable"]) == sorted(weights)
    assert first["optimizer"] == ["Adam (iteration, learning_rate, momentum, velocity)"]
    assert {"loss/total", "mean_squared_error/total", "mae/total", "loss of output 1/total"} <= {*first["metrics"]}


# --- counters of callbacks -------------------------------------------------------------------------------------------


def stopping() -> Any:
    return keras.callbacks.EarlyStopping("mae", patience=9)


def plateau() -> Any:
    return keras.callbacks.ReduceLROnPlateau("loss", patience=9)


class Seen(keras.callbacks.Callback):
    """What the best values are when training has resumed."""

    def __init__(self, *callbacks: Any) -> None:
        super().__init__()
        self._callbacks, self.best = callbacks, {}

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:  # noqa: ARG002
        self.best = self.best or {callback.monitor: callback.best for callback in self._callbacks}


def test_counters_find_their_callbacks_in_another_order(tmp_path: Path) -> None:
    history = fit(network(metrics=["mae"]), tmp_path, 1, [stopping(), plateau()]).history
    # The checkpoint of the last execution is older than `on_epoch_end`, so a second epoch is begun.
    history = fit(network(metrics=["mae"]), tmp_path, 2, [stopping(), plateau()]).history
    again = [plateau(), stopping()]
    seen = Seen(*again)
    fit(network(metrics=["mae"]), tmp_path, 3, [*again, seen])
    assert seen.best == {"loss": pytest.approx(min(history["loss"])), "mae": pytest.approx(min(history["mae"]))}


def test_counters_without_a_partner_are_named(caplog: pytest.LogCaptureFixture) -> None:
    validate._named.clear()
    saved = [implementation.counters_of(callback) for callback in (stopping(), plateau())]
    here = keras.callbacks.EarlyStopping("loss"), plateau()
    assert implementation._partners([*here], json.loads(json.dumps(saved))) == [(here[1], saved[1])]
    assert "no counters of `EarlyStopping` of 'loss'. It starts from scratch" in caplog.text
    assert "has counters of `EarlyStopping` of 'mae', which `fit` was not given" in caplog.text
    old = [{"best": 1.0, "wait": 2}]
    assert implementation._partners([*here], old) == [(here[0], old[0])], "by position, as before"


class StopError(Exception):
    pass


class Stop(keras.callbacks.Callback):
    """Waits for each checkpoint, and ends a run after the first batch of the second epoch."""

    def __init__(self, checkpoint: Any) -> None:
        super().__init__()
        self._checkpoint, self._epoch = checkpoint, 0

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:  # noqa: ARG002
        self._epoch = epoch

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:  # noqa: ARG002
        self._checkpoint._checkpoints.wait()
        if (self._epoch, batch) == (1, 1):
            raise StopError


def test_model_checkpoint_goes_on_counting_batches(tmp_path: Path) -> None:
    def saving(name: str) -> Any:
        return keras.callbacks.ModelCheckpoint(str(tmp_path / (name + "-{epoch}-{batch}.keras")), save_freq=3)

    def files(name: str) -> list[str]:
        return sorted(path.stem.removeprefix(name) for path in tmp_path.glob(f"{name}-*.keras"))

    fit(network(), tmp_path / "whole", 2, [saving("whole")])
    assert files("whole") == ["-1-3", "-2-2"]
    checkpoint = ipu.callbacks.Checkpoint(tmp_path / "cut", max_share=1)
    with pytest.raises(StopError):
        network().fit(X, Y, 8, 2, verbose=0, callbacks=[saving("cut"), checkpoint, Stop(checkpoint)])
    assert Checkpoints(tmp_path / "cut").latest() == 5
    fit(network(), tmp_path / "cut", 2, [saving("cut")])
    assert files("cut") == files("whole")
