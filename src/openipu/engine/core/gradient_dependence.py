"""Which inputs of a function its result depends on, as far as gradients go."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Jaxpr, Literal


def differentiable_inputs(function: Callable[[list[Any]], Any], arrays: list[Any]) -> list[bool]:
    """For each of `arrays`, whether the one result of `function(arrays)` can have a gradient with respect to it.

    A gradient does not pass `stop_gradient` nor anything that is not a floating number. Loops and branches are taken
    as a whole: what goes into one is used by everything that comes out.
    """
    return _used(jax.make_jaxpr(function)(arrays).jaxpr, [True])


def _used(jaxpr: Jaxpr, results: list[bool]) -> list[bool]:
    """Which inputs of a program those of its results need that are asked for."""
    needed = {id(v) for v, wanted in zip(jaxpr.outvars, results, strict=True) if wanted and _carries(v)}
    for eqn in reversed(jaxpr.eqns):
        wanted = [id(v) in needed for v in eqn.outvars]
        if any(wanted) and eqn.primitive.name != "stop_gradient":
            needed |= {id(v) for v, used in zip(eqn.invars, _inputs(eqn, wanted), strict=True) if used and _carries(v)}
    return [id(v) in needed for v in jaxpr.invars]


def _inputs(eqn: Any, wanted: list[bool]) -> list[bool]:
    """Which inputs of an equation its wanted results need: exactly for calls, all of them for everything else."""
    inner = eqn.params.get("jaxpr", eqn.params.get("call_jaxpr"))
    inner = getattr(inner, "jaxpr", inner)
    same = inner is not None and (len(inner.invars), len(inner.outvars)) == (len(eqn.invars), len(eqn.outvars))
    if same and eqn.primitive.name not in ("scan", "while"):
        return _used(inner, wanted)
    return [True] * len(eqn.invars)


def _carries(variable: Any) -> bool:
    return not isinstance(variable, Literal) and bool(jnp.issubdtype(variable.aval.dtype, jnp.inexact))
