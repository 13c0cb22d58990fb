"""Integer labels that are not among the model's classes: named before training, without false alarms."""

from __future__ import annotations

import timeit
from typing import Any

import keras
import numpy as np
import pytest
from keras import layers

import replication
import zoo

pytestmark = zoo.KERAS_WARNINGS

SPARSE = "sparse_categorical_crossentropy"
CLASSES = 4
X = np.random.default_rng(0).normal(size=(12, 6)).astype("float32")
GOOD = np.arange(12) % CLASSES


@pytest.fixture(autouse=True, scope="module")
def _systems() -> None:
    replication.configure_all()


def flat() -> keras.Model:
    return keras.Sequential([keras.Input((6,)), layers.Dense(CLASSES, "softmax")])


class Subclassed(keras.Model):
    def __init__(self) -> None:
        super().__init__()
        self.head = layers.Dense(CLASSES)

    def call(self, x: Any) -> Any:
        return self.head(x)


def two_heads(kind: type) -> keras.Model:
    """Ten classes under "a", four under "b"."""
    inputs = keras.Input((6,))
    a, b = layers.Dense(10, "softmax", name="a")(inputs), layers.Dense(CLASSES, "softmax", name="b")(inputs)
    return keras.Model(inputs, {"a": a, "b": b} if kind is dict else [a, b])


def pixels() -> keras.Model:
    return keras.Sequential([keras.Input((2, 3, 1)), layers.Conv2D(CLASSES, 1, activation="softmax")])


def made(make: Any = flat, loss: Any = SPARSE, replicas: int = 1, **settings: Any) -> Any:
    keras.utils.set_random_seed(1)
    with replication.strategy(replicas).scope():
        model = make()
    model.compile("sgd", loss, **settings)
    return model


def labels(value: Any, row: int = 5, dtype: str = "int64") -> np.ndarray:
    y = GOOD.astype(dtype)
    y[row] = value
    return y


def refused(model: Any, x: Any, y: Any, words: str, call: str = "fit", **settings: Any) -> None:
    before = model.get_weights()
    with pytest.raises(ValueError, match=words):
        getattr(model, call)(x, y, batch_size=4, verbose=0, **settings)
    after = model.get_weights()
    assert all(np.array_equal(a, b) for a, b in zip(before, after, strict=False)), "it trained first"


# --- what is found ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "dtype"), [(-1, "int64"), (CLASSES, "int32"), (2**40, "int64"), (200, "uint8"), (-128, "int8")]
)
def test_the_first_bad_row_is_named(value: int, dtype: str) -> None:
    y = labels(value, dtype=dtype)
    y[7] = y[5]
    refused(made(), X, y, rf"label in row 5 is {value}, .* 4 classes: labels must be 0 to 3\. .*ignore_class")


@pytest.mark.parametrize("shape", [(12,), (12, 1)])
@pytest.mark.parametrize("make", [flat, Subclassed])
@pytest.mark.parametrize("replicas", [1, 2])
def test_any_model_and_number_of_replicas(make: Any, shape: tuple[int, ...], replicas: int) -> None:
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=make is Subclassed)
    model = made(make, loss, replicas)
    refused(model, X, labels(9).reshape(shape), "label in row 5 is 9")
    assert np.isfinite(model.fit(X, GOOD.reshape(shape), batch_size=4, verbose=0).history["loss"]).all()
    refused(model, X, labels(9).reshape(shape), "label in row 5 is 9")


def test_stages() -> None:
    model = made(lambda: keras.Sequential([keras.Input((6,)), layers.Dense(5), layers.Dense(CLASSES)]), replicas=2)
    model.set_pipeline_stage_assignment([0, 1])
    model.set_pipelining_options(gradient_accumulation_steps_per_replica=4)
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True), steps_per_execution=4)
    refused(model, X, labels(4), "label in row 5 is 4")


