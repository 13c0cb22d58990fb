"""TensorFlow's public operations, made to accept the values of traced code.

A call that has no value of JAX or Keras among its arguments goes to TensorFlow, as ever. Otherwise, in this order:

1. the function of the same name in native.py;
2. TensorFlow's own operation, compiled into the program through `jax2tf.call_tf`, with one notice for each;
3. an error that names the operation and the line.

While a Keras model is being built, an operation on its symbolic tensors becomes one of the model's operations.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from types import FunctionType, ModuleType
from typing import Any, Final

from openipu import _validate as validate
from openipu.engine.types import Tree

import jax
import keras
import tensorflow as tf

from . import native_nn
from .native import TABLE
from .replacements import Replacements
from .values import PLAIN, any_foreign, being_traced, is_foreign, is_symbolic, native, where

NAMESPACES: Final = (
    "", "bitwise", "debugging", "dtypes", "image", "linalg", "math", "nn", "quantization", "random", "raw_ops",
    "signal", "sparse", "strings", "compat.v1", "compat.v1.debugging", "compat.v1.image", "compat.v1.linalg",
    "compat.v1.losses", "compat.v1.math", "compat.v1.nn", "compat.v1.random",
)  # fmt: skip
NOT_OPERATIONS: Final = frozenset(
    {
        "device", "executing_eagerly", "function", "get_logger", "get_static_value", "init_scope", "load_library",
        "load_op_library", "numpy_function", "py_function", "custom_gradient", "recompute_grad", "no_gradient",
        "grad_pass_through", "type_spec_from_value", "set_seed", "set_random_seed", "as_dtype", "name_scope",
        "control_dependencies", "get_default_graph", "while_loop", "cond", "case", "switch_case",
        "range",
    }
)  # fmt: skip
"""Functions that are not operations, and those that control_flow.py replaces."""
CREATORS: Final = frozenset(
    {
        "eye", "fill", "ones", "zeros", "random.normal", "random.shuffle", "random.truncated_normal", "random.uniform",
        "random_normal", "random_shuffle", "random_uniform", "truncated_normal",
    }
)  # fmt: skip
"""Operations that make values out of nothing: those of the program, if one is being traced."""

Function = Callable[..., Any]


def install(replacements: Replacements) -> None:
    """Wrap TensorFlow's public operations."""
    for path in NAMESPACES:
        module = _module(path)
        for name, function in list(vars(module).items()):
            if name.startswith("_") or name in NOT_OPERATIONS or not isinstance(function, FunctionType):
                continue
            kind = path.rpartition(".")[2]
            key = f"{kind}.{name}" if kind in ("random", "losses") else name
            replacements.put(module, name, _wrapper(key, f"{path}.{name}".lstrip("."), function))


def _module(path: str) -> ModuleType:
    module: ModuleType = tf
    for name in path.split(".") if path else ():
        module = getattr(module, name)
    return module


def _wrapper(key: str, name: str, original: Function) -> Function:
    def operation(*args: Any, **kwargs: Any) -> Any:
        # Written out, because this runs at every call of an operation.
        for value in args:
            if type(value) not in PLAIN and is_foreign(value):
                return call(key, name, original, args, kwargs)
        if kwargs and any_foreign((), kwargs):
            return call(key, name, original, args, kwargs)
        return original(*args, **kwargs)

    def creator(*args: Any, **kwargs: Any) -> Any:
        if being_traced() or any_foreign(args, kwargs):
            return call(key, name, original, args, kwargs)
        return original(*args, **kwargs)

    return functools.wraps(original)(creator if key in CREATORS else operation)


class TensorFlowOperation(keras.Operation):
    """An operation of TensorFlow in a Keras model."""

    def __init__(self, key: str, tensorflow_name: str, original: Function) -> None:
        super().__init__()
        self._key, self._tensorflow_name, self._original = key, tensorflow_name, original

    def compute_output_spec(self, *args: Any, **kwargs: Any) -> Any:
        """Shapes and dtypes of the result. Keras takes a product with a number for sparse, which it is not."""
        return super().compute_output_spec(*jax.tree.map(_dense, args), **jax.tree.map(_dense, kwargs))

    def call(self, *args: Any, **kwargs: Any) -> Any:
        """Compute it."""
        return call(self._key, self._tensorflow_name, self._original, args, kwargs)


