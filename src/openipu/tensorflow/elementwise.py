"""Functions of each element, and reductions, in terms of JAX. See native.py.

Where a function has a kink, or its arguments a tie, the gradient is the one that TensorFlow chooses.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Final

import jax
import jax.numpy as jnp
from jax import lax, nn
from jax.scipy import special

Tensor = Any
"""An array of JAX or NumPy, a number, or a list of them."""

_SELU_SCALE: Final = 1.0507009873554805
_SELU_ALPHA: Final = 1.6732632423543772


def alike(*values: Tensor) -> list[Tensor]:
    """Values with arrays in place of lists, which take the dtype of the first value that has one."""
    dtype = next((value.dtype for value in values if hasattr(value, "dtype")), None)
    return [as_array(value, dtype) if isinstance(value, list | tuple) else value for value in values]


def as_array(numbers: Tensor, dtype: Any) -> jax.Array:
    """The array of a list: of this dtype, unless an array in the list has its own or numbers would be rounded."""
    found = jnp.asarray(numbers)
    if dtype is None or any(hasattr(leaf, "dtype") for leaf in jax.tree.leaves(numbers)):
        return found
    rounds = jnp.issubdtype(found.dtype, jnp.inexact) and not jnp.issubdtype(dtype, jnp.inexact)
    return found if rounds else found.astype(dtype)


def maximum(x: Tensor, y: Tensor) -> Tensor:
    """The greater of two. Of equal ones it is the first."""
    return jnp.where((x >= y) | jnp.isnan(x), x, y)


def minimum(x: Tensor, y: Tensor) -> Tensor:
    """The smaller of two. Of equal ones it is the first."""
    return jnp.where((x <= y) | jnp.isnan(x), x, y)


def leaky_relu(x: Tensor, alpha: float) -> Tensor:
    """The value, or if it is not above zero, a part of it."""
    return jnp.where(x > 0, x, alpha * x)


def _abs(x: Tensor) -> Tensor:
    x = jnp.asarray(x)
    return jnp.abs(x) if jnp.iscomplexobj(x) else x * lax.stop_gradient(jnp.sign(x))


def _selu(x: Tensor) -> Tensor:
    below = _SELU_ALPHA * jnp.expm1(jnp.where(x < 0, x, 0))
    return _SELU_SCALE * jnp.where(x < 0, below, x)


def _divide_no_nan(x: Tensor, y: Tensor) -> Tensor:
    y = jnp.asarray(y)
    return jnp.where(y == 0, 0, x / jnp.where(y == 0, 1, y))


def _of_same_dtype(function: Callable[..., Any]) -> Callable[..., Any]:
    return functools.partial(function, promote_integers=False)


def _mean(x: Tensor, axis: Any, keepdims: bool) -> Tensor:
    """The mean. Of whole numbers, TensorFlow adds up 64 bits, and rounds the result towards zero."""
    if not jnp.issubdtype(x.dtype, jnp.integer):
        return jnp.mean(x, axis=axis, keepdims=keepdims)
    with jax.enable_x64(True):
        total = jnp.sum(x, axis=axis, keepdims=keepdims, dtype=jnp.int64)
        return lax.div(total, jnp.full_like(total, x.size // max(total.size, 1))).astype(x.dtype)


TABLE: Final[dict[str, Callable[..., Any]]] = {
    "abs": _abs, "acos": jnp.arccos, "acosh": jnp.arccosh, "add": jnp.add, "asin": jnp.arcsin,
    "asinh": jnp.arcsinh, "atan": jnp.arctan, "atan2": jnp.arctan2, "atanh": jnp.arctanh, "ceil": jnp.ceil,
    "cos": jnp.cos, "cosh": jnp.cosh, "digamma": special.digamma, "divide": jnp.true_divide,
    "divide_no_nan": _divide_no_nan, "elu": nn.elu, "equal": jnp.equal, "erf": special.erf, "exp": jnp.exp,
    "expm1": jnp.expm1, "floor": jnp.floor, "floordiv": jnp.floor_divide, "floormod": jnp.mod,
    "greater": jnp.greater, "greater_equal": jnp.greater_equal, "identity": jnp.asarray, "is_finite": jnp.isfinite,
    "is_inf": jnp.isinf, "is_nan": jnp.isnan, "less": jnp.less, "less_equal": jnp.less_equal,
    "lgamma": special.gammaln, "log": jnp.log, "log1p": jnp.log1p, "log_sigmoid": nn.log_sigmoid,
    "logical_and": jnp.logical_and, "logical_not": jnp.logical_not, "logical_or": jnp.logical_or,
    "logical_xor": jnp.logical_xor, "maximum": maximum, "minimum": minimum, "mod": jnp.mod,
    "multiply": jnp.multiply, "negative": jnp.negative, "not_equal": jnp.not_equal, "pow": jnp.power,
    "reciprocal": jnp.reciprocal, "relu": nn.relu, "relu6": nn.relu6, "round": jnp.round, "rsqrt": lax.rsqrt,
    "selu": _selu, "sigmoid": nn.sigmoid, "sign": jnp.sign, "sin": jnp.sin, "sinh": jnp.sinh,
    "softplus": nn.softplus, "softsign": nn.soft_sign, "sqrt": jnp.sqrt, "square": jnp.square,
    "squared_difference": lambda x, y: jnp.square(jnp.subtract(x, y)), "stop_gradient": lax.stop_gradient,
    "subtract": jnp.subtract, "tan": jnp.tan, "tanh": jnp.tanh, "truediv": jnp.true_divide,
}  # fmt: skip
REDUCTIONS: Final[dict[str, Callable[..., Any]]] = {
    "reduce_all": jnp.all, "reduce_any": jnp.any, "reduce_logsumexp": special.logsumexp, "reduce_max": jnp.max,
    "reduce_mean": _mean, "reduce_min": jnp.min, "reduce_prod": _of_same_dtype(jnp.prod), "reduce_std": jnp.std,
    "reduce_sum": _of_same_dtype(jnp.sum), "reduce_variance": jnp.var,
}  # fmt: skip