def test_evaluation_and_validation() -> None:
    model = made()
    refused(model, X, labels(4), "label in row 5 of the data to evaluate is 4", "evaluate")
    with pytest.raises(ValueError, match="label in row 5 of the data to evaluate is 4"):
        model.fit(X, GOOD, verbose=0, validation_data=(X, labels(4)))
    with pytest.raises(ValueError, match="label in row 1 of the data to evaluate is 7"):
        model.fit(X, labels(7, 9), verbose=0, validation_split=4 / 12)


@pytest.mark.parametrize("kind", [dict, list])
@pytest.mark.parametrize("named", [True, False])
def test_each_output_has_its_own_classes(kind: type, named: bool) -> None:
    """A label of 7 is right for one output and wrong for the other."""
    losses = {"a": SPARSE, "b": SPARSE} if named or kind is dict else [SPARSE, SPARSE]
    model = made(lambda: two_heads(kind), losses)

    def data(a: Any, b: Any) -> Any:
        return {"a": a, "b": b} if named or kind is dict else [a, b]

    refused(model, X, data(labels(7), labels(7, 8)), r"label in row 8 is 7, .*labels \[.*\] belong to has 4 classes")
    refused(model, X, data(labels(10), GOOD), r"label in row 5 is 10, .*labels \[.*\] belong to has 10 classes")
    model.fit(X, data(labels(7), GOOD), batch_size=4, verbose=0)


def test_outputs_without_a_loss() -> None:
    model = made(lambda: two_heads(list), [None, SPARSE])
    refused(model, X, labels(7), "label in row 5 is 7, .* 4 classes")
    model = made(lambda: two_heads(dict), {"a": SPARSE, "b": None})
    model.fit(X, {"a": labels(7), "b": labels(99)}, batch_size=4, verbose=0)


def test_maps_of_labels() -> None:
    images, maps = np.ones((5, 2, 3, 1), "float32"), np.ones((5, 2, 3), "uint8")
    maps[3, 1, 2] = 255
    refused(made(pixels), images, maps, r"label in row 3 \(at \[3, 1, 2\]\) is 255")
    ignoring = keras.losses.SparseCategoricalCrossentropy(ignore_class=255)
    model = made(pixels, ignoring)
    model.fit(images, maps, verbose=0)
    maps[4, 0, 0] = 7
    refused(model, images, maps, r"label in row 4 \(at \[4, 0, 0\]\) is 7")


def test_crossentropy_by_its_short_name() -> None:
    refused(made(loss="crossentropy"), X, labels(4)[:, None], "label in row 5 is 4")


def test_a_compute_loss_that_passes_labels_on() -> None:
    class Own(Subclassed):
        def compute_loss(self, x: Any = None, y: Any = None, *args: Any, **kwargs: Any) -> Any:
            return 2 * super().compute_loss(x, y, *args, **kwargs)

    refused(made(Own), X, labels(4), "label in row 5 is 4")


def test_arrays_that_are_streamed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("openipu.engine.data.make_feed.RESIDENT_SHARE", 0.0)
    refused(made(), X, labels(4), "label in row 5 is 4")


# --- what is left alone ----------------------------------------------------------------------------------------------


def shifted(y_true: Any, y_pred: Any) -> Any:
    return keras.losses.sparse_categorical_crossentropy(y_true - 1, y_pred)


class Shifted(keras.losses.SparseCategoricalCrossentropy):
    def call(self, y_true: Any, y_pred: Any) -> Any:
        return super().call(y_true - 1, y_pred)


class ShiftedInStep(Subclassed):
    def train_step(self, state: Any, data: Any) -> Any:
        return super().train_step(state, (data[0], data[1] - 1))


class ShiftedInLoss(Subclassed):
    def compute_loss(self, x: Any = None, y: Any = None, *args: Any, **kwargs: Any) -> Any:
        return super().compute_loss(x, y - 1, *args, **kwargs)


HARMLESS: dict[str, tuple[Any, Any]] = {
    "a loss function of one's own": (flat, shifted),
    "a loss class of one's own": (flat, Shifted()),
    "a train_step of one's own": (ShiftedInStep, SPARSE),
    "a compute_loss of one's own": (ShiftedInLoss, SPARSE),
    "another loss": (lambda: keras.Sequential([keras.Input((6,)), layers.Dense(1)]), "mse"),
}


