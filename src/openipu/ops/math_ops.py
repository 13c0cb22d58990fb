"""Matrix products in parts, and sums over segments."""

from __future__ import annotations

from typing import Final

from openipu import _validate as validate
from openipu.engine.types import Array

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from ._operation import array, operation
from ._serial_products import PRODUCTS

__all__ = ["segment_sum", "serialized_matmul"]

_DIMENSIONS: Final = ("a_columns", "a_rows_b_columns", "b_rows")


@operation
def serialized_matmul(
    a: ArrayLike,
    b: ArrayLike,
    serialization_factor: int,
    serialization_dimension: str,
    transpose_a: bool = False,
    transpose_b: bool = False,
    name: str | None = None,  # noqa: ARG001
) -> Array:
    """The product of matrices, computed in parts, one after another.

    What a product needs besides its inputs and its result is then needed for one part at a time. For shapes (m, k) and
    (k, n), `serialization_dimension` says what is divided: "a_columns" m, "a_rows_b_columns" k, and "b_rows" n.

    >>> a, b = np.ones((4, 6)), np.ones((6, 2))
    >>> ipu.math_ops.serialized_matmul(a, b, serialization_factor=3, serialization_dimension="a_rows_b_columns").shape
    (4, 2)

    Args:
        a: A matrix, or several along the first axes.
        b: The other matrix, or several.
        serialization_factor: The number of parts. It divides the dimension.
        serialization_dimension: See above.
        transpose_a: Whether the last two axes of `a` are exchanged first.
        transpose_b: Whether the last two axes of `b` are exchanged first.
        name: A name for the operation in profiles.
    """
    parts = validate.count("serialization_factor", serialization_factor)
    which = _DIMENSIONS.index(validate.choice("serialization_dimension", serialization_dimension, _DIMENSIONS))
    left = _matrix("a", a, validate.flag("transpose_a", transpose_a))
    right = _matrix("b", b, validate.flag("transpose_b", transpose_b))
    if left.shape[-1] != right.shape[-2]:
        raise ValueError(
            f"Matrices of shapes {left.shape} and {right.shape} cannot be multiplied: {left.shape[-1]} columns meet "
            f"{right.shape[-2]} rows. See `transpose_a` and `transpose_b`."
        )
    size = (left.shape[-2], left.shape[-1], right.shape[-1])[which]
    if size % parts:
        raise ValueError(
            f"`serialization_factor` is {parts}, but the size of {serialization_dimension!r} is {size}. Give a factor "
            "that divides it."
        )
    return PRODUCTS[which](left, right, parts)


def _matrix(name: str, value: ArrayLike, transposed: bool) -> Array:
    matrix = array(value)
    if matrix.ndim < 2:
        raise ValueError(f"`{name}` has the shape {matrix.shape}. Give a matrix.")
    return jnp.swapaxes(matrix, -1, -2) if transposed else matrix


@operation
def segment_sum(
    data: ArrayLike,
    segment_ids: ArrayLike,
    num_segments: int,
    name: str | None = None,  # noqa: ARG001
) -> Array:
    """The sums of the rows of each segment, of shape (num_segments, ...).

    >>> print(ipu.math_ops.segment_sum([1.0, 2.0, 3.0, 4.0], [0, 0, 2, 2], num_segments=3))
    [3. 0. 7.]

    Args:
        data: An array.
        segment_ids: The segment of each row, as whole numbers that never decrease.
        num_segments: The number of segments. Rows of segments beyond are left out.
        name: A name for the operation in profiles.
    """
    rows, ids = array(data), array(segment_ids, "int32")
    if ids.shape != rows.shape[:1]:
        raise ValueError(
            f"There are {ids.shape} segment numbers for rows of shape {rows.shape}. Give one for each row."
        )
    count = validate.count("num_segments", num_segments)
    return jax.ops.segment_sum(rows, ids, count, indices_are_sorted=True)
