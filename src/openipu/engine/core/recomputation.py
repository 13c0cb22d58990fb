"""Recomputation: a backward pass that computes values again instead of keeping them.

[Note: parts in branches] `jax.checkpoint` separates what is computed again from what was computed before by means of a
barrier. On CPUs, XLA removes barriers before it decides on an order. It then computes everything again at the beginning
of the backward pass and keeps it, so nothing is saved. Operations inside a branch stay there. So on CPUs, each part is
computed again in a branch that is always taken, which XLA cannot know. On GPUs, a branch would ask the host.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

from openipu.engine.shapes import has_gradient
from openipu.engine.types import Array

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var, jaxpr_as_fun

from .pipelining import Recompute

CHECKPOINT = "recomputation_checkpoint"
"""JAX's name for the values that users mark to be kept."""

_Arrays = list[Array]
_Part = Callable[[_Arrays, _Arrays], tuple[_Arrays, _Arrays]]
"""Takes and returns floating-point arrays, and all others."""


def recomputed(function: Callable[..., Any], what: Recompute) -> Callable[..., Any]:
    """The function. When it is differentiated, `what` is computed again; the rest is kept."""
    if what is Recompute.NOTHING:
        return function
    marked = jax.checkpoint_policies.save_only_these_names(CHECKPOINT)
    return jax.checkpoint(function, policy=marked if what is Recompute.UNMARKED else None)


def recomputed_in_parts(function: Callable[..., Any], platform: str) -> Callable[..., Any]:
    """The function. When it is differentiated, each part between two marks is computed again when its turn comes.

    What lies behind the last mark is kept: its turn comes first. Without marks, everything is computed again.
    """

    def run(*arguments: Any) -> Any:
        closed, shapes = jax.make_jaxpr(function, return_shape=True)(*arguments)
        flat = jax.tree.leaves(arguments)
        ends = [position + 1 for position, equation in enumerate(closed.jaxpr.eqns) if _marks(equation)]
        if ends:
            results = _in_parts(closed, ends, flat, platform)
        else:
            results = recomputed(jaxpr_as_fun(closed), Recompute.UNMARKED)(*flat)
        return jax.tree.unflatten(jax.tree.structure(shapes), results)

    return run


def _in_parts(closed: ClosedJaxpr, ends: list[int], arguments: _Arrays, platform: str) -> list[Any]:
    """The results of a program, computed in parts that end at these positions."""
    jaxpr = closed.jaxpr
    values = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*closed.consts, *arguments], strict=True))
    for start, end in pairwise([0, *ends, len(jaxpr.eqns)]):
        part = _part(jaxpr, start, end)
        given = [values[v] for v in part.jaxpr.invars]
        last = end == len(jaxpr.eqns)
        results = jaxpr_as_fun(part)(*given) if last or _acts(part) else _again(part, platform)(*given)
        values |= zip(part.jaxpr.outvars, results, strict=True)
    return [v.val if isinstance(v, Literal) else values[v] for v in jaxpr.outvars]


def _marks(equation: JaxprEqn) -> bool:
    return equation.primitive.name == "name" and equation.params["name"] == CHECKPOINT


def _acts(part: ClosedJaxpr) -> bool:
    """Whether a part does more than compute (a call of the host, for example), so that it must run only once."""
    return any(type(effect).__name__ != "NamedAxisEffect" for effect in part.effects)


def _part(jaxpr: Jaxpr, start: int, end: int) -> ClosedJaxpr:
    """The operations from `start` to `end`. It takes what they use, and returns what is used after them."""
    equations = jaxpr.eqns[start:end]
    made = dict.fromkeys(v for equation in equations for v in equation.outvars)
    used = dict.fromkeys(v for equation in equations for v in equation.invars if isinstance(v, Var))
    later = {v for equation in jaxpr.eqns[end:] for v in equation.invars if isinstance(v, Var)}
    later |= {v for v in jaxpr.outvars if isinstance(v, Var)}
    inputs, outputs = [v for v in used if v not in made], [v for v in made if v in later]
    effects = frozenset(effect for equation in equations for effect in equation.effects)
    return ClosedJaxpr(Jaxpr((), inputs, outputs, equations, effects, jaxpr.debug_info), ())


def _again(part: ClosedJaxpr, platform: str) -> Callable[..., _Arrays]:
    """A part that keeps only its inputs for its derivative."""
    function = jaxpr_as_fun(part)
    if platform != "cpu":
        checkpointed: Callable[..., _Arrays] = jax.checkpoint(function)
        return checkpointed
    float_in, float_out = ([has_gradient(v.aval) for v in side] for side in (part.jaxpr.invars, part.jaxpr.outvars))

    def separated(floats: _Arrays, others: _Arrays) -> tuple[_Arrays, _Arrays]:
        return _divide(function(*_merge(floats, others, float_in)), float_out)

    in_branch = _in_branch(separated)
    return lambda *given: _merge(*in_branch(*_divide(list(given), float_in)), float_out)


def _in_branch(part: _Part) -> _Part:
    """The part. Its derivative computes it again in a branch. See [Note: parts in branches]."""

    def forward(floats: _Arrays, others: _Arrays) -> tuple[tuple[_Arrays, _Arrays], tuple[_Arrays, _Arrays]]:
        return part(floats, others), (floats, others)

    def backward(kept: tuple[_Arrays, _Arrays], given: tuple[_Arrays, _Arrays]) -> tuple[_Arrays, None]:
        def gradients(floats: _Arrays, others: _Arrays, given: _Arrays) -> _Arrays:
            _, pull, _ = jax.vjp(lambda values: part(values, others), floats, has_aux=True)
            return list(pull(given)[0])

        # One of each, because some may be constant zeros.
        some = [g.reshape(-1)[0].astype(jnp.float32) for g in given[0] if g.size]
        if not some:
            return gradients(*kept, given[0]), None
        never = jnp.max(jnp.stack(some)) > jnp.inf
        zeros = [jnp.zeros_like(value) for value in kept[0]]
        return lax.cond(never, lambda *_: zeros, gradients, *kept, given[0]), None

    run = jax.custom_vjp(part)
    run.defvjp(forward, backward)
    return run


def _divide(arrays: _Arrays, float_: list[bool]) -> tuple[_Arrays, _Arrays]:
    pairs = list(zip(arrays, float_, strict=True))
    return [a for a, is_float in pairs if is_float], [a for a, is_float in pairs if not is_float]


def _merge(floats: _Arrays, others: _Arrays, float_: list[bool]) -> _Arrays:
    first, second = iter(floats), iter(others)
    return [next(first) if is_float else next(second) for is_float in float_]
