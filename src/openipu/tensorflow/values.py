"""Values that belong to JAX and Keras, and what TensorFlow's values are to them."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Hashable, Iterable
from types import FrameType
from typing import Any, Final

from openipu.engine.core.enqueued import traced_program

import jax
import jax.numpy as jnp
import keras
import numpy as np
import tensorflow as tf

from .elementwise import as_array
from .replacements import Replacements

_OPERATORS: Final = (
    "add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "lt", "le", "gt", "ge", "eq", "ne", "and",
    "or", "xor",
)  # fmt: skip
_WITH_LISTS: Final = (
    "add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "rtruediv", "floordiv", "rfloordiv", "mod", "rmod", "pow",
    "rpow", "matmul", "rmatmul", "lt", "le", "gt", "ge",
)  # fmt: skip
"""Operators of arrays that take lists for arrays."""
LIBRARIES: Final = frozenset(
    {
        "openipu", "tensorflow", "keras", "keras_hub", "jax", "jaxlib", "numpy", "optree", "orbax", "importlib",
        "contextlib", "functools", "inspect",
    }
)  # fmt: skip
"""Packages that are not a script's own code."""
PLAIN: Final[set[type]] = {int, float, bool, str, type(None), np.ndarray, tf.DType, type(tf.constant(0))}
"""Types of values that are never foreign, for a quick answer. Others are added when they are met."""
_IDLE = traced_program()
"""What JAX says when it is not tracing. This module is never loaded by traced code."""


class Lazy:
    """A value of a program that is computed when it is needed as an array, through `__jax_array__`."""

    __slots__ = ()


@functools.cache
def _foreign_type(kind: Hashable) -> bool:
    assert isinstance(kind, type)
    return issubclass(kind, (jax.core.Tracer, keras.Variable, keras.KerasTensor, Lazy)) or issubclass(kind, jax.Array)


def is_foreign(value: object) -> bool:
    """Whether a value is one of JAX or Keras, or a list, tuple or dict with one in it."""
    kind: Any = type(value)
    if kind in PLAIN:
        return False
    if kind in (list, tuple):
        return any(map(is_foreign, value))  # type: ignore[call-overload]
    if kind is dict:
        return any(map(is_foreign, value.values()))  # type: ignore[attr-defined]
    foreign = _foreign_type(kind)
    if not foreign:
        PLAIN.add(kind)
    return foreign


def any_foreign(args: Iterable[object], kwargs: dict[str, object]) -> bool:
    """Whether any argument is a value of JAX or Keras."""
    return any(type(value) not in PLAIN and is_foreign(value) for value in (*args, *kwargs.values()))


def is_symbolic(value: object) -> bool:
    """Whether a value stands for one in a Keras model that is being built."""
    return any(isinstance(leaf, keras.KerasTensor) for leaf in jax.tree.leaves(value))


def being_traced() -> bool:
    """Whether JAX is tracing in this thread, and TensorFlow is not."""
    return traced_program() != _IDLE and bool(tf.executing_eagerly())


def native(value: Any) -> Any:
    """A value as JAX has it: arrays for tensors and variables, names for dtypes, tuples for shapes."""
    return jax.tree.map(_native, value, is_leaf=lambda leaf: isinstance(leaf, tf.TensorShape | keras.Variable))


def _native(value: Any) -> Any:
    if isinstance(value, keras.Variable):
        return value.value
    if isinstance(value, tf.Variable):
        raise TypeError(
            f"The tf.Variable {value.name!r} is used with values of a device program, which cannot see its changes "
            f"({where()}). Make a `keras.Variable` of it."
        )
    if isinstance(value, Lazy):
        return jnp.asarray(value)
    if isinstance(value, tf.DType):
        return value.name
    if isinstance(value, tf.TensorShape):
        return tuple(value)
    return _as_array(value) if isinstance(value, tf.Tensor) else value


def where() -> str:
    """The line of the user's code that is running."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if module.partition(".")[0] not in LIBRARIES and not frame.f_code.co_filename.startswith("<"):
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back
    return "an unknown line"


def install(replacements: Replacements) -> None:
    """Let tensors, arrays and lists meet in arithmetic, and let arrays answer to `numpy()`."""
    replacements.put(tf.Tensor, "__jax_array__", _as_array)
    replacements.put(tf.DType, "dtype", property(lambda dtype: np.dtype(dtype.as_numpy_dtype)))
    for name in _OPERATORS:
        method = f"__{name}__"
        replacements.put(tf.Tensor, method, _deferring(getattr(tf.Tensor, method)))
    for kind in (jax.core.Tracer, array_class(), keras.KerasTensor):
        for name in _WITH_LISTS:
            replacements.put(kind, f"__{name}__", _with_lists(getattr(kind, f"__{name}__")))
    replacements.put(array_class(), "numpy", lambda array: np.asarray(array))  # noqa: PLW0108 - binds self


def array_class() -> type:
    """The class of arrays. Found by name: to make an array would start the devices, before a script configures them."""
    return next(kind for kind in jax.Array.__subclasses__() if kind.__name__ == "ArrayImpl")


def _as_array(tensor: tf.Tensor) -> jax.Array:
    if not hasattr(tensor, "numpy"):
        raise RuntimeError(
            f"A tensor of one of TensorFlow's graphs meets a value of JAX or Keras ({where()}). Run the `tf.function` "
            "that uses Keras with `strategy.run(function, args=...)`; datasets can only use TensorFlow's operations."
        )
    return jnp.asarray(tensor.numpy())


def _deferring(original: Callable[..., Any]) -> Callable[..., Any]:
    """An operator of tensors that leaves it to the other operand if that is a value of JAX or Keras."""

    @functools.wraps(original)
    def operator(self: tf.Tensor, other: object) -> Any:
        # Written out, because this runs at every operator.
        if type(other) in PLAIN or not is_foreign(other):
            return original(self, other)
        return NotImplemented

    return operator


def _with_lists(original: Callable[..., Any]) -> Any:
    """An operator of arrays that takes a list of numbers for an array.

    The dispatch is Python's own, whose lines JAX leaves out when it says where a script computes something.
    """

    def operator(self: Any, other: list[Any] | tuple[Any, ...]) -> Any:
        return original(self, as_array(native(other), self.dtype))

    method: Any = functools.singledispatchmethod(original)
    for kind in (list, tuple):
        method.register(kind, operator)
    return method
