"""Sums and means over replicas."""

from __future__ import annotations

from openipu.engine.devices.replicas import REPLICA_AXIS
from openipu.engine.types import Tree

import jax
from jax import lax

from . import _replicas

__all__ = ["assume_equal_across_replicas", "cross_replica_mean", "cross_replica_sum"]


def cross_replica_sum(x: Tree, replica_group_size: int | None = None, name: str | None = None) -> Tree:
    """The sum of `x` over all replicas, or over this replica's group.

    The gradient is the sum of the gradients in the same group, as for the sum of all replicas' losses.

    >>> def program():  # on the two replicas, it sums 0 and 1
    ...     return ipu.cross_replica_ops.cross_replica_sum(ipu.replication_ops.replication_index())
    >>> print(strategy.run(program))
    1

    Args:
        x: An array or any tree of arrays.
        replica_group_size: Replicas per group: with 2, replicas 0 and 1 are a group, 2 and 3 the next. It must divide
            the number of replicas. None for a single group.
        name: A name for the operation in profiles.
    """
    groups = _replicas.groups(replica_group_size)
    with jax.named_scope(name or "cross_replica_sum"):
        x = _replicas.tensors(x)
        return x if _replicas.count() == 1 else lax.psum(x, REPLICA_AXIS, axis_index_groups=groups)


def cross_replica_mean(x: Tree, replica_group_size: int | None = None, name: str | None = None) -> Tree:
    """The mean of `x` over all replicas, or over this replica's group.

    The arguments are as in `cross_replica_sum`. Means of integers are floats.

    >>> print(strategy.run(lambda: ipu.cross_replica_ops.cross_replica_mean(ipu.replication_ops.replication_index())))
    0.5
    """
    groups = _replicas.groups(replica_group_size)
    with jax.named_scope(name or "cross_replica_mean"):
        x = _replicas.tensors(x)
        if _replicas.count() == 1:
            return jax.tree.map(lambda a: a / 1, x)  # floats, as on several replicas
        return lax.pmean(x, REPLICA_AXIS, axis_index_groups=groups)


def assume_equal_across_replicas(tensors: Tree, inplace: bool = False) -> Tree:
    """`tensors`, unchanged.

    The original needs to be told that values are equal on all replicas; programs here do not. `inplace` is ignored.

    >>> print(strategy.run(lambda: ipu.cross_replica_ops.assume_equal_across_replicas(np.ones(2))))
    [1. 1.]
    """
    del inplace
    return _replicas.tensors(tensors)
