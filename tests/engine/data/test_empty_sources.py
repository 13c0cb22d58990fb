"""Data without any batch: a clear error before anything runs, whatever the source, and the model stays usable."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
from keras import layers

import zoo

pytestmark = zoo.KERAS_WARNINGS

X, Y = zoo.numbers(8)


class Nothing(keras.utils.PyDataset):
    def __len__(self) -> int:
        return 0

    def __getitem__(self, index: int) -> Any:
        raise IndexError(index)


def tensorflow(known: bool) -> Any:
    tf = pytest.importorskip("tensorflow")
    batches = tf.data.Dataset.from_tensor_slices((X, Y)).batch(4)
    return batches.take(0) if known else batches.filter(lambda x, y: False)  # noqa: ARG005


def grain() -> Any:
    return pytest.importorskip("grain").MapDataset.source(np.zeros((0, 6))).batch(2)


def torch() -> Any:
    data = pytest.importorskip("torch.utils.data")
    zeros = pytest.importorskip("torch").zeros
    return data.DataLoader(data.TensorDataset(zeros((0, 6)), zeros((0, 1))), batch_size=2)


SOURCES = {
    "PyDataset": Nothing,
    "PyDataset with workers": lambda: Nothing(workers=2),
    "tf.data of known length": lambda: tensorflow(True),
    "tf.data of unknown length": lambda: tensorflow(False),
    "grain": grain,
    "torch": torch,
    "generator": lambda: (batch for batch in ()),
}


def model(built: bool, steps: int = 2) -> Any:
    with zoo.scope_if(True):
        made = keras.Sequential([keras.Input((6,)), layers.Dense(1)] if built else [layers.Dense(1)])
    made.compile("sgd", "mse", steps_per_execution=steps)
    return made


@pytest.mark.parametrize("built", [True, False])
@pytest.mark.parametrize("name", SOURCES)
def test_a_source_without_batches(name: str, built: bool) -> None:
    words = "at least one batch"
    trained = model(built)
    with pytest.raises(ValueError, match=words):
        trained.fit(SOURCES[name](), verbose=0, shuffle=False)
    for call in (trained.evaluate, trained.predict):
        with pytest.raises(ValueError, match=words):
            call(SOURCES[name](), verbose=0)
    with pytest.raises(ValueError, match=words):
        trained.fit(X, Y, validation_data=SOURCES[name](), verbose=0)
    assert np.isfinite(trained.fit(X, Y, verbose=0).history["loss"]).all()


@pytest.mark.parametrize("built", [True, False])
def test_arrays_without_rows(built: bool) -> None:
    trained, words = model(built), "has 0 samples. Give .*at least one row"
    for call in (trained.fit, trained.evaluate):
        with pytest.raises(ValueError, match=words):
            call(X[:0], Y[:0], verbose=0)
    with pytest.raises(ValueError, match=words):
        trained.predict(X[:0], verbose=0)
    with pytest.raises(ValueError, match=words):
        trained.fit(X, Y, validation_data=(X[:0], Y[:0]), verbose=0)
    with pytest.raises(ValueError, match=words):
        trained.train_on_batch(X[:0], Y[:0])
    assert np.isfinite(trained.train_on_batch(X, Y))


def test_no_rows_in_a_batch_give_no_outputs_as_in_keras() -> None:
    plain = keras.Sequential([keras.Input((6,)), layers.Dense(1)])
    for made in (plain, model(True)):
        assert made.predict_on_batch(X[:0]).shape == (0, 1)
