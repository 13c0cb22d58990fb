"""`rewrite(fn, platform)`: the same function with slow windowed primitives replaced and sums of gradients kept.

The function is traced once, and the trace is run again with replacements. Inner programs (jit, scan, while, cond,
checkpoint, custom derivatives) are rebuilt only if they contain something to replace. Every other equation is bound
unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import wraps
from typing import Any, TypeVar

import jax
from jax.extend import source_info_util
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var, jaxpr_as_fun

from .arrays import computed_once
from .gradient_sums import sums_to_keep
from .replace import replacement, rewritten_form
from .rule import LIMITS
from .tuning import note

F = TypeVar("F", bound=Callable[..., Any])


def rewrite(fn: F, platform: str) -> F:
    """`fn` with convolutions and poolings replaced as `rule.py` says for `platform`, and sums of gradients kept.

    Platforms have JAX's names: "cpu", "gpu", "cuda", "rocm", "tpu". Apply this last, after differentiation, to the
    whole training step inside the loop. On a platform without a rule, this returns `fn` itself.
    """
    if platform not in LIMITS:
        return fn

    @wraps(fn)
    def rewritten(*args: Any, **kwargs: Any) -> Any:
        closed, shapes = jax.make_jaxpr(fn, return_shape=True)(*args, **kwargs)
        flat = jax.tree.leaves((args, kwargs))
        pass_ = _Pass(platform)
        if pass_.touches(closed.jaxpr):
            out = pass_.run(closed.jaxpr, closed.consts, flat)
        else:
            out = jaxpr_as_fun(closed)(*flat)
        return jax.tree.unflatten(jax.tree.structure(shapes), out)

    return rewritten  # type: ignore[return-value]


class _Pass:
    """The rewriting of one program. Remembers inner programs, so that each is rebuilt only once."""

    def __init__(self, platform: str) -> None:
        self.platform = platform
        self._touched: dict[int, bool] = {}
        self._rebuilt: dict[int, ClosedJaxpr] = {}
        self._kept: list[Any] = []  # keeps objects alive whose `id` is a key above

    def touches(self, jaxpr: Jaxpr) -> bool:
        """Whether anything in the program or its inner programs has to be replaced or kept."""
        if id(jaxpr) not in self._touched:
            self._kept.append(jaxpr)
            self._touched[id(jaxpr)] = bool(sums_to_keep(jaxpr, self.platform)) or any(
                replacement(eqn, self.platform) is not None or any(map(self.touches, _inner(eqn))) for eqn in jaxpr.eqns
            )
        return self._touched[id(jaxpr)]

    def run(self, jaxpr: Jaxpr, consts: Sequence[Any], args: Sequence[Any]) -> list[Any]:
        """The results of the program, run with replacements."""
        env: dict[Any, Any] = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *args], strict=True))
        last = {v: i for i, eqn in enumerate(jaxpr.eqns) for v in eqn.invars if not isinstance(v, Literal)}
        kept = {v for v in jaxpr.outvars if not isinstance(v, Literal)}
        sums = sums_to_keep(jaxpr, self.platform)

        def read(v: Var | Literal) -> Any:
            return v.val if isinstance(v, Literal) else env[v]

        for i, eqn in enumerate(jaxpr.eqns):
            with context(eqn):
                out = self._equation(eqn, [read(v) for v in eqn.invars])
                if eqn.outvars and eqn.outvars[0] in sums:  # [Note: a wall XLA:CPU respects]
                    out = [computed_once(out[0])]
            env.update(zip(eqn.outvars, out, strict=True))
            for v in eqn.invars:
                if not isinstance(v, Literal) and last[v] == i and v not in kept:
                    env.pop(v, None)
        return [read(v) for v in jaxpr.outvars]

    def _equation(self, eqn: JaxprEqn, values: list[Any]) -> Sequence[Any]:
        new = replacement(eqn, self.platform)
        if new is not None:
            if eqn.primitive.name == "conv_general_dilated":
                note(rewritten_form(eqn, self.platform))
            return new(*values)
        if not any(map(self.touches, _inner(eqn))):
            return bind(eqn, eqn.params, values)
        if eqn.primitive.name == "shard_map":
            return self._shard_map(eqn, values)
        return bind(eqn, {name: self._param(value) for name, value in eqn.params.items()}, values)

    def _param(self, value: Any) -> Any:
        """A parameter of an equation, with the programs in it rebuilt."""
        if isinstance(value, ClosedJaxpr):
            return self._rebuild(value) if self.touches(value.jaxpr) else value
        if isinstance(value, Jaxpr):
            return self._rebuild_open(value) if self.touches(value) else value
        if isinstance(value, tuple) and any(isinstance(v, ClosedJaxpr | Jaxpr) for v in value):
            return tuple(map(self._param, value))
        return value

    def _rebuild(self, closed: ClosedJaxpr) -> ClosedJaxpr:
        if id(closed) not in self._rebuilt:
            self._kept.append(closed)
            avals = [v.aval for v in closed.jaxpr.invars]
            self._rebuilt[id(closed)] = jax.make_jaxpr(lambda *args: self.run(closed.jaxpr, closed.consts, args))(
                *avals
            )
        return self._rebuilt[id(closed)]

    def _rebuild_open(self, jaxpr: Jaxpr) -> Jaxpr:
        """Rebuild the open program of a checkpoint. It cannot hold constants: if it would need any, it is unchanged."""
        new = self._rebuild(ClosedJaxpr(jaxpr, ()))
        return jaxpr if new.consts or jaxpr.constvars else new.jaxpr

    def _shard_map(self, eqn: JaxprEqn, values: list[Any]) -> Sequence[Any]:
        """Trace a program per device again, under its mesh, where its axis names exist."""
        p = eqn.params
        body = p["jaxpr"]
        manual = p["newly_manual_axes"] if "newly_manual_axes" in p else p["manual_axes"]  # JAX renamed it
        mapped: Callable[..., Any] = jax.shard_map(
            lambda *args: tuple(self.run(body, (), args)),
            mesh=p["mesh"],
            in_specs=tuple(p["in_specs"]),
            out_specs=tuple(p["out_specs"]),
            axis_names=set(manual),
            check_vma=p["check_vma"],
        )
        return tuple(mapped(*values))


def _inner(eqn: JaxprEqn) -> list[Jaxpr]:
    """The programs among an equation's parameters."""
    found = []
    for value in eqn.params.values():
        for item in value if isinstance(value, tuple) else (value,):
            if isinstance(item, ClosedJaxpr):
                found.append(item.jaxpr)
            elif isinstance(item, Jaxpr):
                found.append(item)
    return found


def bind(eqn: JaxprEqn, params: Mapping[str, Any], values: list[Any]) -> Sequence[Any]:
    """The results of an equation with other parameters."""
    bound = eqn.primitive.get_bind_params(dict(params))
    # Before JAX 0.10, functions among the parameters were returned separately.
    functions, rest = bound if isinstance(bound, tuple) else ((), bound)
    out = eqn.primitive.bind(*functions, *values, **rest)
    return out if eqn.primitive.multiple_results else [out]


def context(eqn: JaxprEqn) -> ExitStack:
    """The context in which the equation was traced: its name for profilers and its compute context."""
    stack = ExitStack()
    names = source_info_util.current_name_stack() + eqn.source_info.name_stack
    stack.enter_context(source_info_util.user_context(eqn.source_info.traceback, name_stack=names))
    if hasattr(eqn, "ctx"):
        stack.enter_context(eqn.ctx.manager)
    return stack
