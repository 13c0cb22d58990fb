"""`run_eagerly=True` and `jit_compile=False`: on one device Keras' own loop runs the model, with a notice."""

from __future__ import annotations

import contextlib
import logging
from typing import Any

import openipu as ipu

import keras
import numpy as np
import pytest
from keras import layers

import replication
import zoo

pytestmark = zoo.KERAS_WARNINGS

X, Y = zoo.table(20)
SETTINGS: list[dict[str, Any]] = [{"run_eagerly": True}, {"jit_compile": False}]
CALLS = ["fit", "evaluate", "predict", "train_on_batch", "test_on_batch", "predict_on_batch"]


def as_text(settings: dict[str, Any]) -> str:
    return "=".join(map(str, *settings.items()))


@pytest.fixture(autouse=True, scope="module")
def _systems() -> None:
    replication.configure_all()


def compiled(model: keras.Model, **settings: Any) -> Any:
    model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"], **settings)
    return model


def made(replicas: int | None, make: Any = zoo.dense, **settings: Any) -> Any:
    """A compiled model: plain for None, else one of so many replicas."""
    keras.utils.set_random_seed(3)
    if replicas is None:
        return compiled(make(), **settings)
    with replication.strategy(replicas).scope():
        return compiled(make(), **settings)


def everything(model: Any) -> Any:
    data = {"batch_size": 5, "verbose": 0}
    results = [
        model.fit(X, Y, epochs=2, validation_data=(X[:5], Y[:5]), **data).history,
        model.evaluate(X, Y, **data),
        model.predict(X, **data),
        model.train_on_batch(X[:5], Y[:5]),
        model.test_on_batch(X[:5], Y[:5]),
        model.predict_on_batch(X[:5]),
    ]
    return results, model.get_weights(), [v.numpy() for v in model.optimizer.variables]


@pytest.mark.parametrize("settings", SETTINGS, ids=as_text)
def test_all_methods_give_exactly_what_plain_keras_gives(settings: dict[str, Any]) -> None:
    plain, ours = (everything(made(where, steps_per_execution=3, **settings)) for where in (None, 1))
    for a, b in zip(keras.tree.flatten(ours), keras.tree.flatten(plain), strict=True):
        np.testing.assert_array_equal(a, b)


class Debugged(keras.Model):
    """Counts in Python how often each step runs, and uses NumPy on the data."""

    def __init__(self) -> None:
        super().__init__()
        self.head = layers.Dense(3, activation="softmax")
        self.seen: list[float] = []

    def build(self, shape: Any) -> None:
        self.head.build(shape)

    def call(self, x: Any) -> Any:
        return self.head(x)

    def train_step(self, state: Any, data: Any) -> Any:
        self._look(data)
        return super().train_step(state, data)

    def test_step(self, state: Any, data: Any) -> Any:
        self._look(data)
        return super().test_step(state, data)

    def predict_step(self, state: Any, data: Any) -> Any:
        self._look(data)
        return super().predict_step(state, data)

    def _look(self, data: Any) -> None:
        self.seen.append(float(np.asarray(keras.utils.unpack_x_y_sample_weight(data)[0]).sum()))


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("settings", SETTINGS, ids=as_text)
def test_python_and_numpy_run_in_every_step(call: str, settings: dict[str, Any]) -> None:
    model = made(1, Debugged, **settings)
    data, sizes = ((X,) if "predict" in call else (X, Y)), {"batch_size": 4} if "batch" not in call else {}
    shown = {"shuffle": False} if call == "fit" else {}
    getattr(model, call)(*data, **sizes, **shown)
    parts = [X] if "batch" in call else np.split(X, 5)
    np.testing.assert_allclose(model.seen, [part.sum() for part in parts], rtol=1e-5)


class Tanh(layers.Layer):
    """Computes in NumPy, so it can neither be compiled nor differentiated."""

    def __init__(self) -> None:
        super().__init__()
        self.supports_jit = False

    def call(self, x: Any) -> Any:
        return keras.ops.convert_to_tensor(np.tanh(np.asarray(x)))

    def compute_output_spec(self, x: Any) -> Any:
        return keras.KerasTensor(x.shape, x.dtype)


def test_a_layer_in_numpy_predicts_because_it_says_that_it_cannot_be_compiled() -> None:
    def make() -> keras.Model:
        return keras.Sequential([keras.Input((6,)), Tanh(), layers.Dense(2)])

    keras.utils.set_random_seed(3)
    plain = make().predict(X, verbose=0)
    keras.utils.set_random_seed(3)
    with replication.strategy(1).scope():
        ours = make().predict(X, verbose=0)
    np.testing.assert_array_equal(ours, plain)
    with replication.strategy(2).scope(), pytest.raises(RuntimeError, match=r"supports_jit=False of layer 'tanh"):
        make().predict(X, verbose=0)


