import time

from openipu import _stand_in_data, datasets

import numpy as np
import pytest

LOADERS = {"mnist": datasets.mnist, "cifar10": datasets.cifar10}
IMAGE = {"mnist": (28, 28), "cifar10": (32, 32, 3)}
LABEL = {"mnist": (), "cifar10": (1,)}

each_dataset = pytest.mark.parametrize("name", ["mnist", "cifar10"])


def arrays(name: str, train: int = 30, test: int = 10) -> dict[str, np.ndarray]:
    """What a good file holds."""
    rng = np.random.default_rng(0)
    return {
        "x_train": rng.integers(0, 256, (train, *IMAGE[name]), dtype=np.uint8),
        "y_train": rng.integers(0, 10, (train, *LABEL[name]), dtype=np.uint8),
        "x_test": rng.integers(0, 256, (test, *IMAGE[name]), dtype=np.uint8),
        "y_test": rng.integers(0, 10, (test, *LABEL[name]), dtype=np.uint8),
    }


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty OPENIPU_DATA, an empty Keras cache, and no server that answers."""
    monkeypatch.setenv("OPENIPU_DATA", str(tmp_path))
    monkeypatch.setenv("KERAS_HOME", str(tmp_path / "keras"))
    monkeypatch.setenv("https_proxy", "http://127.0.0.1:9")
    return tmp_path


# files


@each_dataset
def test_a_file_is_read_as_it_is(name, folder):
    content = arrays(name)
    np.savez(folder / f"{name}.npz", **content)
    loaded = LOADERS[name]()
    assert (loaded.name, loaded.source) == (name, "file")
    for key, array in content.items():
        np.testing.assert_array_equal(getattr(loaded, key), array)


def test_the_first_rows_are_taken(folder):
    content = arrays("mnist")
    np.savez(folder / "mnist.npz", **content)
    loaded = datasets.mnist(train=7, test=3)
    np.testing.assert_array_equal(loaded.x_train, content["x_train"][:7])
    np.testing.assert_array_equal(loaded.y_test, content["y_test"][:3])


def test_labels_of_the_other_shape_become_those_of_keras(folder):
    content = arrays("cifar10")
    flat = {key: array.ravel().astype(np.int64) if key[0] == "y" else array for key, array in content.items()}
    np.savez(folder / "cifar10.npz", **flat)
    loaded = datasets.cifar10()
    np.testing.assert_array_equal(loaded.y_train, content["y_train"])
    assert loaded.y_train.dtype == np.uint8


def broken(key: str, value: np.ndarray) -> dict[str, np.ndarray]:
    return {**arrays("mnist"), key: value}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"x_train": np.zeros(3)}, "lacks y_train, x_test, y_test"),
        (broken("x_test", np.zeros((10, 28, 27), np.uint8)), r"x_test has shape \(10, 28, 27\)"),
        (broken("x_train", np.zeros((30, 28, 28), np.float32)), "x_train has type float32"),
        (broken("y_train", np.zeros(29, np.uint8)), "x_train has 30 images, but y_train has 29 labels"),
        (broken("y_train", np.full(30, 10)), "y_train has values other than the whole numbers 0 to 9"),
        (broken("y_test", np.zeros(10, np.float32)), "y_test has values other than"),
        (broken("y_test", np.uint8(1)), r"y_test has shape \(\)"),
        (broken("y_test", np.array([None] * 10)), "Object arrays cannot be loaded"),
    ],
)
def test_a_wrong_file_is_an_error_that_names_it(folder, content, message):
    np.savez(folder / "mnist.npz", **content)
    with pytest.raises(ValueError, match=message) as error:
        datasets.mnist()
    assert str(folder / "mnist.npz") in str(error.value)
    assert "Replace it" in str(error.value)


@pytest.mark.parametrize("content", [b"", b"not a zip file", b"PK\x03\x04 cut off"])
def test_a_corrupt_file_is_an_error_that_names_it(folder, content):
    (folder / "mnist.npz").write_bytes(content)
    with pytest.raises(ValueError, match=r"mnist\.npz is not a readable mnist file"):
        datasets.mnist()


def test_a_folder_that_is_none_is_an_error(monkeypatch, tmp_path):
    monkeypatch.setenv("OPENIPU_DATA", str(tmp_path / "nowhere"))
    with pytest.raises(ValueError, match="nowhere is not a folder"):
        datasets.mnist()


@pytest.mark.parametrize(("train", "test"), [(0, 1), (60_001, 1), (1, -1), (1, 10_001)])
def test_impossible_sizes_are_refused(train, test):
    with pytest.raises(ValueError, match=r"`(train|test)` is .* Give a whole number from 1 to [16]0000, or None"):
        datasets.mnist(train, test)


# Keras


def test_a_cache_that_keras_refuses_is_reported(folder):
    cache = folder / "keras" / "datasets"
    cache.mkdir(parents=True)
    # Keras compares the checksum with the real file's, and then tries to load that one.
    np.savez(cache / "mnist.npz", **arrays("mnist"))
    with pytest.warns(datasets.StandInDataWarning, match="URL fetch failure|incomplete|hash"):
        loaded = datasets.mnist(10, 10)
    assert loaded.source == "stand-in"


@each_dataset
def test_without_network_the_stand_in_comes_quickly_and_is_announced_once(name, folder, capfd):
    assert not any(folder.iterdir())
    start = time.perf_counter()
    with pytest.warns(datasets.StandInDataWarning, match=f"STAND-IN DATA.*not {name}.*OPENIPU_DATA") as caught:
        loaded = LOADERS[name](20, 10)
    assert time.perf_counter() - start < 8
    assert loaded.source == "stand-in"
    assert len(str(caught[0].message)) < 160
    assert "STAND-IN DATA" not in capfd.readouterr().err, "the warning is enough"


# the stand-in


@each_dataset
def test_the_stand_in_looks_like_the_real_one(name, monkeypatch):
    monkeypatch.setenv("OPENIPU_DATA", "stand-in")
    with pytest.warns(datasets.StandInDataWarning, match="asks for it") as caught:
        loaded = LOADERS[name](300, 100)
    assert caught[0].filename == __file__
    assert loaded.x_train.shape == (300, *IMAGE[name])
    assert loaded.y_train.shape == (300, *LABEL[name])
    assert loaded.x_test.shape == (100, *IMAGE[name])
    assert {array.dtype for array in (loaded.x_train, loaded.y_train, loaded.x_test, loaded.y_test)} == {np.dtype("u1")}
    assert set(loaded.y_train.ravel().tolist()) == set(range(10))
    assert loaded.x_train.max() > 200
    assert not np.array_equal(loaded.x_train[:100], loaded.x_test), "training and test images must differ"


@pytest.mark.parametrize("draw", [_stand_in_data.digits, _stand_in_data.shapes])
def test_the_first_images_do_not_depend_on_how_many_are_drawn(draw):
    few_images, few_labels = draw("train", 1003)
    many_images, many_labels = draw("train", 2005)
    np.testing.assert_array_equal(few_images, many_images[:1003])
    np.testing.assert_array_equal(few_labels, many_labels[:1003])
    assert not np.array_equal(many_images[:1000], many_images[1000:2000]), "blocks must differ"


@pytest.mark.slow
@pytest.mark.parametrize(("draw", "at_least"), [(_stand_in_data.digits, 0.95), (_stand_in_data.shapes, 0.5)])
def test_a_small_cnn_learns_the_stand_in_but_a_linear_model_does_not(draw, at_least):
    import keras

    keras.utils.set_random_seed(0)
    x, y = draw("train", 12_000)
    x_test, y_test = draw("test", 2_000)
    x, x_test = (part.reshape(*part.shape[:3], -1).astype(np.float32) / 255 for part in (x, x_test))
    layers = keras.layers

    def accuracy(*stack: keras.layers.Layer, epochs: int = 4) -> float:
        model = keras.Sequential([keras.Input(x.shape[1:]), *stack, layers.Dense(10, activation="softmax")])
        model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
        model.fit(x, y, epochs=epochs, batch_size=64, verbose=0)
        return float(model.evaluate(x_test, y_test, verbose=0, return_dict=True)["accuracy"])

    cnn = accuracy(
        layers.Conv2D(16, 3, activation="relu"),
        layers.MaxPooling2D(),
        layers.Conv2D(32, 3, activation="relu"),
        layers.MaxPooling2D(),
        layers.Flatten(),
    )
    linear = accuracy(layers.Flatten())
    assert cnn > at_least
    assert linear < cnn - 0.03
