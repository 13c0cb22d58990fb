"""Lookups in tables."""

from __future__ import annotations

from typing import Any

from openipu import _validate as validate
from openipu._unavailable import unavailable
from openipu.engine.types import Array

import jax.numpy as jnp
from jax.typing import ArrayLike

from ._operation import array, operation

__all__ = ["embedding_lookup"]


def __getattr__(name: str) -> Any:
    return unavailable("embedding_ops", name)


@operation
def embedding_lookup(
    params: ArrayLike,
    ids: ArrayLike,
    serialization_factor: int = 1,
    indices_are_sorted: bool = False,
    name: str | None = None,  # noqa: ARG001
) -> Array:
    """Rows of a table: the shape of the result is `ids.shape + params.shape[1:]`.

    >>> table = np.arange(6.0).reshape(3, 2)
    >>> print(ipu.embedding_ops.embedding_lookup(table, [2, 0]))
    [[4. 5.]
     [0. 1.]]

    Args:
        params: The table.
        ids: The numbers of rows. A number that the table does not have gives not-a-number, or, in a table of whole
            numbers, the smallest (if they are unsigned, the largest) number of its dtype.
        serialization_factor: Into how many parts an IPU splits the table. It divides the rows; no effect here.
        indices_are_sorted: Whether numbers never decrease along the first axis.
        name: A name for the operation in profiles.
    """
    table = array(params)
    parts = validate.count("serialization_factor", serialization_factor)
    if table.shape[0] % parts:
        raise ValueError(
            f"`serialization_factor` is {parts}, which does not divide the {table.shape[0]} rows of the table. Give a "
            "factor that does."
        )
    if parts > 1:
        validate.no_effect({"serialization_factor": "a lookup reads only the rows it needs"})
    is_sorted = validate.flag("indices_are_sorted", indices_are_sorted)
    rows = array(ids, "int32")
    rows = jnp.where(rows < 0, table.shape[0], rows)  # JAX would count from the end
    return jnp.take(table, rows, axis=0, indices_are_sorted=is_sorted)
