"""Functions of a script that Keras calls while it traces, with loops and conditionals on values of the program.

Keras 2 converts them with AutoGraph, and so they are here: `call` of layers and losses, `update_state` and `result` of
metrics, and functions that are given to `compile` as losses and metrics. Outside of a trace they run as they are.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import FunctionType
from typing import Any, Final

from openipu.engine.keras_compat.api import function_wrappers

import keras

from . import model_steps
from .control_flow import converted
from .replacements import Replacements
from .shapes import with_shapes
from .values import LIBRARIES, being_traced

METHODS: Final = ("call", "update_state", "result")
OF_SHAPES: Final = ("build", "compute_output_shape")


def install(replacements: Replacements) -> None:
    """Convert what scripts define from now on."""
    for kind in (keras.Layer, keras.losses.Loss, keras.metrics.Metric):
        replacements.put(kind, "__init_subclass__", _preparing(kind))
    for owner, attribute in function_wrappers():
        replacements.put(owner, attribute, _converting(attribute))


def _is_users(thing: object) -> bool:
    return getattr(thing, "__module__", "").partition(".")[0] not in LIBRARIES


def _preparing(kind: Any) -> Any:
    """What Python calls with every new subclass."""

    def prepare(cls: type, /, **kwargs: Any) -> None:
        super(kind, cls).__init_subclass__(**kwargs)
        if not _is_users(cls):
            return
        for name in METHODS:
            method = vars(cls).get(name)
            if isinstance(method, FunctionType) and _is_users(method):
                setattr(cls, name, _converted_in_traces(method))
        for name in OF_SHAPES:
            method = vars(cls).get(name)
            if isinstance(method, FunctionType) and _is_users(method):
                setattr(cls, name, with_shapes(method))
        if issubclass(cls, keras.Model):
            model_steps.translate(cls)

    return classmethod(prepare)


def _converted_in_traces(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return (converted(function) if being_traced() else function)(*args, **kwargs)

    return call


def _converting(attribute: str) -> property:
    """An attribute that holds a function of the script."""

    def get(self: object) -> Any:
        function = vars(self)[attribute]
        return converted(function) if _is_users(function) and being_traced() else function

    def put(self: object, function: Callable[..., Any]) -> None:
        vars(self)[attribute] = function

    return property(get, put)
