"""Which inputs of a function its results depend on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from openipu.engine.shapes import has_gradient
from openipu.engine.types import Array

import jax
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var

Counts = Callable[[Var | Literal], bool]


def differentiable_inputs(function: Callable[[list[Array]], Array], arrays: list[Array]) -> list[bool]:
    """For each of `arrays`, whether the single result of `function(arrays)` can have a gradient with respect to it.

    Gradients stop at `stop_gradient` and at everything that is not a floating-point number. Each result of a loop is
    assumed to depend on all of its inputs.
    """
    return _used(jax.make_jaxpr(function)(arrays).jaxpr, [True], _has_gradient)


def without_gradient(loss: Callable[[list[Array]], Array], weights: list[Array], names: Sequence[str]) -> list[str]:
    """The names of the weights that the loss does not depend on."""
    used = differentiable_inputs(loss, weights)
    return [name for name, is_used in zip(names, used, strict=True) if not is_used]


def refuse_without_gradient(
    loss: Callable[[list[Array]], Array], weights: list[Array], names: Sequence[str], remedy: str
) -> None:
    """Raise if the loss does not depend on all weights, as the original does outside of `fit`."""
    missing = without_gradient(loss, weights, names)
    if missing:
        raise ValueError(
            f"{len(missing)} of {len(weights)} variables to train have no gradient, because the loss does not depend "
            f"on them: {', '.join(missing)}. {remedy}"
        )


def needed_inputs(jaxpr: Jaxpr, results: Sequence[bool]) -> list[bool]:
    """For each input of a program, whether one of the wanted `results` can depend on it in any way."""
    return _used(jaxpr, results, _is_variable)


def _used(jaxpr: Jaxpr, results: Sequence[bool], counts: Counts) -> list[bool]:
    """Which inputs of a program are needed for the wanted `results`. Only variables that count are followed."""
    needed = {id(v) for v, wanted in zip(jaxpr.outvars, results, strict=True) if wanted and counts(v)}
    for eqn in reversed(jaxpr.eqns):
        wanted = [id(v) in needed for v in eqn.outvars]
        if any(wanted) and (eqn.primitive.name != "stop_gradient" or counts is _is_variable):
            used = _inputs(eqn, wanted, counts)
            needed |= {id(v) for v, is_used in zip(eqn.invars, used, strict=True) if is_used and counts(v)}
    return [id(v) in needed for v in jaxpr.invars]


def _inputs(eqn: JaxprEqn, wanted: list[bool], counts: Counts) -> list[bool]:
    """Which inputs of an equation its wanted results need: exact for calls and branches, all for everything else."""
    if eqn.primitive.name == "cond":
        each = [_used(branch.jaxpr, wanted, counts) for branch in eqn.params["branches"]]
        return [True, *(any(used) for used in zip(*each, strict=True))]
    inner: Any = eqn.params.get("jaxpr", eqn.params.get("call_jaxpr"))
    inner = getattr(inner, "jaxpr", inner)
    same = inner is not None and (len(inner.invars), len(inner.outvars)) == (len(eqn.invars), len(eqn.outvars))
    if same and eqn.primitive.name not in ("scan", "while"):
        return _used(inner, wanted, counts)
    return [True] * len(eqn.invars)


def _is_variable(variable: Var | Literal) -> bool:
    return not isinstance(variable, Literal)


def _has_gradient(variable: Var | Literal) -> bool:
    """Whether a gradient can flow through the variable."""
    aval: Any = variable.aval
    return _is_variable(variable) and has_gradient(aval)
