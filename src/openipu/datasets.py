"""MNIST and CIFAR-10 as plain arrays, even on a machine without a network.

They come from the first of these that is available:

1. `mnist.npz` / `cifar10.npz` (keys x_train, y_train, x_test, y_test) in the folder named by the environment variable
   OPENIPU_DATA;
2. `keras.datasets`: its cache, or else a download, which gives up quickly if there is no network;
3. stand-in data drawn by OpenIPU, with the shapes, types and sizes of the real dataset, and a warning.

OPENIPU_DATA=stand-in goes straight to the stand-in data.
"""

import os
import socket
import threading
import urllib.request
import warnings
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from openipu import _stand_in_data
from openipu import _validate as validate

import numpy as np
from numpy.typing import NDArray

__all__ = ["Dataset", "StandInDataWarning", "cifar10", "mnist"]

Array = NDArray[np.uint8]
Source = Literal["file", "keras", "stand-in"]

_KEYS: Final = ("x_train", "y_train", "x_test", "y_test")
_ANSWER_SECONDS: Final = 3.0  # how long a server may take to answer at all
_READ_SECONDS: Final = 15.0  # how long a download may stall


class StandInDataWarning(UserWarning):
    """The images are drawn by OpenIPU; they are not the real dataset.

    >>> import warnings
    >>> warnings.simplefilter("error", ipu.datasets.StandInDataWarning)  # never train on stand-ins by accident
    """


@dataclass(frozen=True, slots=True, eq=False)
class Dataset:
    """Images (uint8, 0 to 255) and labels (uint8) for training and testing, and where they come from.

    >>> data = ipu.datasets.mnist(train=600, test=100)
    >>> data.x_train.shape, data.y_test.shape
    ((600, 28, 28), (100,))
    """

    name: str
    x_train: Array
    y_train: Array
    x_test: Array
    y_test: Array
    source: Source


@dataclass(frozen=True, slots=True)
class _Spec:
    """What is known about a dataset before it is loaded."""

    name: str
    sizes: tuple[int, int]
    image: tuple[int, ...]
    label: tuple[int, ...]
    cached: str  # its name in the folder where Keras keeps datasets
    url: str  # where Keras downloads it from; used only to see whether the server answers
    draw: Callable[[_stand_in_data.Split, int], tuple[Array, Array]]


_MNIST: Final = _Spec(
    name="mnist",
    sizes=(60_000, 10_000),
    image=(28, 28),
    label=(),
    cached="mnist.npz",
    url="https://storage.googleapis.com/tensorflow/tf-keras-datasets/mnist.npz",
    draw=_stand_in_data.digits,
)
_CIFAR10: Final = _Spec(
    name="cifar10",
    sizes=(50_000, 10_000),
    image=(32, 32, 3),
    label=(1,),
    cached="cifar-10-batches-py-target",
    url="https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz",
    draw=_stand_in_data.shapes,
)


def mnist(train: int | None = None, test: int | None = None) -> Dataset:
    """The handwritten digits: x (60000, 28, 28) and (10000, 28, 28), y (60000,) and (10000,).

    >>> data = ipu.datasets.mnist(train=600, test=100)
    >>> data.x_train.shape, data.x_train.dtype
    ((600, 28, 28), dtype('uint8'))

    Args:
        train: Take only the first `train` training images.
        test: Take only the first `test` test images.
    """
    return _load(_MNIST, train, test)


def cifar10(train: int | None = None, test: int | None = None) -> Dataset:
    """The small colour photographs: x (50000, 32, 32, 3) and (10000, 32, 32, 3), y (50000, 1) and (10000, 1).

    >>> data = ipu.datasets.cifar10(train=500, test=100)
    >>> data.x_train.shape, data.y_train.shape
    ((500, 32, 32, 3), (500, 1))

    Args:
        train: Take only the first `train` training images.
        test: Take only the first `test` test images.
    """
    return _load(_CIFAR10, train, test)


def _load(spec: _Spec, train: int | None, test: int | None) -> Dataset:
    wanted = (
        validate.count("train", train, optional=True, most=spec.sizes[0]) or spec.sizes[0],
        validate.count("test", test, optional=True, most=spec.sizes[1]) or spec.sizes[1],
    )
    folder = os.environ.get("OPENIPU_DATA")
    if folder == "stand-in":
        return _draw(spec, wanted, "OPENIPU_DATA asks for it")
    if folder:
        if not Path(folder).is_dir():
            raise ValueError(
                f"OPENIPU_DATA={folder} is not a folder. Set it to the folder with {spec.name}.npz, or unset it."
            )
        file = Path(folder) / f"{spec.name}.npz"
        if file.exists():
            return _cut(spec, _read(spec, file), wanted, "file")
    try:
        return _cut(spec, _from_keras(spec), wanted, "keras")
    # Keras reports a failed download as a bare Exception. The reason goes into the warning about the stand-in data.
    except Exception as error:
        return _draw(spec, wanted, str(error))


