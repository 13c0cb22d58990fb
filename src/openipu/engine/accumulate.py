"""Gradients of several micro-batches -> the gradient of one update."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

Tree = Any


class Reduction(enum.Enum):
    """How the gradients of the micro-batches of one update become one gradient."""

    SUM = 0
    MEAN = 1
    RUNNING_MEAN = 2

    @classmethod
    def parse(cls, value: Any) -> Reduction:
        """The method that a name (in any case) or a member stands for."""
        if isinstance(value, cls):
            return value
        if isinstance(value, str) and value.upper() in cls.__members__:
            return cls[value.upper()]
        names = ", ".join(member.name for member in cls)
        raise ValueError(f"{value!r} is not a way to reduce accumulated gradients. Give one of {names}.")


@dataclass(frozen=True, slots=True)
class Accumulation:
    """`steps` micro-batches per update, reduced by `method`, added up in `dtype` (None: each gradient's own)."""

    steps: int = 1
    method: Reduction = Reduction.SUM
    dtype: str | None = None

    def start(self, weights: Tree) -> Tree:
        """The accumulators before the first micro-batch."""
        return jax.tree.map(lambda w: jnp.zeros(w.shape, self.dtype or w.dtype), weights)

    def add(self, total: Tree, gradients: Tree, position: Any, size: Any) -> Tree:
        """The accumulators after micro-batch number `position` (from 0) of an update of `size` micro-batches.

        A mean is built from scaled summands, so that it does not overflow where the sum would.
        """

        def one(total: Any, gradient: Any) -> Any:
            gradient = gradient.astype(total.dtype)
            if self.method is Reduction.SUM:
                return total + gradient
            if self.method is Reduction.MEAN:
                return total + gradient / jnp.asarray(size, total.dtype)
            number = jnp.asarray(position, total.dtype)
            return total * (number / (number + 1)) + gradient / (number + 1)

        return jax.tree.map(one, total, gradients)
