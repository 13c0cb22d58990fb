"""What arrays look like, without their values."""

from __future__ import annotations

from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from .types import Tree

Signature = tuple[jax.tree_util.PyTreeDef, tuple[tuple[tuple[int, ...], np.dtype], ...]]


def specs_of(tree: Tree) -> Tree:
    """The `jax.ShapeDtypeStruct` of every array in a tree."""
    return jax.tree.map(lambda a: jax.ShapeDtypeStruct(np.shape(a), a.dtype), tree)


def signature(tree: Tree) -> Signature:
    """The structure, shapes and dtypes of arrays, to compare batches by and to look up programs by."""
    leaves, structure = jax.tree.flatten(tree)
    return structure, tuple((a.shape, np.dtype(a.dtype)) for a in leaves)


class HasDtype(Protocol):
    """An array, or the description of one."""

    @property
    def dtype(self) -> Any:
        """The type of its elements."""


def has_gradient(array: HasDtype) -> bool:
    """Whether a gradient can flow through an array: floating-point and complex numbers."""
    return bool(jnp.issubdtype(array.dtype, jnp.inexact))