def _read(spec: _Spec, file: Path) -> tuple[Array, ...]:
    """The four arrays of a file, checked."""
    try:
        # Opened here, because NumPy leaves the file open if the archive is broken.
        with file.open("rb") as stream, np.load(stream, allow_pickle=False) as archive:
            missing = [key for key in _KEYS if key not in archive]
            if missing:
                raise ValueError(f"it lacks {', '.join(missing)}")
            arrays = tuple(archive[key] for key in _KEYS)
        return _checked(spec, arrays)
    except (OSError, EOFError, TypeError, AttributeError, ValueError, zipfile.BadZipFile) as error:
        raise ValueError(
            f"{file} is not a readable {spec.name} file: {error}. Replace it with an .npz file with the uint8 arrays "
            f"{', '.join(_KEYS)}, or unset OPENIPU_DATA."
        ) from None


def _checked(spec: _Spec, arrays: tuple[Any, ...]) -> tuple[Array, ...]:
    checked = []
    for key, array in zip(_KEYS, arrays, strict=True):
        images = key.startswith("x")
        expected = spec.image if images else spec.label
        # Files have labels of shape (n,) or (n, 1); both are brought to the shape that Keras returns.
        fits = array.shape[1:] == expected or (not images and array.shape[1:] in ((), (1,)))
        if array.ndim == 0 or not fits:
            raise ValueError(f"{key} has shape {array.shape} where (n, {', '.join(map(str, expected))}) was expected")
        if images and array.dtype != np.uint8:
            raise ValueError(f"{key} has type {array.dtype} where uint8 was expected")
        if not images and not (np.issubdtype(array.dtype, np.integer) and np.isin(array, np.arange(10)).all()):
            raise ValueError(f"{key} has values other than the whole numbers 0 to 9")
        checked.append(array if images else array.astype(np.uint8).reshape(-1, *expected))
    for x, y in ((0, 1), (2, 3)):
        if len(checked[x]) != len(checked[y]):
            raise ValueError(f"{_KEYS[x]} has {len(checked[x])} images, but {_KEYS[y]} has {len(checked[y])} labels")
    return tuple(checked)


def _cut(spec: _Spec, arrays: tuple[Array, ...], wanted: tuple[int, int], source: Source) -> Dataset:
    x_train, y_train, x_test, y_test = arrays
    train, test = wanted
    return Dataset(spec.name, x_train[:train], y_train[:train], x_test[:test], y_test[:test], source)


def _from_keras(spec: _Spec) -> tuple[Array, ...]:
    home = Path(os.environ.get("KERAS_HOME") or Path.home() / ".keras")
    if not (home / "datasets" / spec.cached).exists() and not _answers(spec.url):
        raise ConnectionError("its server did not answer")
    import keras

    with _socket_timeout(_READ_SECONDS):
        (x_train, y_train), (x_test, y_test) = getattr(keras.datasets, spec.name).load_data()
    return _checked(spec, (x_train, y_train, x_test, y_test))


def _answers(url: str) -> bool:
    """Whether the server answers within a few seconds.

    Runs in a thread, because looking up a host name without a network can block for minutes and has no timeout.
    """
    answered = threading.Event()

    def ask() -> None:
        try:
            with urllib.request.urlopen(urllib.request.Request(url, method="HEAD"), timeout=_ANSWER_SECONDS):
                answered.set()
        except OSError:
            pass

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(_ANSWER_SECONDS)
    return answered.is_set()


@contextmanager
def _socket_timeout(seconds: float) -> Iterator[None]:
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(seconds)
    try:
        yield
    finally:
        socket.setdefaulttimeout(before)


def _draw(spec: _Spec, wanted: tuple[int, int], reason: str) -> Dataset:
    message = (
        f"STAND-IN DATA, not {spec.name} ({reason}): accuracies mean nothing. For the real one, set OPENIPU_DATA to a "
        f"folder with {spec.name}.npz."
    )
    warnings.warn(message, StandInDataWarning, stacklevel=4)
    train, test = spec.draw("train", wanted[0]), spec.draw("test", wanted[1])
    return Dataset(spec.name, *train, *test, "stand-in")
