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


class OneEmptyInput(keras.utils.PyDataset):
    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> Any:
        return (np.full((4, 3), index, "float32"), np.ones((4, 0), "float32")), np.ones((4, 1), "float32")


def test_inputs_without_features_can_be_streamed() -> None:
    found = []
    for ours in (False, True):
        keras.utils.set_random_seed(1)
        with zoo.scope_if(ours):
            inputs = keras.Input((3,)), keras.Input((0,))
            model = keras.Model(inputs, keras.layers.Dense(1)(keras.layers.Concatenate()(inputs)))
            model.compile("sgd", "mse", steps_per_execution=2)
        found.append(
            [
                model.fit(OneEmptyInput(), verbose=0, shuffle=False).history["loss"],
                model.evaluate(OneEmptyInput(), verbose=0),
            ]
        )
    np.testing.assert_allclose(found[1][0], found[0][0], rtol=1e-5)
    np.testing.assert_allclose(found[1][1], found[0][1], rtol=1e-5)
