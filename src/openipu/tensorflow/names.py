"""The module names of the original, wherever a script imports them from.

A finder answers for names such as `tensorflow.python.ipu.config` with the modules of OpenIPU themselves, so classes are
the same whichever name they are imported by, and what OpenIPU gains later appears without a change here.
"""

from __future__ import annotations

import importlib
import importlib.abc
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Final

from .replacements import Replacements

ALIASES: Final = {
    "tensorflow.python.ipu": "openipu",
    "tensorflow.ipu": "openipu",
    "tensorflow.estimator": "openipu.estimator",
    "tensorflow.compat.v1.estimator": "openipu.estimator",
    "tensorflow.keras.ipu": "openipu.keras",
    "keras.ipu": "openipu.keras",
    "keras._tf_keras.keras.ipu": "openipu.keras",
    "ipu_tensorflow_addons.keras": "openipu.keras",
    "popdist": "openipu.popdist",
}
"""Names of the original, and the modules that stand for them and for everything below them."""
OPTIMIZERS: Final = "keras.optimizer_v2"
EMPTY: Final = ("ipu_tensorflow_addons", OPTIMIZERS)
"""Packages of the original that only contain others."""
OPTIMIZER_MODULES: Final = dict.fromkeys(
    ("adadelta", "adagrad", "adam", "adamax", "ftrl", "gradient_descent", "nadam", "optimizer_v2", "rmsprop"),
    "keras.optimizers",
) | {"learning_rate_schedule": "keras.optimizers.schedules"}
"""Modules of `keras.optimizer_v2`, and where their classes are now."""


class _Alias(importlib.abc.Loader):
    """Gives a module that exists a second name."""

    def __init__(self, module: ModuleType) -> None:
        self._module, self._spec = module, module.__spec__

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """The module itself."""
        del spec
        return self._module

    def exec_module(self, module: ModuleType) -> None:
        """Undo what Python has done to the module: it stays what it was."""
        module.__spec__ = self._spec


class Finder(importlib.abc.MetaPathFinder):
    """Answers for the names of the original."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The module for a name of the original; None for any other name."""
        del path, target
        if fullname in EMPTY:
            return ModuleSpec(fullname, _Alias(_package(fullname)), is_package=True)
        package, _, last = fullname.rpartition(".")
        if package == OPTIMIZERS and last in OPTIMIZER_MODULES:
            return ModuleSpec(fullname, _Alias(importlib.import_module(OPTIMIZER_MODULES[last])))
        for alias, name in ALIASES.items():
            if fullname == alias or fullname.startswith(f"{alias}."):
                return ModuleSpec(fullname, _Alias(_module(fullname, name + fullname.removeprefix(alias))))
        return None


def _module(asked: str, name: str) -> ModuleType:
    """The module that has a name of the original."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise
    top, *rest = name.split(".")
    found: object = importlib.import_module(top)
    for last in rest:  # `openipu.pipelining_ops` is a module of `openipu.ops`, and some modules have no file
        found = getattr(found, last, None)
    if isinstance(found, ModuleType):
        return found
    raise ModuleNotFoundError(
        f"`{asked}` is not available: OpenIPU has no `{name}`. The page docs/scripts.md says what scripts can use.",
        name=asked,
    )


def _package(name: str) -> ModuleType:
    """A package with nothing in it but modules."""
    package = ModuleType(name, "A package of the original.")
    package.__path__ = []
    return package


def install(replacements: Replacements) -> None:
    """Answer for the names of the original, and put them where scripts reach them as attributes.

    `import tensorflow.compat.v1` makes a second copy of what `tensorflow.compat.v1` was until then, and puts it in that
    place. This happens here, before anything in it is replaced, so that scripts find the same one both ways.
    """
    finder = Finder()
    replacements.put(sys, "meta_path", [finder, *sys.meta_path])
    for alias in (*ALIASES, OPTIMIZERS):
        parent, _, last = alias.rpartition(".")
        if parent and parent not in EMPTY:
            owner = importlib.import_module(parent)
            replacements.put(owner, last, None)  # before the import, which sets it too
            setattr(owner, last, importlib.import_module(alias))


def forget() -> None:
    """Let Python forget the names."""
    for name in list(sys.modules):
        if any(name == alias or name.startswith(f"{alias}.") for alias in (*ALIASES, *EMPTY)):
            del sys.modules[name]
