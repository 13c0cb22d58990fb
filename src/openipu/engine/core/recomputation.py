"""Recomputation: a backward pass that computes values again instead of keeping them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from .pipelining import Recompute

CHECKPOINT = "recomputation_checkpoint"
"""JAX's name for the values that users mark to be kept."""


def recomputed(function: Callable[..., Any], what: Recompute) -> Callable[..., Any]:
    """The function. When it is differentiated, `what` is computed again; the rest is kept."""
    if what is Recompute.NOTHING:
        return function
    marked = jax.checkpoint_policies.save_only_these_names(CHECKPOINT)
    return jax.checkpoint(function, policy=marked if what is Recompute.UNMARKED else None)
