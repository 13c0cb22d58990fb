"""Every kind of data source gives plain Keras' numbers, resident or streamed."""
# Keras decides the arguments of hooks, steps and metrics.
# ruff: noqa: ARG002, ARG005

import gc
import random
import threading
import warnings

from openipu import data as ipu_data
from openipu.engine.data import make_feed, sources

import jax
import keras
import numpy as np
import pytest

import zoo

pytestmark = [zoo.KERAS_WARNINGS, pytest.mark.filterwarnings("ignore:Your input ran out of data:UserWarning")]

X, Y = zoo.table(75)
BATCHES = [(X[i : i + 8], Y[i : i + 8]) for i in range(0, 75, 8)]


def results(source, steps_per_execution, seed=7, case="dense", **settings):
    """Histories and weights after `fit` on `source()`; plain Keras for None."""
    model = zoo.make(zoo.CASES[case], steps_per_execution, seed)
    random.seed(seed)
    settings = {"epochs": 3, "verbose": 0, **settings}
    history = model.fit(source(), **settings).history
    return history, model.get_weights()


def assert_like_keras(source, steps_per_execution=4, **settings):
    expected = results(source, None, **settings)
    actual = results(source, steps_per_execution, **settings)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), actual, expected)


# --- arrays ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [np.asarray, jax.numpy.asarray], ids=["numpy", "jax"])
def test_arrays(kind):
    model = zoo.make(zoo.CASES["dense"], 4)
    plain = zoo.make(zoo.CASES["dense"], None)
    for m in (plain, model):
        keras.utils.set_random_seed(1)
        m.fit(kind(X), kind(Y), batch_size=8, epochs=2, verbose=0)
    for a, b in zip(model.get_weights(), plain.get_weights(), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", ["float64", "float16", "uint8", "int64", "bool", "int8"])
def test_dtypes_become_what_keras_makes_of_them(dtype):
    x = (4 * X).astype("uint8" if dtype == "uint8" else dtype)
    targets = Y.astype("int64")

    def run(model):
        history = model.fit(x, targets, batch_size=8, epochs=2, verbose=0).history
        return history, model.get_weights(), model.predict(x, batch_size=8, verbose=0)

    expected = run(zoo.make(zoo.CASES["dense"], None))
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        actual = run(zoo.make(zoo.CASES["dense"], 4))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), actual, expected)


def test_uint8_pictures_stay_bytes_on_the_device():
    source = make_feed.make_feed(_place(), 2, np.zeros((40, 5), np.uint8), np.zeros(40, np.int64), batch_size=8).source
    assert jax.tree.leaves(source.resident)[0].dtype == np.uint8


def test_resident_and_streamed_arrays_are_the_same(monkeypatch):
    kinds = []

    def run():
        model = zoo.make(zoo.CASES["batchnorm_dropout"], 4)
        fits = [model.fit(X, Y, 8, 2, 0, shuffle=s, validation_split=0.2).history for s in (True, "batch", False)]
        kinds.append(type(make_feed.make_feed(_place(), 4, X, Y).source))
        return fits, model.evaluate(X, Y, 8, 0), model.predict(X, 8, 0), model.get_weights()

    resident = run()
    monkeypatch.setattr(make_feed, "RESIDENT_SHARE", 0.0)
    streamed = run()
    assert kinds == [sources.ArraySource, sources.StreamSource]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), streamed, resident)


def _place():
    return zoo.make(zoo.CASES["dense"], 1)._ipu_session.place("train")


def test_slabs_that_would_not_fit_are_made_narrower(monkeypatch):
    monkeypatch.setattr(make_feed, "RESIDENT_SHARE", 0.0)
    monkeypatch.setattr(make_feed, "free_memory", lambda device: 10 * 3 * (8 * 6 * 4 + 8 * 4))
    fed = make_feed.make_feed(_place(), 9, X, Y, batch_size=8)
    assert fed.width == 3
    assert [slab.steps for slab in fed.epoch()] == [3, 3, 3, 1]
    # Updates stay whole, even if one of them does not fit.
    assert make_feed.make_feed(_place(), 8, X, Y, batch_size=8, accumulated=2).width == 2
    assert make_feed.make_feed(_place(), 8, X, Y, batch_size=8, accumulated=4).width == 4


@pytest.mark.parametrize("steps_per_execution", [1, 2, 3, 4, 5, 9, 10, 11])
def test_arrays_hand_out_every_row_once(steps_per_execution):
    """Also if the last, smaller batch is alone in its slab."""
    fed = make_feed.make_feed(_place(), steps_per_execution, X, Y, batch_size=8, shuffle=True)
    rows = []
    for slab in fed.epoch():
        rows += np.asarray(slab.body)[: slab.count].ravel().tolist()
        rows += [] if slab.tail is None else np.asarray(slab.tail).tolist()
    assert sorted(rows) == list(range(len(X)))


