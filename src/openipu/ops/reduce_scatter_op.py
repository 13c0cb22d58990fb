"""A reduction over replicas, of which each replica keeps one part."""

from __future__ import annotations

from typing import Any

from openipu.engine.devices.replicas import REPLICA_AXIS
from openipu.engine.types import Array, Tree

import jax
import jax.numpy as jnp
from jax import lax

from . import _reductions, _replicas

__all__ = ["reduce_scatter"]


def reduce_scatter(x: Tree, replication_factor: int, op: str = _reductions.ADD, name: str | None = None) -> Tree:
    """This replica's part of `x` after a reduction over all replicas: ceil(n / replicas) of the n values.

    Replica 0 gets the first part, replica 1 the next, and so on; the last part is padded with zeros.

    >>> def program():  # the sum over two replicas is [2, 4, 6, 8], and the first one keeps its first half
    ...     return ipu.reduce_scatter_op.reduce_scatter(np.array([1.0, 2.0, 3.0, 4.0]), replication_factor=2)
    >>> print(strategy.run(program))
    [2. 4.]

    Args:
        x: A vector, or a list of them, which gives a list. A list of one vector gives a vector.
        replication_factor: The number of replicas.
        op: "COLLECTIVE_OP_ADD", "..._MUL", "..._MIN", "..._MAX", "..._LOGICAL_AND", "..._LOGICAL_OR" (of booleans),
            "..._SQUARE_ADD" (the sum of squares), "..._MEAN", or "..._LOCAL" (this replica's own values, unreduced).
        name: A name for the operation in profiles.
    """
    count = _replicas.stated_count(replication_factor)

    def one(x: Array) -> Any:
        _reductions.check(op, x.dtype)
        if x.ndim != 1:
            raise ValueError(f"`reduce_scatter` takes vectors, but a tensor has shape {x.shape}. Flatten it.")
        part = -(-x.shape[0] // count)
        if count > 1 and _replicas.count() == 1:  # [Note: shapes before programs]
            return jnp.zeros(part, x.dtype)
        parts = jnp.pad(x, (0, part * count - x.shape[0])).reshape(count, part)
        return _reduced_part(op, parts)

    with jax.named_scope(name or "reduce_scatter"):
        return _replicas.each(x, one)


def _reduced_part(op: str, parts: Array) -> Any:
    """This replica's row of `parts`, reduced over replicas."""
    alone = parts.shape[0] == 1
    if op == _reductions.LOCAL:
        return parts[0] if alone else parts[lax.axis_index(REPLICA_AXIS)]
    if alone:
        return _reductions.reduce(op, parts)
    if op in (_reductions.ADD, _reductions.SQUARE_ADD):
        return lax.psum_scatter(parts * parts if op == _reductions.SQUARE_ADD else parts, REPLICA_AXIS)
    return _reductions.reduce(op, lax.all_to_all(parts, REPLICA_AXIS, 0, 0))
