"""Sums of gradients that are computed once, as along the residual connections of a transformer.

The gradient of a value that was read several times is a sum. If several equations read that sum, XLA:CPU computes it
again for each of them, together with every sum that it was made from. The gradient that runs back through a residual
network passes through one such sum per block, so all blocks together cost the square of their number: a third of the
time of six transformer blocks.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import jax.numpy as jnp
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var

from .rule import LIMITS

SMALLEST = 4096
"""Sums with fewer elements are computed again sooner than they are written and read."""


def sums_to_keep(jaxpr: Jaxpr, platform: str) -> frozenset[Var]:
    """The sums of gradients in a program that are read more than once and large enough to be kept."""
    sums = [eqn.outvars[0] for eqn in jaxpr.eqns if _is_large_sum(eqn)] if LIMITS[platform].walls else []
    if not sums:
        return frozenset()
    reads = [*(eqn.invars for eqn in jaxpr.eqns), jaxpr.outvars]
    readers = Counter(v for read in reads for v in {x for x in read if not isinstance(x, Literal)})
    return frozenset(v for v in sums if readers[v] > 1)


def _is_large_sum(eqn: JaxprEqn) -> bool:
    """Whether the equation is a sum of two gradients. JAX adds gradients with a primitive of its own."""
    if eqn.primitive.name != "add_any":
        return False
    result: Any = eqn.outvars[0].aval
    return jnp.issubdtype(result.dtype, jnp.floating) and result.size >= SMALLEST
