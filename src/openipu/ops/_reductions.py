"""Collective operators by name: how the values of several replicas or shards are combined."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from openipu import _validate as validate
from openipu.engine.types import Array

import jax.numpy as jnp
import numpy as np

ADD, MEAN = "COLLECTIVE_OP_ADD", "COLLECTIVE_OP_MEAN"
SQUARE_ADD, LOCAL = "COLLECTIVE_OP_SQUARE_ADD", "COLLECTIVE_OP_LOCAL"
_LOGICAL: dict[str, Callable[..., Any]] = {
    "COLLECTIVE_OP_LOGICAL_AND": jnp.all,
    "COLLECTIVE_OP_LOGICAL_OR": jnp.any,
}
_NUMERIC: dict[str, Callable[..., Any]] = {
    ADD: jnp.sum,
    "COLLECTIVE_OP_MUL": jnp.prod,
    "COLLECTIVE_OP_MIN": jnp.min,
    "COLLECTIVE_OP_MAX": jnp.max,
    SQUARE_ADD: lambda values, axis: jnp.sum(values * values, axis),
    MEAN: jnp.mean,
}
NAMES = (*_NUMERIC, *_LOGICAL, LOCAL)


def check(op: str, dtype: np.dtype[Any]) -> None:
    """Raise unless `op` is an operator for values of `dtype`."""
    validate.choice("op", op, NAMES)
    if op != LOCAL and (op in _LOGICAL) != (dtype == jnp.bool_):
        wanted = "booleans" if op in _LOGICAL else "numbers"
        raise ValueError(f"`op` is {op!r}, which takes {wanted}, but the values are {dtype}. Cast them first.")


def reduce(op: str, values: Array) -> Any:
    """The rows of `values` reduced to one row of the same dtype."""
    result = {**_NUMERIC, **_LOGICAL}[op](values, axis=0)
    return result.astype(values.dtype)
