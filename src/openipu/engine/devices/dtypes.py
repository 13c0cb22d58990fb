"""The dtypes that devices compute in."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def narrowed(batch: Any) -> Any:
    """Arrays in the dtypes that devices use, so that JAX need not warn about those that it would change."""
    return jax.tree.map(lambda a: np.asarray(a, jax.dtypes.canonicalize_dtype(a.dtype)), batch)


def is_numeric(dtype: Any) -> bool:
    """Whether devices compute with it: a number of any kind, or True and False."""
    return bool(jnp.issubdtype(dtype, np.number) or jnp.issubdtype(dtype, np.bool_))