@pytest.mark.parametrize("structure", ["dict", "tuple", "list"])
def test_nested_inputs(structure):
    def data():
        left, right = X[:, :4], X[:, 4:]
        return {"dict": {"left": left, "right": right}, "tuple": (left, right), "list": [left, right]}[structure]

    def run(steps):
        keras.utils.set_random_seed(3)
        with zoo.scope_if(steps is not None):
            left, right = keras.Input((4,), name="left"), keras.Input((2,), name="right")
            out = keras.layers.Dense(1)(keras.layers.Concatenate()([left, right]))
            shape = {"dict": {"left": left, "right": right}, "tuple": (left, right), "list": [left, right]}
            model = keras.Model(shape[structure], out)
            model.compile("sgd", "mse", steps_per_execution=steps or 1)
        history = model.fit(data(), X.sum(1), batch_size=8, epochs=2, verbose=0).history
        return history, model.predict(data(), batch_size=8, verbose=0)

    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), run(4), run(None))


def test_scipy_sparse_matrices():
    sparse = pytest.importorskip("scipy.sparse")
    x = sparse.csr_matrix(np.where(X > 1, X, 0))

    def run(steps):
        model = zoo.make(zoo.CASES["dense"], steps)
        history = model.fit(x, Y, batch_size=8, epochs=2, verbose=0, shuffle=False).history
        return history, model.predict(x, batch_size=8, verbose=0)

    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), run(4), run(None))


def test_pandas_frames():
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame(X, columns=list("abcdef"))

    def run(steps):
        model = zoo.make(zoo.CASES["dense"], steps)
        return model.fit(frame, pandas.Series(Y), batch_size=8, epochs=2, verbose=0).history

    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), run(4), run(None))


# --- generators ------------------------------------------------------------------------------------------------------


def generator():
    yield from BATCHES


def endless():
    while True:
        yield from BATCHES


def test_a_generator_is_read_once():
    assert_like_keras(generator, epochs=1, shuffle=False)


@pytest.mark.parametrize("steps_per_execution", [1, 3, 20])
def test_an_endless_generator_goes_on_over_epochs(steps_per_execution):
    assert_like_keras(endless, steps_per_execution, steps_per_epoch=7, shuffle=False)


def test_generators_for_validation():
    def run(steps):
        model = zoo.make(zoo.CASES["dense"], steps)
        full = BATCHES[:9]

        def validation():
            while True:
                yield from full

        return model.fit(X, Y, 8, 3, 0, validation_data=validation(), validation_steps=9).history

    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), run(4), run(None))


def test_predict_from_a_generator_in_order():
    model = zoo.make(zoo.CASES["dense"], 4)
    streamed = model.predict(((x,) for x, _ in BATCHES), verbose=0)
    np.testing.assert_allclose(streamed, model.predict(X, batch_size=8, verbose=0), rtol=1e-6)


# --- tf.data ---------------------------------------------------------------------------------------------------------


def tf_dataset(tf):
    return tf.data.Dataset.from_tensor_slices((X, Y))


TF = {
    "finite with remainder": (lambda tf: tf_dataset(tf).batch(8), {}),
    "finite, remainder dropped": (lambda tf: tf_dataset(tf).batch(8, drop_remainder=True), {}),
    "endless": (lambda tf: tf_dataset(tf).batch(8).repeat(), {"steps_per_epoch": 7}),
    "repeated three times": (lambda tf: tf_dataset(tf).batch(8).repeat(3), {"steps_per_epoch": 10}),
    "unknown length, filtered": (lambda tf: tf_dataset(tf).batch(8).filter(lambda x, y: y[0] < 2), {}),
    "unknown length, generator": (
        lambda tf: tf.data.Dataset.from_generator(
            generator, output_signature=(tf.TensorSpec((None, 6)), tf.TensorSpec((None,), "int32"))
        ),
        {},
    ),
    "shuffled each epoch": (lambda tf: tf_dataset(tf).shuffle(75, seed=3).batch(8), {}),
    "prefetched": (lambda tf: tf_dataset(tf).batch(8).prefetch(2), {"steps_per_epoch": 5}),
    "class_weight": (lambda tf: tf_dataset(tf).batch(8), {"class_weight": {0: 1.0, 1: 2.0, 2: 0.5}}),
}


@pytest.mark.parametrize("name", TF)
def test_tf_data(name):
    tf = pytest.importorskip("tensorflow")
    make, settings = TF[name]
    assert_like_keras(lambda: make(tf), shuffle=False, **settings)


