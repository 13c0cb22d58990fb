"""The functions of `tf.keras.backend` that Keras computes with what only TensorFlow's tensors have, for other values.

The others are calls of TensorFlow's operations, which bridge.py takes care of.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Any, Final

import keras
import tensorflow as tf
from keras import ops

from .replacements import Replacements
from .values import any_foreign, being_traced, native

Tensor = Any
Axis = int | Sequence[int] | None


def install(replacements: Replacements) -> None:
    """Put these functions in the place of Keras' own for values of JAX and Keras."""
    public = keras._tf_keras.keras.backend
    legacy = inspect.getmodule(public.mean)
    for name, function in _FUNCTIONS.items():
        both = _by_value(function, getattr(public, name))
        for module in (public, legacy):
            replacements.put(module, name, both)


def _by_value(function: Callable[..., Any], original: FunctionType) -> Callable[..., Any]:
    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        here = any_foreign(args, kwargs) or (original.__name__ in _CREATORS and being_traced())
        return (function if here else original)(*args, **kwargs)

    return call


def _numbers(x: Tensor) -> Tensor:
    """Values to take the mean of."""
    return ops.cast(x, keras.config.floatx()) if _dtype(x) == "bool" else x


def _mean(x: Tensor, axis: Axis = None, keepdims: bool = False) -> Tensor:
    return ops.mean(_numbers(x), axis, keepdims)


def _std(x: Tensor, axis: Axis = None, keepdims: bool = False) -> Tensor:
    return ops.std(_numbers(x), axis, keepdims)


def _var(x: Tensor, axis: Axis = None, keepdims: bool = False) -> Tensor:
    return ops.var(_numbers(x), axis, keepdims)


def _batch_flatten(x: Tensor) -> Tensor:
    return ops.reshape(x, (-1, math.prod(x.shape[1:])))


def _dtype(x: Tensor) -> str:
    return str(keras.backend.standardize_dtype(x.dtype))


def _softmax(x: Tensor, axis: Axis = -1) -> Tensor:
    if len(x.shape) < 2:
        raise ValueError(f"Cannot apply softmax to a tensor that is 1D. Received input: {x}")
    return ops.softmax(x, axis)


def _switch(condition: Tensor, then_expression: Any, else_expression: Any) -> Any:
    choices = (then_expression, else_expression)
    if not len(condition.shape):
        functions = [choice if callable(choice) else functools.partial(_itself, choice) for choice in choices]
        return tf.cond(tf.cast(condition, "bool"), *functions)
    first, second = (native(choice() if callable(choice) else choice) for choice in choices)
    condition, missing = tf.cast(condition, "bool"), len(first.shape) - len(condition.shape)
    if missing < 0:
        raise ValueError(
            f"The condition has more axes than the value that it selects: {condition.shape}, {first.shape}"
        )
    if len(condition.shape) > 1:
        condition = functools.reduce(ops.expand_dims, (-1,) * missing, condition)
    return ops.where(condition, first, second)


def _itself(value: Any) -> Any:
    return value


def _cast_to_floatx(x: Tensor) -> Tensor:
    return ops.cast(x, keras.config.floatx())


def _eye(size: int, dtype: str | None = None, name: str | None = None) -> Tensor:
    del name
    return ops.eye(size, dtype=dtype or keras.config.floatx())


def _ones(shape: Any, dtype: str | None = None, name: str | None = None) -> Tensor:
    del name
    return ops.ones(native(shape), dtype or keras.config.floatx())


def _zeros(shape: Any, dtype: str | None = None, name: str | None = None) -> Tensor:
    del name
    return ops.zeros(native(shape), dtype or keras.config.floatx())


_CREATORS: Final = frozenset({"eye", "ones", "zeros"})
"""Functions that make variables, and in programs values."""
_FUNCTIONS: Final[dict[str, Callable[..., Any]]] = {
    "batch_flatten": _batch_flatten, "cast_to_floatx": _cast_to_floatx, "dtype": _dtype, "eye": _eye, "mean": _mean,
    "ones": _ones, "softmax": _softmax, "std": _std, "switch": _switch, "var": _var, "zeros": _zeros,
}  # fmt: skip