def _dense(value: Any) -> Any:
    sparse = isinstance(value, keras.KerasTensor) and value.sparse
    return keras.KerasTensor(value.shape, value.dtype, name=value.name) if sparse else value


def call(key: str, name: str, original: Function, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """An operation on values of JAX and Keras.

    Args:
        key: The name in native.py.
        name: The name for messages, without "tf.".
        original: TensorFlow's function.
        args: Positional arguments.
        kwargs: Keyword arguments.
    """
    args, kwargs = jax.tree.map(_known, (tuple(args), dict(kwargs)), is_leaf=lambda a: isinstance(a, keras.Variable))
    if is_symbolic((args, kwargs)):
        return TensorFlowOperation(key, name, original)(*args, **kwargs)
    if key == "print":
        return native_nn.print_values(*native(tuple(args)), **kwargs)
    if name.startswith(("debugging.", "compat.v1.debugging.")) or key.startswith("assert_") or key == "Assert":
        return native_nn.unchecked(name)
    if key == "einsum":
        return jax.numpy.einsum(*native(tuple(args)), **kwargs)
    arguments = _arguments(original, args, kwargs)
    own = TABLE.get(key)
    if own is not None and _accepts(own, arguments):
        return own(**{name: native(value) for name, value in arguments.items()})
    return _in_tensorflow(name, original, args, kwargs)


def _known(value: Any) -> Any:
    """Whole numbers of TensorFlow as those of NumPy, so that they can be part of shapes."""
    is_known = isinstance(value, tf.Tensor) and value.dtype.is_integer and hasattr(value, "numpy")
    return _short(value).numpy() if is_known else value


def _arguments(original: Function, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments that were given, by their names in TensorFlow, without the name of the operation."""
    given = dict(inspect.signature(original).bind(*args, **kwargs).arguments)
    given.pop("name", None)
    given.pop("seed", None)  # numbers are drawn from the generator of programs
    return given


def _accepts(function: Function, arguments: Mapping[str, Any]) -> bool:
    if getattr(function, "__signature__", ...) is None:
        return True
    try:
        inspect.signature(function).bind(**arguments)
    except TypeError:
        return False
    return True


def _in_tensorflow(name: str, original: Function, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The operation as TensorFlow compiles it, as part of the program."""
    from jax.experimental import jax2tf

    leaves, structure = jax.tree.flatten((tuple(args), dict(kwargs)), is_leaf=lambda a: isinstance(a, keras.Variable))
    places = [i for i, leaf in enumerate(leaves) if any_foreign((leaf,), {})]

    def compute(*arrays: tf.Tensor) -> Tree:
        filled = list(leaves)
        for place, array in zip(places, arrays, strict=True):
            filled[place] = array
        given, named = jax.tree.unflatten(structure, filled)
        return tf.nest.map_structure(_short, original(*given, **named))

    validate.notice(
        f"tf.{name} is computed by TensorFlow inside the program; keras.ops and jax.numpy have faster operations."
    )
    try:
        return _with_conjugates(jax2tf.call_tf(compute))(*(native(leaves[place]) for place in places))
    # TensorFlow and JAX report operations that cannot be compiled in many ways.
    except Exception as error:
        reason = str(error).strip().partition("\n")[0].rstrip(". ")
        raise NotImplementedError(
            f"tf.{name} cannot be part of a program ({where()}): {reason}. Use an operation of `keras.ops` or "
            "`jax.numpy` in its place, or compute it on the host, for example in the dataset."
        ) from error


def _with_conjugates(function: Function) -> Function:
    """A function whose gradients TensorFlow computes: where they are complex, JAX has their conjugates."""
    run = jax.custom_vjp(function)

    def backward(transpose: Function, above: Tree) -> Tree:
        return jax.tree.map(_conjugate, transpose(jax.tree.map(_conjugate, above)))

    run.defvjp(functools.partial(jax.vjp, function), backward)
    return run


def _conjugate(value: Any) -> Any:
    return jax.numpy.conj(value) if jax.numpy.iscomplexobj(value) else value


def _short(tensor: tf.Tensor) -> tf.Tensor:
    """A result in a dtype that devices have."""
    shorter = {tf.int64: tf.int32, tf.uint64: tf.uint32, tf.float64: tf.float32}
    return tf.cast(tensor, shorter[tensor.dtype]) if tensor.dtype in shorter else tensor