def test_a_second_fit_on_a_shuffled_dataset_keeps_keras_order():
    tf = pytest.importorskip("tensorflow")

    def run(steps):
        model = zoo.make(zoo.CASES["dense"], steps)
        source = tf_dataset(tf).shuffle(75, seed=3).batch(8)
        return [model.fit(source, epochs=2, verbose=0, shuffle=False).history for _ in range(2)]

    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), run(4), run(None))


# --- grain, torch ----------------------------------------------------------------------------------------------------


class Rows:
    def __len__(self):
        return len(X)

    def __getitem__(self, index):
        return X[index], Y[index]


GRAIN = {
    "MapDataset": lambda grain: grain.MapDataset.source(Rows()).batch(8),
    "MapDataset shuffled": lambda grain: grain.MapDataset.source(Rows()).shuffle(seed=2).batch(8),
    "IterDataset": lambda grain: grain.MapDataset.source(Rows()).to_iter_dataset().batch(8),
    "DataLoader": lambda grain: grain.DataLoader(
        data_source=Rows(),
        sampler=grain.samplers.IndexSampler(num_records=75, num_epochs=1, shuffle=False),
        operations=[grain.transforms.Batch(8)],
        worker_count=0,
    ),
}


@pytest.mark.parametrize("name", GRAIN)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_grain(name):
    grain = pytest.importorskip("grain")
    assert_like_keras(lambda: GRAIN[name](grain), shuffle=False)


@pytest.mark.parametrize("shuffle", [False, True])
def test_torch_data_loader(shuffle):
    torch = pytest.importorskip("torch")

    def loader():
        torch.manual_seed(5)
        rows = torch.utils.data.TensorDataset(torch.from_numpy(X), torch.from_numpy(Y))
        return torch.utils.data.DataLoader(rows, batch_size=8, shuffle=shuffle)

    assert_like_keras(loader, shuffle=False)


@pytest.mark.parametrize("steps_per_execution", [1, 3, 4])
def test_a_data_loader_with_its_own_generator_is_read_as_far_as_keras_reads_it(steps_per_execution):
    """Reading beyond the last batch would draw one more order: 72 rows are 9 whole batches."""
    torch = pytest.importorskip("torch")

    def loader():
        rows = torch.utils.data.TensorDataset(torch.from_numpy(X[:72]), torch.from_numpy(Y[:72]))
        own = torch.Generator().manual_seed(2)
        return torch.utils.data.DataLoader(rows, batch_size=8, shuffle=True, generator=own)

    assert_like_keras(loader, steps_per_execution, shuffle=False)


# --- PyDataset -------------------------------------------------------------------------------------------------------


class Batches(keras.utils.PyDataset):
    """Counts what Keras calls; with a length or without."""

    def __init__(self, length=10, **settings):
        super().__init__(**settings)
        self.length, self.begun, self.ended = length, 0, 0

    @property
    def num_batches(self):
        return self.length

    def __getitem__(self, index):
        return BATCHES[index % 9] if self.length is None else BATCHES[index]

    def on_epoch_begin(self):
        self.begun += 1

    def on_epoch_end(self):
        self.ended += 1


@pytest.mark.parametrize("shuffle", [False, True])
def test_py_dataset(shuffle):
    assert_like_keras(Batches, shuffle=shuffle)


class ShuffledRows(keras.utils.PyDataset):
    """Draws a new order of rows when an epoch begins."""

    def __init__(self):
        super().__init__()
        self.order = np.arange(75)

    def __len__(self):
        return 10

    def __getitem__(self, index):
        rows = self.order[8 * index : 8 * index + 8]
        return X[rows], Y[rows]

    def on_epoch_begin(self):
        self.order = np.random.permutation(75)


@pytest.mark.parametrize("shuffle", [False, True])
def test_a_py_dataset_that_shuffles_when_an_epoch_begins(shuffle):
    """The first batch is not one of the order before, though one was read to learn its size."""

    def run(steps_per_execution):
        model = zoo.make(zoo.CASES["dense"], steps_per_execution)
        model.evaluate(X, Y, verbose=0)  # builds all there is, for which plain Keras would begin one more epoch
        keras.utils.set_random_seed(3)
        return model.fit(ShuffledRows(), epochs=2, verbose=0, shuffle=shuffle).history, model.get_weights()

    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), run(4), run(None))


def test_py_dataset_with_workers():
    plain = results(Batches, 4, shuffle=False)
    jax.tree.map(np.testing.assert_array_equal, results(lambda: Batches(workers=3), 4, shuffle=False), plain)
    # A model that has to see a batch before it is built.
    values = [(b[0], b[0].sum(1, keepdims=True)) for b in BATCHES]

    class Values(Batches):
        def __getitem__(self, index):
            return values[index]

    alone, helped = (results(lambda w=w: Values(workers=w), 4, case="subclassed", shuffle=False) for w in (1, 3))
    jax.tree.map(np.testing.assert_array_equal, helped, alone)


