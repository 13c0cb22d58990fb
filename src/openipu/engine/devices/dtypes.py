"""The dtypes that devices compute in."""

from __future__ import annotations

from openipu.engine.types import Tree

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike


def narrowed(batch: Tree) -> Tree:
    """The arrays in the dtypes that devices use, so that JAX does not warn about converting them."""
    return jax.tree.map(lambda a: np.asarray(a, jax.dtypes.canonicalize_dtype(a.dtype)), batch)


def is_numeric(dtype: DTypeLike) -> bool:
    """Whether devices can compute with this dtype: numbers of any kind, or booleans."""
    return bool(jnp.issubdtype(dtype, np.number) or jnp.issubdtype(dtype, np.bool_))
