"""TensorFlow's operations in terms of JAX: the table that traced code is looked up in first.

Each function takes the arguments that were given, by the names that they have in TensorFlow, and returns what
TensorFlow returns. An argument that a function does not have sends the call to TensorFlow itself (bridge.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

from openipu.engine.types import Tree

import jax
import jax.numpy as jnp
import keras
import numpy as np
from jax import lax, nn

from . import elementwise
from .elementwise import Tensor, alike, maximum, minimum
from .values import where

Native = Callable[..., Any]
Axis = int | Sequence[int] | None
Shape = Any
"""Whole numbers: in a list, a tuple or an array."""
DType = Any
"""The name of a dtype, or None."""

TABLE: Final[dict[str, Native]] = {}
"""The functions by their names in TensorFlow, without the namespace."""


def native(*names: str) -> Callable[[Native], Native]:
    """Enter a function under these names."""

    def enter(function: Native) -> Native:
        TABLE.update(dict.fromkeys(names, function))
        return function

    return enter


def _all_values(function: Native) -> Native:
    """A function whose arguments have many names in TensorFlow but are all arrays."""

    def call(**values: Tensor) -> Any:
        return function(*alike(*values.values()))

    call.__signature__ = None  # type: ignore[attr-defined]
    return call


def _reduction(function: Native) -> Native:
    def call(input_tensor: Tensor, axis: Axis = None, keepdims: bool = False) -> Tensor:
        return function(jnp.asarray(input_tensor), axis=_axis(axis), keepdims=keepdims)

    return call


def _axis(axis: Axis) -> int | tuple[int, ...] | None:
    if axis is None:
        return None
    found = np.asarray(axis)
    return int(found) if not found.ndim else tuple(map(int, found))


TABLE.update({name: _all_values(function) for name, function in elementwise.TABLE.items()})
TABLE.update({name: _reduction(function) for name, function in elementwise.REDUCTIONS.items()})


# --- shapes and types ------------------------------------------------------------------------------------------------


def short(dtype: DType) -> Any:
    """A dtype that devices have: 32 bits in place of 64."""
    return None if dtype is None else jax.dtypes.canonicalize_dtype(dtype)


def dims(shape: Shape) -> tuple[int, ...]:
    """A shape as numbers, which must be known while the program is traced."""
    return tuple(int(d) for d in np.atleast_1d(np.asarray(shape)))


@native("cast")
def _cast(x: Tensor, dtype: DType) -> Tensor:
    return jnp.asarray(x).astype(short(dtype))


@native("saturate_cast")
def _saturate_cast(value: Tensor, dtype: DType) -> Tensor:
    kind: Any = jnp.finfo if jnp.issubdtype(dtype, jnp.floating) else jnp.iinfo
    found = kind(dtype)
    return jnp.clip(jnp.asarray(value), found.min, found.max).astype(short(dtype))


@native("constant", "convert_to_tensor")
def _constant(value: Tree, dtype: DType = None, shape: Shape | None = None, dtype_hint: DType = None) -> Tensor:
    del dtype_hint
    found = jnp.asarray(value, short(dtype))
    return found if shape is None else jnp.broadcast_to(found, dims(shape))


@native("reshape")
def _reshape(tensor: Tensor, shape: Shape) -> Tensor:
    return jnp.reshape(jnp.asarray(tensor), dims(shape) if np.size(shape) else ())


@native("transpose")
def _transpose(a: Tensor, perm: Shape | None = None) -> Tensor:
    return jnp.transpose(a, None if perm is None else dims(perm))


@native("shape")
def _shape(input: Tensor, out_type: DType = None) -> np.ndarray:
    del out_type
    return np.asarray(np.shape(input), np.int32)  # known while tracing, so that it can be part of another shape


@native("rank")
def _rank(input: Tensor) -> int:
    return np.ndim(input)


@native("size")
def _size(input: Tensor, out_type: DType = None) -> int:
    del out_type
    return int(np.prod(np.shape(input)))


@native("is_tensor")
def _is_tensor(x: object) -> bool:
    del x
    return True


@native("expand_dims")
def _expand_dims(input: Tensor, axis: int) -> Tensor:
    return jnp.expand_dims(input, int(axis))


@native("squeeze")
def _squeeze(input: Tensor, axis: Axis = None) -> Tensor:
    return jnp.squeeze(input, _axis(axis))


@native("concat")
def _concat(values: Sequence[Tensor], axis: int) -> Tensor:
    return jnp.concatenate(list(values), int(axis))


@native("stack")
def _stack(values: Sequence[Tensor], axis: int = 0) -> Tensor:
    return jnp.stack(list(values), int(axis))


@native("unstack")
def _unstack(value: Tensor, num: int | None = None, axis: int = 0) -> list[Tensor]:
    del num
    return [lax.index_in_dim(value, i, axis, keepdims=False) for i in range(np.shape(value)[axis])]


@native("split")
def _split(
    value: Tensor, num_or_size_splits: int | Sequence[int], axis: int = 0, num: int | None = None
) -> list[Tensor]:
    del num
    if np.ndim(num_or_size_splits) == 0:
        return jnp.split(value, int(num_or_size_splits), int(axis))  # type: ignore[arg-type]
    sizes, whole = list(dims(num_or_size_splits)), np.shape(value)[axis]
    if -1 in sizes:
        sizes[sizes.index(-1)] = whole - sum(sizes) - 1
    return jnp.split(value, np.cumsum(sizes)[:-1].tolist(), int(axis))


@native("tile")
def _tile(input: Tensor, multiples: Shape) -> Tensor:
    return jnp.tile(input, dims(multiples))


@native("pad")
def _pad(tensor: Tensor, paddings: Tensor, mode: str = "CONSTANT", constant_values: Tensor = 0) -> Tensor:
    widths = np.asarray(paddings).tolist()
    if mode.upper() != "CONSTANT":
        return jnp.pad(tensor, widths, mode=mode.lower())
    return jnp.pad(tensor, widths, constant_values=constant_values)


@native("slice")
def _slice(input_: Tensor, begin: Shape, size: Shape) -> Tensor:
    starts = list(begin) if isinstance(begin, list | tuple) else begin
    try:
        starts = list(dims(begin))
    except (TypeError, jax.errors.ConcretizationTypeError):
        return _slice_at(input_, starts, dims(size))
    lengths = np.shape(input_)
    ends = [
        min(start + n, whole) if n >= 0 else whole for start, n, whole in zip(starts, dims(size), lengths, strict=True)
    ]
    return lax.slice(input_, starts, ends)


def _slice_at(tensor: Tensor, begin: Sequence[Tensor] | jax.Array, size: Sequence[int]) -> Tensor:
    """A slice that begins where the program says, whose size must be known."""
    starts, sizes = list(begin), list(size)
    for axis, (start, n, whole) in enumerate(zip(starts, sizes, np.shape(tensor), strict=True)):
        if n >= 0:
            continue
        if isinstance(start, jax.core.Tracer):
            raise NotImplementedError(
                f"`tf.slice` is given a size of -1 for axis {axis}, and computes where it begins ({where()}). The size "
                "of a value of a program cannot depend on what it computes. Give the size as a number."
            )
        sizes[axis] = whole - int(start)
    return lax.dynamic_slice(tensor, [jnp.asarray(start, jnp.int32) for start in starts], sizes)


@native("broadcast_to")
def _broadcast_to(input: Tensor, shape: Shape) -> Tensor:
    return jnp.broadcast_to(input, dims(shape))


@native("reverse")
def _reverse(tensor: Tensor, axis: Axis) -> Tensor:
    return jnp.flip(tensor, _axis(axis))


@native("zeros_like")
def _zeros_like(input: Tensor, dtype: DType = None) -> Tensor:
    return jnp.zeros_like(input, short(dtype))


@native("ones_like")
def _ones_like(input: Tensor, dtype: DType = None) -> Tensor:
    return jnp.ones_like(input, short(dtype))


@native("zeros")
def _zeros(shape: Shape, dtype: DType = "float32") -> Tensor:
    return jnp.zeros(dims(shape) if np.size(shape) else (), short(dtype))


@native("ones")
def _ones(shape: Shape, dtype: DType = "float32") -> Tensor:
    return jnp.ones(dims(shape) if np.size(shape) else (), short(dtype))


@native("fill")
def _fill(dims: Shape, value: Tensor) -> Tensor:
    return jnp.full(tuple(map(int, np.atleast_1d(dims))), value)


@native("eye")
def _eye(num_rows: int, num_columns: int | None = None, dtype: DType = "float32") -> Tensor:
    return jnp.eye(num_rows, num_columns, dtype=short(dtype))


@native("where")
def _where(condition: Tensor, x: Tensor, y: Tensor) -> Tensor:
    return jnp.where(jnp.asarray(condition), *map(jnp.asarray, alike(x, y)))


@native("one_hot")
def _one_hot(
    indices: Tensor,
    depth: int,
    on_value: Tensor | None = None,
    off_value: Tensor | None = None,
    axis: int | None = None,
    dtype: DType = None,
) -> Tensor:
    on, off = 1 if on_value is None else on_value, 0 if off_value is None else off_value
    if dtype is None:
        dtype = jnp.float32 if on_value is None and off_value is None else jnp.result_type(on, off)
    hot = nn.one_hot(jnp.asarray(indices), int(depth), axis=-1 if axis is None else axis, dtype=bool)
    return jnp.where(hot, on, off).astype(short(dtype))


# --- sums, products and selections -----------------------------------------------------------------------------------


@native("argmax")
def _argmax(input: Tensor, axis: int | None = None, output_type: DType = "int32") -> Tensor:
    return jnp.argmax(input, axis=axis or 0).astype(short(output_type))


@native("argmin")
def _argmin(input: Tensor, axis: int | None = None, output_type: DType = "int32") -> Tensor:
    return jnp.argmin(input, axis=axis or 0).astype(short(output_type))


@native("add_n")
def _add_n(inputs: Sequence[Tensor]) -> Tensor:
    total = jnp.asarray(inputs[0])
    for value in inputs[1:]:
        total = total + value
    return total


@native("matmul")
def _matmul(a: Tensor, b: Tensor, transpose_a: bool = False, transpose_b: bool = False) -> Tensor:
    left, right = jnp.asarray(a), jnp.asarray(b)
    return jnp.matmul(left.mT if transpose_a else left, right.mT if transpose_b else right)


@native("tensordot")
def _tensordot(a: Tensor, b: Tensor, axes: int | Sequence[int] | Sequence[Sequence[int]]) -> Tensor:
    return jnp.tensordot(a, b, axes)


@native("cumsum")
def _cumsum(x: Tensor, axis: int = 0, exclusive: bool = False, reverse: bool = False) -> Tensor:
    x = jnp.flip(x, axis) if reverse else jnp.asarray(x)
    if exclusive:
        widths = [(1, -1, 0) if i == axis % x.ndim else (0, 0, 0) for i in range(x.ndim)]
        x = lax.pad(x, jnp.zeros((), x.dtype), widths)
    total = jnp.cumsum(x, axis)
    return jnp.flip(total, axis) if reverse else total


@native("gather")
def _gather(params: Tensor, indices: Tensor, axis: int | None = None) -> Tensor:
    return jnp.take(jnp.asarray(params), jnp.asarray(indices), axis=axis or 0, mode="clip")


@native("embedding_lookup")
def _embedding_lookup(params: Tensor, ids: Tensor) -> Tensor:
    return jnp.take(jnp.asarray(params), jnp.asarray(ids), axis=0, mode="clip")


@native("clip_by_value")
def _clip_by_value(t: Tensor, clip_value_min: Tensor, clip_value_max: Tensor) -> Tensor:
    t, least, most = alike(t, clip_value_min, clip_value_max)
    return maximum(minimum(t, most), least)


@native("clip_by_norm")
def _clip_by_norm(t: Tensor, clip_norm: Tensor, axes: Axis = None) -> Tensor:
    square = jnp.sum(jnp.square(t), axis=_axis(axes), keepdims=True)
    norm = jnp.where(square > 0, jnp.sqrt(jnp.where(square > 0, square, 1)), square)
    return t * clip_norm / maximum(norm, clip_norm)


@native("global_norm")
def _global_norm(t_list: Sequence[Tensor]) -> Tensor:
    return jnp.sqrt(_add_n([jnp.sum(jnp.square(t)) for t in t_list if t is not None]))


@native("clip_by_global_norm")
def _clip_by_global_norm(
    t_list: Sequence[Tensor], clip_norm: Tensor, use_norm: Tensor | None = None
) -> tuple[list[Tensor], Tensor]:
    norm = _global_norm(t_list) if use_norm is None else jnp.asarray(use_norm)
    scale = clip_norm / jnp.maximum(norm, clip_norm)
    return [None if t is None else t * scale for t in t_list], norm


@native("norm")
def _norm(tensor: Tensor, ord: str | float = "euclidean", axis: Axis = None, keepdims: bool = False) -> Tensor:
    order = None if ord == "euclidean" else ord
    flat = jnp.ravel(tensor) if axis is None and not keepdims else jnp.asarray(tensor)
    return jnp.linalg.norm(flat, order, _axis(axis), keepdims)


@native("top_k")
def _top_k(input: Tensor, k: int = 1) -> tuple[Tensor, Tensor]:
    values, indices = lax.top_k(input, int(k))
    return values, indices


@native("in_top_k")
def _in_top_k(targets: Tensor, predictions: Tensor, k: int) -> Tensor:
    return keras.ops.in_top_k(targets, predictions, k)
