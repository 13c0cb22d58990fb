"""The order of operations."""

from __future__ import annotations

from collections.abc import Sequence

from openipu import _validate as validate
from openipu.engine.types import Array

import jax
from jax import lax
from jax.typing import ArrayLike

from ._operation import arrays, operation

__all__ = ["barrier"]


@operation
def barrier(
    tensors: Sequence[ArrayLike],
    insert_barrier_for_gradients: bool = False,
    name: str | None = None,  # noqa: ARG001
) -> list[Array]:
    """The tensors, none of which can be used before all of them are computed.

    >>> a, b = ipu.control_flow_ops.barrier([np.ones(2), np.zeros(3)])
    >>> a.shape, b.shape
    ((2,), (3,))

    Args:
        tensors: A list of arrays.
        insert_barrier_for_gradients: Whether this also holds for their gradients.
        name: A name for the operation in profiles.
    """
    values = arrays(list(validate.sequence("tensors", tensors)))
    both = validate.flag("insert_barrier_for_gradients", insert_barrier_for_gradients)
    found: list[Array] = lax.optimization_barrier(values) if both else _forward(values)
    return found


@jax.custom_vjp
def _forward(values: list[Array]) -> list[Array]:
    """A barrier whose gradients pass freely. That of JAX is one for gradients, too."""
    found: list[Array] = lax.optimization_barrier(values)
    return found


_forward.defvjp(lambda values: (_forward(values), None), lambda _, gradients: (gradients,))
