"""Collective operations on the shards of one replica, given as a list in the order of shards.

There is nothing to exchange here: one replica's shards are values of the same program, and XLA decides what moves. The
results are those that devices working together would have.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from . import _reductions, _replicas

__all__ = ["all_gather", "all_reduce", "reduce_scatter"]


def all_gather(input_shards: Sequence[Any], axis: int = 0) -> list[Any]:
    """All shards joined along `axis`, once for each shard."""
    shards = _checked(input_shards)
    return [jnp.concatenate(shards, _replicas.dimension("axis", axis, shards[0]))] * len(shards)


def all_reduce(input_shards: Sequence[Any], op: str) -> list[Any]:
    """The shards reduced to one, once for each shard.

    Args:
        input_shards: Scalars, or vectors; shorter ones are padded with zeros to the longest.
        op: One of the operators of `reduce_scatter_op.reduce_scatter`.
    """
    rows = _rows(input_shards, op)
    if jnp.ndim(input_shards[0]) == 0:
        rows = rows[:, 0]
    if op == _reductions.LOCAL:
        return list(rows)
    return [_reductions.reduce(op, rows)] * len(rows)


def reduce_scatter(input_shards: Sequence[Any], op: str) -> list[Any]:
    """The shards reduced to one, cut into equal parts, one for each shard; the end is padded with zeros.

    Shard i gets part i. (The original's parts are rotated by some shards; these are not.)

    Args:
        input_shards: Scalars, or vectors; shorter ones are padded with zeros to the longest.
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
        raise ValueError(f"Shards are reduced as scalars or vectors, but these have {shards[0].ndim} dimensions.")
    shards = [jnp.reshape(s, -1) for s in shards]
    longest = max(s.size for s in shards)
    return jnp.stack([jnp.pad(s, (0, longest - s.size)) for s in shards])


def _checked(input_shards: Sequence[Any]) -> list[Any]:
    if not isinstance(input_shards, list | tuple) or not input_shards:
        raise ValueError(f"`input_shards` is {input_shards!r}. Give a list with one tensor per shard.")
    if len({id(shard) for shard in input_shards}) < len(input_shards):
        raise ValueError(f"One tensor stands for several of the {len(input_shards)} shards. Give one for each.")
    shards = [_replicas.tensors(shard) for shard in input_shards]
    for what, found in (("dtypes", {str(s.dtype) for s in shards}), ("ranks", {s.ndim for s in shards})):
        if len(found) > 1:
            raise ValueError(f"The shards have different {what}: {sorted(found)}. Give them all the same.")
    return shards
