"""Histograms."""

from __future__ import annotations

from openipu import _validate as validate
from openipu.engine.types import Array

import jax.numpy as jnp
from jax.typing import ArrayLike

from ._operation import array, operation

__all__ = ["fixed_width_bins", "histogram", "histogram_normalize", "histogram_update"]


@operation
def histogram(
    inputs: ArrayLike,
    levels: ArrayLike,
    absolute_of_input: bool = False,
    name: str | None = None,  # noqa: ARG001
) -> Array:
    """How many values are in each bin, as float32: one more bin than there are levels.

    >>> print(ipu.statistics_ops.histogram([0.1, 0.4, 0.6, 2.0], levels=[0.5, 1.0]))
    [2. 1. 1.]

    Args:
        inputs: An array.
        levels: The boundaries of the bins, in ascending order. A value that equals a boundary is in the bin above.
        absolute_of_input: Whether absolute values are counted.
        name: A name for the operation in profiles.
    """
    values, edges = array(inputs).reshape(-1), array(levels)
    if edges.ndim != 1:
        raise ValueError(f"`levels` has the shape {edges.shape}. Give a vector.")
    values = jnp.abs(values) if validate.flag("absolute_of_input", absolute_of_input) else values
    common = jnp.promote_types(values.dtype, edges.dtype)
    bins = jnp.searchsorted(edges.astype(common), values.astype(common), side="right")
    # Counted in whole numbers: float32 stops at 2**24.
    return jnp.zeros(len(edges) + 1, "int32").at[bins].add(1).astype("float32")


@operation
def histogram_update(
    hist: ArrayLike,
    inputs: ArrayLike,
    levels: ArrayLike,
    absolute_of_input: bool = False,
    name: str | None = None,
) -> Array:
    """A histogram with more values counted. The arguments are those of `histogram`.

    >>> counts = ipu.statistics_ops.histogram([0.1, 0.4, 0.6, 2.0], levels=[0.5, 1.0])
    >>> print(ipu.statistics_ops.histogram_update(counts, [0.7, 0.8], levels=[0.5, 1.0]))
    [2. 3. 1.]
    """
    old, new = array(hist), histogram(inputs, levels, absolute_of_input, name)
    if old.shape != new.shape:
        raise ValueError(
            f"`hist` has {old.shape} bins, but the levels make {new.shape}. Give one more bin than levels."
        )
    return old + new


@operation
def histogram_normalize(hist: ArrayLike, name: str | None = None) -> Array:  # noqa: ARG001
    """The share of each bin; zeros if nothing has been counted.

    >>> print(ipu.statistics_ops.histogram_normalize([1.0, 3.0]))
    [0.25 0.75]
    """
    counts = array(hist)
    return counts / jnp.maximum(jnp.sum(counts), 1)


@operation
def fixed_width_bins(inputs: ArrayLike, n_bins: int, name: str | None = None) -> Array:  # noqa: ARG001
    """The boundaries of `n_bins` bins of the same width, from the smallest to the largest of the values.

    >>> print(ipu.statistics_ops.fixed_width_bins([0.0, 3.0, 9.0], n_bins=3))
    [3. 6.]

    Args:
        inputs: An array.
        n_bins: The number of bins: there is one boundary less.
        name: A name for the operation in profiles.
    """
    values, count = array(inputs), validate.count("n_bins", n_bins, least=2)
    return jnp.linspace(jnp.min(values), jnp.max(values), count + 1)[1:-1]
