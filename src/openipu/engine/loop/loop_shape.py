"""The form of the loop over updates, chosen by measurements on each platform."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from openipu.engine.types import Array, Tree

import jax
import numpy as np
from jax import lax
from jax.extend.core import Jaxpr, jaxpr_as_fun

SMALL_STEP = 300
"""An update that runs at most this many equations is small: launching its kernels costs more than running them."""


def prefers_known_length(platform: str) -> bool:
    """Whether a loop of known length is faster on `platform`.

    A GPU runs a loop of known length without the host, but asks the host before each iteration of a loop of unknown
    length, which takes 20 microseconds on an H200. So full executions get a program with a loop of known length
    there, and a short last one gets another program.
    """
    return platform == "gpu"


def repeat(body: Callable[[Any, Tree], Tree], carry: Tree, count: Array | int, most: int, *, known: bool) -> Tree:
    """Run `body(index, carry)` for each index below `count`, which is between 1 and `most`.

    If the length is `known`, all `most` run. Four small bodies are then run in a row without the loop's own kernels:
    an MLP's step fell from 31 to 26 microseconds. Larger ones are not, because that multiplies compile time.
    """
    if most == 1:
        return body(0, carry)
    if not known:
        return lax.fori_loop(0, count, body, carry)
    # Traced here, so that its size is known without tracing it twice.
    closed, shapes = jax.make_jaxpr(body, return_shape=True)(np.int32(0), carry)
    structure = jax.tree.structure(shapes)

    def again(index: Array, carry: Tree) -> Tree:
        return jax.tree.unflatten(structure, jaxpr_as_fun(closed)(index, *jax.tree.leaves(carry)))

    return lax.fori_loop(0, most, again, carry, unroll=min(unrolled(equations(closed.jaxpr)), most))


def unrolled(size: int) -> int:
    """How many updates that run so many equations follow each other without the loop."""
    return 4 if size <= SMALL_STEP else 1


def equations(jaxpr: Jaxpr) -> int:
    """The number of equations that a traced program runs. Those of a scan, as in an LSTM, run in each iteration."""
    count = len(jaxpr.eqns)
    for eqn in jaxpr.eqns:
        times = eqn.params["length"] if eqn.primitive.name == "scan" else 1
        inner = [getattr(p, "jaxpr", p) for p in eqn.params.values()]
        count += times * sum(equations(p) for p in inner if hasattr(p, "eqns"))
    return count