def test_augmentation_is_compiled_although_keras_would_not(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "openipu")
    images = np.random.default_rng(0).random((6, 8, 8, 1), "float32")

    def make() -> keras.Model:
        return keras.Sequential([keras.Input((8, 8, 1)), layers.RandomTranslation(0.1, 0.1), layers.Flatten()])

    with replication.strategy(1).scope():
        model = make()
    model.compile()
    assert model.jit_compile is False
    model.predict(images, verbose=0)
    assert len(replication.programs(model, "predict")) == 1
    assert "compiled, though Keras would not do that with random_translation" in caplog.text


def test_random_crops_cannot_be_compiled(caplog: pytest.LogCaptureFixture) -> None:
    images = np.random.default_rng(0).random((6, 8, 8, 1), "float32")

    def trained(scope: Any) -> dict[str, list[float]]:
        keras.utils.set_random_seed(3)
        with scope:
            model = keras.Sequential(
                [keras.Input((8, 8, 1)), layers.RandomCrop(5, 5), layers.GlobalAveragePooling2D(), layers.Dense(1)]
            )
        model.compile("sgd", "mse")
        return model.fit(images, images[:, :1, 0, 0], batch_size=3, verbose=0).history

    ours = trained(replication.strategy(1).scope())
    assert "Keras' own loop runs this model step by step" in caplog.text
    assert ours == trained(contextlib.nullcontext())
    with pytest.raises(RuntimeError, match=r"supports_jit=False of layer 'random_crop"):
        trained(replication.strategy(2).scope())


@pytest.mark.parametrize("settings", SETTINGS, ids=as_text)
def test_it_is_said_once(settings: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    model = made(1, **settings)
    for _ in range(2):
        model.fit(X, Y, verbose=0)
        model.test_on_batch(X, Y)
    notices = [r.message for r in caplog.records if r.name == "openipu"]
    assert len(notices) == 1
    assert f"step by step on one device, because of {as_text(settings)}" in notices[0]


def test_it_can_be_switched_on_and_off() -> None:
    plain, ours = made(None), made(1)
    for model in (plain, ours):
        keras.utils.set_random_seed(4)
        model.fit(X, Y, 6, 1, 0)
        model.run_eagerly = True
        model.train_function = model.train_function if model is ours else None  # plain Keras notices only in `compile`
        model.fit(X, Y, 6, 1, 0)
        model.train_on_batch(X, Y)
        model.run_eagerly = False
        model.train_function = model.train_function if model is ours else None
        model.fit(X, Y, 6, 1, 0)
    assert len(replication.programs(ours)) == 2
    replication.assert_close(ours.get_weights(), plain.get_weights())


# --- where it is refused ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize(
    ("settings", "words"), [(SETTINGS[0], "cannot run eagerly"), (SETTINGS[1], "cannot run uncompiled")]
)
def test_replicas_are_refused(call: str, settings: dict[str, Any], words: str) -> None:
    model = made(2, **settings)
    data = (X,) if "predict" in call else (X, Y)
    with pytest.raises(RuntimeError, match=rf"{words} \(`{as_text(settings)}`\), because its 2 replicas"):
        getattr(model, call)(*data)


@pytest.mark.parametrize("settings", SETTINGS, ids=as_text)
def test_stages_are_refused(settings: dict[str, Any]) -> None:
    model = made(2, **settings)
    model.set_pipeline_stage_assignment("auto", stages=2)
    for call in CALLS:
        data = (X,) if "predict" in call else (X, Y)
        with pytest.raises(RuntimeError, match="because its pipeline stages are compiled"):
            getattr(model, call)(*data)


def test_switching_eager_mode_on_later_is_refused_on_replicas_too() -> None:
    model = made(2)
    model.fit(X, Y, 4, 1, 0)
    model.run_eagerly = True
    with pytest.raises(RuntimeError, match="run eagerly"):
        model.fit(X, Y, 4, 1, 0)


def test_accumulation_is_refused_where_it_matters() -> None:
    model = made(1, run_eagerly=True, steps_per_execution=2)
    model.set_gradient_accumulation_options(2)
    for call in ("fit", "train_on_batch"):
        with pytest.raises(RuntimeError, match="because each update accumulates 2 micro-batches"):
            getattr(model, call)(X, Y)
    assert np.isfinite(model.evaluate(X, Y, verbose=0)[0])


def test_checkpoints_are_refused(tmp_path: Any) -> None:
    model = made(1, run_eagerly=True)
    with pytest.raises(ValueError, match=r"Keras' own loop runs .* Use `keras.callbacks.BackupAndRestore`"):
        model.fit(X, Y, verbose=0, callbacks=[ipu.callbacks.Checkpoint(tmp_path)])
    model.fit(X, Y, verbose=0, callbacks=[keras.callbacks.BackupAndRestore(tmp_path / "backup")])


def test_asynchronous_callbacks_are_named(caplog: pytest.LogCaptureFixture) -> None:
    model = made(1, run_eagerly=True)
    model.set_asynchronous_callbacks(True)
    model.fit(X, Y, verbose=0)
    assert "asynchronous callbacks with run_eagerly=True (Keras calls them once per execution)" in caplog.text
