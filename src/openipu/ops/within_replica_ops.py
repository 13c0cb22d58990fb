"""Collective operations on the shards of one replica, given as a list.

The shards of a replica are values of the same program, so nothing is exchanged explicitly; XLA decides what moves. The
results are the same as if each shard were on its own device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from . import _reductions, _replicas

__all__ = ["all_gather", "all_reduce", "reduce_scatter"]


def all_gather(input_shards: Sequence[Any], axis: int = 0) -> list[Any]:
    """All shards joined along `axis`; a list with one copy per shard.

    >>> first, second = ipu.ops.within_replica_ops.all_gather([np.array([1.0]), np.array([2.0])])
    >>> print(first)
    [1. 2.]
    """
    shards = _checked(input_shards)
    return [jnp.concatenate(shards, _replicas.dimension("axis", axis, shards[0]))] * len(shards)


def all_reduce(input_shards: Sequence[Any], op: str) -> list[Any]:
    """The shards reduced to one; a list with one copy per shard.

    >>> shards = [np.array([1.0, 2.0]), np.array([10.0, 20.0])]
    >>> print(ipu.ops.within_replica_ops.all_reduce(shards, "COLLECTIVE_OP_ADD")[0])
    [11. 22.]

    Args:
        input_shards: Scalars or vectors. Shorter vectors are padded with zeros to the length of the longest.
        op: One of the operators of `reduce_scatter_op.reduce_scatter`.
    """
    rows = _rows(input_shards, op)
    if jnp.ndim(input_shards[0]) == 0:
        rows = rows[:, 0]
    if op == _reductions.LOCAL:
        return list(rows)
    return [_reductions.reduce(op, rows)] * len(rows)


def reduce_scatter(input_shards: Sequence[Any], op: str) -> list[Any]:
    """The shards reduced to one and split into equal parts, one per shard; the last part is padded with zeros.

    Shard i gets part i. (The original rotates the parts by some shards.)

    >>> shards = [np.array([1.0, 2.0]), np.array([10.0, 20.0])]
    >>> print(*ipu.ops.within_replica_ops.reduce_scatter(shards, "COLLECTIVE_OP_ADD"))
    [11.] [22.]

    Args:
        input_shards: Scalars or vectors. Shorter vectors are padded with zeros to the length of the longest.
        op: One of the operators of `reduce_scatter_op.reduce_scatter`.
    """
    rows = _rows(input_shards, op)
    count, length = rows.shape
    part = -(-length // count)
    padded = jnp.pad(rows, ((0, 0), (0, part * count - length))).reshape(count, count, part)
    if op == _reductions.LOCAL:
        return [padded[i, i] for i in range(count)]
    return list(_reductions.reduce(op, padded))


def _rows(input_shards: Sequence[Any], op: str) -> Any:
    """The shards as the rows of a matrix."""
    shards = _checked(input_shards)
    _reductions.check(op, shards[0].dtype)
    if shards[0].ndim > 1:
        raise ValueError(
            f"Shards must be scalars or vectors, but these have {shards[0].ndim} dimensions. Flatten them."
        )
    shards = [jnp.reshape(s, -1) for s in shards]
    longest = max(s.size for s in shards)
    return jnp.stack([jnp.pad(s, (0, longest - s.size)) for s in shards])


def _checked(input_shards: Sequence[Any]) -> list[Any]:
    if not isinstance(input_shards, list | tuple) or not input_shards:
        raise ValueError(f"`input_shards` is {input_shards!r}. Give a list with one tensor per shard.")
    if len({id(shard) for shard in input_shards}) < len(input_shards):
        raise ValueError(f"The same tensor is given for several of the {len(input_shards)} shards. Give one for each.")
    shards = [_replicas.tensors(shard) for shard in input_shards]
    for what, found in (("dtypes", {str(s.dtype) for s in shards}), ("ranks", {s.ndim for s in shards})):
        if len(found) > 1:
            raise ValueError(f"The shards have different {what}: {sorted(found)}. They must be the same.")
    return shards