@pytest.mark.parametrize("name", HARMLESS)
def test_labels_that_something_else_becomes_of(name: str) -> None:
    make, loss = HARMLESS[name]
    made(make, loss).fit(X, GOOD + 1, batch_size=4, verbose=0)


def test_ignored_labels() -> None:
    made(loss=keras.losses.SparseCategoricalCrossentropy(ignore_class=-1)).fit(X, labels(-1), verbose=0)


def test_labels_without_weight() -> None:
    weight = np.ones(12)
    weight[5] = 0
    for y, w in ((labels(-1), weight), (labels(-1)[:, None], weight), (labels(-1)[:, None], weight[:, None])):
        made().fit(X, y, sample_weight=w, batch_size=4, verbose=0)
    made().fit(X, labels(-1), class_weight={-1: 0.0, **dict.fromkeys(range(CLASSES), 1.0)}, batch_size=4, verbose=0)
    refused(made(), X, labels(-1, 6), "label in row 6 is -1", sample_weight=weight)


def test_masked_labels() -> None:
    def make() -> keras.Model:
        tokens = keras.Input((3,), dtype="int32")
        x = layers.LSTM(4, return_sequences=True)(layers.Embedding(9, 4, mask_zero=True)(tokens))
        return keras.Model(tokens, layers.Dense(CLASSES, "softmax")(x))

    tokens = np.array([[1, 2, 0], [3, 0, 0]])
    made(make).fit(tokens, np.where(tokens == 0, -1, 1), verbose=0)


def test_other_kinds_of_data() -> None:
    model, y = made(), labels(4)
    model.fit(X, y.astype("float32"), verbose=0)
    model.fit(replication.Batches(X, y, 4), verbose=0)
    model.train_on_batch(X, y)
    model.predict(X, verbose=0)


def test_a_model_that_cannot_be_traced_alone() -> None:
    """The labels are not checked, and the model trains."""

    class Training(layers.Layer):
        strict = False

        def call(self, x: Any, training: bool = False) -> Any:
            if self.strict and not training:
                raise RuntimeError("only for training")
            return x

    model = made(lambda: keras.Sequential([keras.Input((6,)), Training(), layers.Dense(CLASSES, "softmax")]))
    model.fit(X, GOOD, batch_size=4, verbose=0)
    model.layers[0].strict = True
    model.fit(X, labels(4), batch_size=4, verbose=0)


def test_it_can_be_switched_off_and_that_is_saved(tmp_path: Any) -> None:
    model = made()
    model.fit(X, GOOD, batch_size=4, verbose=0)
    model.set_label_check(False)
    model.fit(X, labels(-1), batch_size=4, verbose=0)
    assert len(replication.programs(model)) == 1, "nothing is compiled again"
    model.save(tmp_path / "model.keras")
    with replication.strategy(1).scope():
        loaded = keras.saving.load_model(tmp_path / "model.keras")
    loaded.fit(X, labels(-1), batch_size=4, verbose=0)
    loaded.set_label_check()
    refused(loaded, X, labels(-1), "label in row 5 is -1")


# --- what it costs ---------------------------------------------------------------------------------------------------


def test_it_is_cheap() -> None:
    """It takes less time than to find the classes of all labels by sorting, with a class to ignore as well."""
    from openipu.engine.fit.labels import LabelCheck

    y = np.zeros(5_000_000, "int32")
    y[::2] = 255
    x = np.zeros((len(y), 6), "float32")
    for loss, data in ((SPARSE, y % 2), (keras.losses.SparseCategoricalCrossentropy(ignore_class=255), y)):
        model = made(loss=loss)
        model.fit(X, GOOD, verbose=0)
        check = LabelCheck(model)
        checking = min(timeit.repeat(lambda: check.check("train", (x, data), 32), number=1, repeat=5))  # noqa: B023
        assert checking < min(timeit.repeat(lambda: np.unique(data), number=1, repeat=5))  # noqa: B023
