"""`tf.keras.datasets` without a network.

MNIST and CIFAR-10 come from `openipu.datasets`. The others come from the files that Keras would download, if they are
in the folder OPENIPU_DATA.
"""

from __future__ import annotations

import functools
import importlib
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from openipu import datasets

from .replacements import Replacements

KERAS: Final = ("keras", "keras._tf_keras.keras", "tensorflow.keras")
"""The names under which scripts reach Keras' datasets; each has its own copy of the functions' names."""
OURS: Final[dict[str, Callable[[], datasets.Dataset]]] = {"mnist": datasets.mnist, "cifar10": datasets.cifar10}
OTHERS: Final = ("boston_housing", "california_housing", "cifar100", "fashion_mnist", "imdb", "reuters")

_local = threading.local()


def install(replacements: Replacements) -> None:
    """Let Keras' datasets be read from files."""
    for prefix in KERAS:
        for name, load in OURS.items():
            module = importlib.import_module(f"{prefix}.datasets.{name}")
            replacements.put(module, "load_data", _loader(name, load, module.load_data))
    for name in OTHERS:
        source = sys.modules[importlib.import_module(f"keras.datasets.{name}").load_data.__module__]
        replacements.put(source, "get_file", functools.partial(_file, name, vars(source)["get_file"]))


def _loader(name: str, load: Callable[[], datasets.Dataset], original: Callable[..., Any]) -> Callable[..., Any]:
    def load_data(*args: Any, **kwargs: Any) -> Any:
        if getattr(_local, "loading", False):  # `openipu.datasets` itself asks Keras
            return original(*args, **kwargs)
        _local.loading = True
        try:
            found = load()
        finally:
            _local.loading = False
        return (found.x_train, found.y_train), (found.x_test, found.y_test)

    load_data.__doc__ = f"The dataset {name}, from OPENIPU_DATA or from where Keras finds it."
    return load_data


def _file(name: str, original: Callable[..., Any], fname: str, *args: Any, **kwargs: Any) -> Any:
    folder = os.environ.get("OPENIPU_DATA", "")
    if folder and (Path(folder) / fname).exists():
        return str(Path(folder) / fname)
    try:
        return original(fname, *args, **kwargs)
    # Keras reports a failed download as a bare Exception.
    except Exception as error:
        raise FileNotFoundError(
            f"The dataset {name} could not be loaded: {error}. Put its file {fname} into a folder, and set "
            "OPENIPU_DATA to that folder."
        ) from None
