"""Exchange values between replicas."""

from __future__ import annotations

from typing import Any

from openipu.engine.devices.replicas import REPLICA_AXIS
from openipu.engine.types import Array, Tree

import jax
import jax.numpy as jnp
from jax import lax

from . import _replicas

__all__ = ["all_gather", "all_to_all"]


def all_to_all(
    x: Array, split_dimension: int, concat_dimension: int, replication_factor: int, name: str | None = None
) -> Any:
    """The parts that all replicas send to this one, joined along `concat_dimension`.

    Every replica splits its `x` along `split_dimension` into one part per replica, and sends part i to replica i.

    >>> def program():
    ...     parts = 10 * ipu.replication_ops.replication_index() + np.arange(2)  # replica 1 has 10 and 11
    ...     return ipu.all_to_all_op.all_to_all(parts, split_dimension=0, concat_dimension=0, replication_factor=2)
    >>> print(strategy.run(program))
    [ 0 10]

    Args:
        x: An array whose length along `split_dimension` is a multiple of the number of replicas.
        split_dimension: The dimension that is split.
        concat_dimension: The dimension along which the parts are joined, in the order of the replicas.
        replication_factor: The number of replicas.
        name: A name for the operation in profiles.
    """
    count = _replicas.stated_count(replication_factor)
    with jax.named_scope(name or "all_to_all"):
        x = _replicas.tensors(x)
        split = _replicas.dimension("split_dimension", split_dimension, x)
        concat = _replicas.dimension("concat_dimension", concat_dimension, x)
        if isinstance(x.shape[split], int) and x.shape[split] % count:
            raise ValueError(
                f"Dimension {split} of a tensor of shape {x.shape} cannot be split over {count} replicas. "
                f"Make its length a multiple of {count}."
            )
        if count == 1:
            return x
        if _replicas.count() == 1:  # [Note: shapes before programs]
            shape = list(x.shape)
            shape[split] //= count
            shape[concat] *= count
            return jnp.zeros(shape, x.dtype)
        return lax.all_to_all(x, REPLICA_AXIS, split, concat, tiled=True)


def all_gather(x: Tree, replication_factor: int, name: str | None = None) -> Tree:
    """The values of `x` on all replicas, stacked along a new first axis: shape [replication_factor, ...].

    >>> def program():
    ...     return ipu.all_to_all_op.all_gather(ipu.replication_ops.replication_index(), replication_factor=2)
    >>> print(strategy.run(program))
    [0 1]

    Args:
        x: An array, or a list of arrays, which gives a list. A list of one array gives an array.
        replication_factor: The number of replicas.
        name: A name for the operation in profiles.
    """
    count = _replicas.stated_count(replication_factor)

    def one(x: Array) -> Any:
        if _replicas.count() > 1:
            return lax.all_gather(x, REPLICA_AXIS)
        return x[None] if count == 1 else jnp.zeros((count, *x.shape), x.dtype)  # [Note: shapes before programs]

    with jax.named_scope(name or "all_gather"):
        return _replicas.each(x, one)
