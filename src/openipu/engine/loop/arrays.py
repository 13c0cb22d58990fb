"""Small functions on trees of arrays, used inside of programs."""

from __future__ import annotations

from typing import Any

from openipu.engine.types import Tree

import jax
import jax.numpy as jnp


def row(body: Tree, index: Any) -> Tree:
    """Batch number `index` of a slab."""
    return jax.tree.map(lambda a: a[index], body)


def length(body: Tree) -> int:
    """How many batches a slab has room for on one replica."""
    return int(jax.tree.leaves(body)[0].shape[0])


def fetch(resident: Tree, batch: Tree) -> Tree:
    """The batch itself, or the rows of the resident arrays that it names."""
    if resident is None:
        return batch
    return jax.tree.map(lambda a: a.at[batch].get(mode="promise_in_bounds"), resident)


def rows_of(batch: Tree) -> int:
    """Samples in a batch; 0 if there is no batch."""
    leaves = jax.tree.leaves(batch)
    return int(leaves[0].shape[0]) if leaves else 0


def own_column(body: Tree) -> Tree:
    """The batches of one replica, where the axis for replicas has length one."""
    return jax.tree.map(lambda a: a[:, 0], body)


def zeros(shapes: Tree, rows: int | None = None) -> Tree:
    """Zeros like a tree of arrays or of their descriptions; `rows` adds a leading axis of that length."""
    front = () if rows is None else (rows,)
    return jax.tree.map(lambda s: jnp.zeros((*front, *s.shape), s.dtype), shapes)


def as_before(new: Tree, old: Tree) -> Tree:
    """`new` with the dtypes of `old`: what a Keras variable does on assignment, and what a loop needs."""
    return jax.tree.map(lambda a, b: jnp.asarray(a, b.dtype), new, old)


def is_float(array: Any) -> bool:
    """Whether an array holds floating-point numbers, so that gradients flow through it and it can be averaged."""
    return bool(jnp.issubdtype(array.dtype, jnp.floating))