@pytest.mark.parametrize("workers", [1, 3])
def test_endless_py_dataset(workers):
    expected = results(lambda: Batches(None), None, shuffle=False, steps_per_epoch=7)
    actual = results(lambda: Batches(None, workers=workers), 4, shuffle=False, steps_per_epoch=7)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), actual, expected)


def test_py_dataset_hears_of_epochs():
    made = []
    results(lambda: made.append(Batches()) or made[0], 4, shuffle=False)
    assert (made[0].begun, made[0].ended) == (3, 3)


def test_workers_end_with_training():
    class Stop(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            self.model.stop_training = True

    results(lambda: Batches(None, workers=3), 2, shuffle=False, callbacks=[Stop()], steps_per_epoch=100)
    gc.collect()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("Worker_")]


def test_openipu_repeat():
    assert_like_keras(lambda: ipu_data.repeat(X, Y, batch_size=8, shuffle=True), steps_per_epoch=7, shuffle=False)


# --- memory that is used again ---------------------------------------------------------------------------------------


class Refilled(keras.utils.PyDataset):
    def __init__(self):
        super().__init__()
        self.x, self.y = np.empty_like(X[:8]), np.empty_like(Y[:8])

    def __len__(self):
        return 9

    def __getitem__(self, index):
        self.x[:], self.y[:] = BATCHES[index]
        return self.x, self.y


@pytest.mark.parametrize("steps_per_execution", [1, 4])
def test_a_source_may_use_the_memory_of_one_batch_for_the_next(steps_per_execution):
    """Plain Keras is given other arrays each time: it may still be reading a batch while the next one is made."""
    expected = results(lambda: (batch for batch in BATCHES[:9]), None, epochs=1, shuffle=False)
    actual = results(Refilled, steps_per_execution, epochs=1, shuffle=False)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), actual, expected)
    model = zoo.make(zoo.CASES["dense"], steps_per_execution)
    np.testing.assert_allclose(
        model.predict(Refilled(), verbose=0), model.predict(X[:72], verbose=0), rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize("offset", [0, 16], ids=["aligned", "not aligned"])
@pytest.mark.parametrize("moment", ["on_epoch_begin", "on_epoch_end"])
def test_arrays_that_callbacks_change_in_place(moment, offset):
    """JAX uses memory that is aligned to 64 bytes as it is, and copies other memory."""

    def run(steps_per_execution):
        raw = np.zeros(X.nbytes + 128, np.uint8)
        start = -raw.ctypes.data % 64 + offset
        x = raw[start : start + X.nbytes].view(np.float32).reshape(X.shape)
        x[:] = X

        def change(epoch, _logs=None):
            x[:] = np.roll(x, 1, 0) * (1 + epoch)

        model = zoo.make(zoo.CASES["dense"], steps_per_execution)
        callback = keras.callbacks.LambdaCallback(**{moment: change})
        settings = {"validation_data": (x, Y), "callbacks": [callback], "verbose": 0}
        return model.fit(x, Y, batch_size=8, epochs=3, **settings).history, model.get_weights()

    expected, actual = run(None), run(4)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), actual, expected)


def test_a_change_of_large_arrays_is_seen_in_rows_from_all_over():
    x = np.zeros((1000, 1000), np.float32)
    before = sources._sample((x, None))
    assert sum(map(len, before)) <= sources.SAMPLED
    x[:] = np.arange(1000)[:, None]
    assert sources._sample((x, None)) != before


# --- where the last partial batch falls ------------------------------------------------------------------------------


@pytest.mark.parametrize("steps_per_execution", [1, 2, 3, 4, 5, 9, 10, 11])
def test_a_remainder_anywhere_in_an_execution(steps_per_execution):
    assert_like_keras(generator, steps_per_execution, epochs=1, shuffle=False)


def test_batches_of_changing_shape_run_in_their_order():
    """Sequences of several lengths, as a bucketing pipeline gives them: one program per shape, as in Keras."""
    rng = np.random.default_rng(0)
    lengths = [5, 5, 5, 3, 3, 5, 4, 4, 4, 4, 3]
    shapes = [((4, n, 3), (4, 1)) for n in lengths]
    batches = [tuple(rng.normal(size=shape).astype("float32") for shape in pair) for pair in shapes]

    def run(steps):
        keras.utils.set_random_seed(3)
        with zoo.scope_if(steps is not None):
            model = keras.Sequential([keras.Input((None, 3)), keras.layers.GRU(4), keras.layers.Dense(1)])
            model.compile("sgd", "mse", steps_per_execution=steps or 1)
        history = model.fit((b for b in batches), verbose=0, shuffle=False).history
        predictions = model.predict(((x,) for x, _ in batches), verbose=0)
        return history, predictions, model.get_weights()

    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), run(4), run(None))
