"""Which inputs of a function can have a gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from openipu.engine.types import Array

import jax
import jax.numpy as jnp
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var


def differentiable_inputs(function: Callable[[list[Array]], Array], arrays: list[Array]) -> list[bool]:
    """For each of `arrays`, whether the single result of `function(arrays)` can have a gradient with respect to it.

    Gradients stop at `stop_gradient` and at everything that is not a floating-point number. Each result of a loop or
    branch is assumed to depend on all of its inputs.
    """
    return _used(jax.make_jaxpr(function)(arrays).jaxpr, [True])


def _used(jaxpr: Jaxpr, results: list[bool]) -> list[bool]:
    """Which inputs of a program are needed for the wanted `results`."""
    needed = {id(v) for v, wanted in zip(jaxpr.outvars, results, strict=True) if wanted and _carries(v)}
    for eqn in reversed(jaxpr.eqns):
        wanted = [id(v) in needed for v in eqn.outvars]
        if any(wanted) and eqn.primitive.name != "stop_gradient":
            needed |= {id(v) for v, used in zip(eqn.invars, _inputs(eqn, wanted), strict=True) if used and _carries(v)}
    return [id(v) in needed for v in jaxpr.invars]


def _inputs(eqn: JaxprEqn, wanted: list[bool]) -> list[bool]:
    """Which inputs of an equation its wanted results need: exact for calls, all of them for everything else."""
    inner: Any = eqn.params.get("jaxpr", eqn.params.get("call_jaxpr"))
    inner = getattr(inner, "jaxpr", inner)
    same = inner is not None and (len(inner.invars), len(inner.outvars)) == (len(eqn.invars), len(eqn.outvars))
    if same and eqn.primitive.name not in ("scan", "while"):
        return _used(inner, wanted)
    return [True] * len(eqn.invars)


def _carries(variable: Var | Literal) -> bool:
    """Whether a gradient can flow through the variable."""
    aval: Any = variable.aval
    return not isinstance(variable, Literal) and bool(jnp.issubdtype(aval.dtype, jnp.inexact))
