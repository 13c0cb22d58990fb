"""Small functions on trees of arrays, for use inside programs."""

from __future__ import annotations

from openipu.engine.shapes import HasDtype
from openipu.engine.types import Array, Tree

import jax
import jax.numpy as jnp


def row(body: Tree, index: Array | int) -> Tree:
    """The batch at `index` in the body of a slab."""
    return jax.tree.map(lambda a: a[index], body)


def length(body: Tree) -> int:
    """The number of batches that a slab has room for on one replica."""
    return int(jax.tree.leaves(body)[0].shape[0])


def fetch(resident: Tree, batch: Tree) -> Tree:
    """The batch itself, or the rows of the resident arrays whose numbers it holds."""
    if resident is None:
        return batch
    return jax.tree.map(lambda a: a.at[batch].get(mode="promise_in_bounds"), resident)


def rows_of(batch: Tree) -> int:
    """The number of samples in a batch, or 0 if there is no batch. Numbers beside the arrays do not count."""
    return next((int(leaf.shape[0]) for leaf in jax.tree.leaves(batch) if leaf.shape), 0)


def own_column(body: Tree) -> Tree:
    """The batches of one replica, from a body whose replica axis has length one."""
    return jax.tree.map(lambda a: a[:, 0], body)


def zeros(shapes: Tree, rows: int | None = None) -> Tree:
    """Zeros with the shapes of a tree of arrays or descriptions; `rows` adds a leading axis of that length."""
    front = () if rows is None else (rows,)
    return jax.tree.map(lambda s: jnp.zeros((*front, *s.shape), s.dtype), shapes)


def as_before(new: Tree, old: Tree) -> Tree:
    """`new` in the dtypes of `old`. Keras variables convert like this on assignment, and loops need it."""
    return jax.tree.map(lambda a, b: jnp.asarray(a, b.dtype), new, old)


def is_float(array: HasDtype) -> bool:
    """Whether an array holds real floating-point numbers, so that it can be averaged."""
    return bool(jnp.issubdtype(array.dtype, jnp.floating))
