"""`tf.function`, iterators, outfeeds and variables of TensorFlow in programs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

from openipu.engine.devices.current_system import open_strategies
from openipu.engine.program.gradient_marks import resolved
from openipu.engine.program.program_trace import current
from openipu.engine.types import Tree
from openipu.ipu_infeed_queue import IPUInfeedQueue, IPUIterator
from openipu.ipu_outfeed_queue import IPUOutfeedQueue, IPUOutfeedQueueIterator

import jax
import keras
import numpy as np
import tensorflow as tf

from .control_flow import converted
from .replacements import Replacements
from .values import any_foreign, being_traced, where

_local = threading.local()


def install(replacements: Replacements) -> None:
    """Let TensorFlow's functions and datasets take part in programs."""
    function = type(tf.function(lambda: None))
    replacements.put(function, "__call__", _call(vars(function)["__call__"]))
    dataset = next(kind for kind in tf.data.Dataset.__mro__ if "__iter__" in vars(kind))
    replacements.put(dataset, "__iter__", _iter(vars(dataset)["__iter__"]))
    for owner, name in ((IPUOutfeedQueue, "dequeue"), (IPUOutfeedQueueIterator, "__next__")):
        replacements.put(owner, name, _as_tensors(vars(owner)[name]))
    for kind in type(tf.Variable(0)).__mro__:
        for name in ("assign", "assign_add", "assign_sub"):
            if name in vars(kind):
                replacements.put(kind, name, _refused(name, vars(kind)[name]))
    replacements.put(tf.random, "set_seed", _set_seed(tf.random.set_seed))
    replacements.put(tf.compat.v1, "set_random_seed", _set_seed(tf.compat.v1.set_random_seed))
    replacements.put(tf.compat.v1, "get_default_graph", _graph(tf.compat.v1.get_default_graph))


def _call(original: Callable[..., Any]) -> Callable[..., Any]:
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        foreign = current() is not None or any_foreign(args, kwargs)
        if not foreign or not tf.executing_eagerly():
            return original(self, *args, **kwargs)
        python = self.python_function
        if being_traced() and getattr(self, "_autograph", True):
            python = converted(python)
        if current() is None:  # in a layer of a model that is trained, or on results of programs
            return python(*args, **kwargs)
        with _named(getattr(self, "__name__", "function")):
            return resolved(lambda: python(*args, **kwargs))

    return call


@contextmanager
def _named(name: str) -> Iterator[None]:
    before = getattr(_local, "name", None)
    _local.name = name
    try:
        yield
    finally:
        _local.name = before


class ScopeIterator(IPUIterator):
    """`iter(dataset)` inside a strategy's scope: in a program, the device's iterator; on the host, TensorFlow's."""

    def __init__(self, dataset: tf.data.Dataset, host: Iterator[Any]) -> None:
        self._dataset, self._host = dataset, host

    def _queue(self) -> IPUInfeedQueue:
        """Made when a program needs it."""
        if "_infeed" not in vars(self):
            self._infeed = IPUInfeedQueue(self._dataset)
        return self._infeed

    @property
    def element_spec(self) -> Any:
        """Shapes and dtypes of one element."""
        return self._dataset.element_spec

    def __next__(self) -> Any:
        return next(self._host) if current() is None else super().__next__()


def _iter(original: Callable[..., Any]) -> Callable[..., Any]:
    def iterate(self: tf.data.Dataset) -> Any:
        host = original(self)
        return ScopeIterator(self, host) if open_strategies() and tf.executing_eagerly() else host

    return iterate


def _as_tensors(original: Callable[..., Tree]) -> Callable[..., Tree]:
    """Results of an outfeed as tensors, as scripts expect them."""

    def read(self: object, *args: Any, **kwargs: Any) -> Any:
        return jax.tree.map(tf.convert_to_tensor, original(self, *args, **kwargs))

    return read


def _refused(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    def method(self: tf.Variable, *args: Any, **kwargs: Any) -> Any:
        if being_traced():
            raise NotImplementedError(
                f"`{name}` of the tf.Variable {self.name!r} is called in a program ({where()}), which would do it only "
                "once, while it is traced. Make a `keras.Variable` of it."
            )
        return original(self, *args, **kwargs)

    return method


def _set_seed(original: Callable[..., None]) -> Callable[..., None]:
    """The seed of TensorFlow, and of Keras, whose weights it determined. NumPy's stays as it is.

    Python's is set, too: Keras 3 draws the seeds of layers from it.
    """

    def set_seed(seed: int) -> None:
        if getattr(_local, "seeding", False):  # Keras sets TensorFlow's seed, too
            original(seed)
            return
        state = np.random.get_state()
        _local.seeding = True
        try:
            keras.utils.set_random_seed(int(seed) % 2**32)
        finally:
            _local.seeding = False
            np.random.set_state(state)
        original(seed)

    return set_seed


def _graph(original: Callable[[], Any]) -> Callable[[], Any]:
    """The graph of the function that is being traced, as far as scripts look at it: its name."""

    def get_default_graph() -> Any:
        name = getattr(_local, "name", None)
        return original() if current() is None or name is None else SimpleNamespace(name=name)

    return get_default_graph
