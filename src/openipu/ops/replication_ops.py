"""Which replica a program runs on."""

from __future__ import annotations

from typing import Any

from openipu.engine.devices.replicas import REPLICA_AXIS

import jax
import jax.numpy as jnp
from jax import lax

from . import _replicas

__all__ = ["replication_index"]


def replication_index(name: str | None = None) -> Any:
    """The number of this replica, from 0, as an int32 scalar; 0 outside of programs.

    >>> print(strategy.run(ipu.replication_ops.replication_index))
    0
    """
    with jax.named_scope(name or "replication_index"):
        return jnp.int32(0) if _replicas.count() == 1 else lax.axis_index(REPLICA_AXIS).astype(jnp.int32)
