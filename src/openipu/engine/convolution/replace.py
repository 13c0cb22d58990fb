"""From an equation to its replacement: `replacement(eqn, platform)` returns a function of the operands, or None."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from openipu.engine.facts.costs import Part, Rewritten
from openipu.engine.facts.layers import is_backward_in_trace, layer_in_trace

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import source_info_util
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var
from jax.sharding import AxisType
from jax.typing import DTypeLike

from . import image_patches, pooling, winograd
from .arrays import computed_once
from .direct import direct
from .elementwise import elementwise
from .geometry import Geometry
from .pooling import Windows
from .rule import LIMITS, plan_convolution, plan_pooling

Lowering = Callable[..., list[jax.Array]]

_NEUTRAL: dict[str, tuple[pooling.Binary, pooling.Binary | None]] = {
    "reduce_window_max": (lax.max, lax.max),
    "reduce_window_min": (lax.min, lax.min),
    "reduce_window_sum": (lax.add, None),
}
_COMBINE: dict[str, pooling.Binary] = {"max": lax.max, "min": lax.min, "add": lax.add, "add_any": lax.add}
_PREFER: dict[str, pooling.Binary] = {"ge": lax.ge, "le": lax.le}


def replacement(eqn: JaxprEqn, platform: str) -> Lowering | None:
    """What to call with the equation's operands instead of binding it, or None to keep the equation."""
    maker = _MAKERS.get(eqn.primitive.name)
    return maker(eqn, platform) if maker and _real(eqn) and not _explicit(eqn) else None


def _aval(var: Var | Literal) -> Any:
    """Shape, dtype and sharding of a variable. JAX only declares their abstract base."""
    return var.aval


def _real(eqn: JaxprEqn) -> bool:
    """Whether all operands are real floating-point numbers, which is what layers compute with."""
    return all(jnp.issubdtype(_aval(v).dtype, jnp.floating) for v in eqn.invars)


def _explicit(eqn: JaxprEqn) -> bool:
    """Whether types say how arrays are divided over devices. Reshapes would then have to say it, too."""
    mesh = getattr(_aval(eqn.outvars[0]).sharding, "mesh", None)
    return AxisType.Explicit in getattr(mesh, "axis_types", ())


def _accumulator(dtype: DTypeLike) -> Any:
    """The dtype for sums: those of half-precision numbers are kept in float32."""
    return jnp.promote_types(dtype, jnp.float32)


def rewritten_form(eqn: JaxprEqn, platform: str) -> Rewritten:
    """What becomes of a convolution that is replaced, in words, and in which layer."""
    choice = plan_convolution(_geometry(eqn), platform)
    assert choice is not None
    parts = [choice.kind.replace("_", " ")]
    parts += [f"tiles of {choice.tile}"] if choice.tile else []
    parts += [f"{choice.chunk} positions at once"] if choice.chunk else []
    parts += ["group by group"] if choice.by_group else []
    shapes = " x ".join(f"{_aval(v).dtype}[{','.join(map(str, _aval(v).shape))}]" for v in eqn.invars)
    names = source_info_util.current_name_stack().stack
    part: Part = "backward" if is_backward_in_trace(names) else "forward"
    return Rewritten(layer_in_trace(names), part, shapes, ", ".join(parts))


def _geometry(eqn: JaxprEqn) -> Geometry:
    lhs, rhs = map(_aval, eqn.invars)
    return Geometry.of(eqn.params, lhs.shape, rhs.shape, _accumulator(lhs.dtype).itemsize)


def _convolution(eqn: JaxprEqn, platform: str) -> Lowering | None:
    geo = _geometry(eqn)
    choice = plan_convolution(geo, platform)
    if choice is None:
        return None
    result = _aval(eqn.outvars[0]).dtype
    dtype = _accumulator(result)
    precision = eqn.params.get("precision")
    wall = computed_once if choice.wall else lambda x: x

    def convolution(a: jax.Array, b: jax.Array, geo: Geometry) -> jax.Array:
        if choice.kind == "elementwise":
            return elementwise(a, b, geo, dtype)
        if choice.kind in _WINOGRAD:
            return _WINOGRAD[choice.kind](a.astype(dtype), b.astype(dtype), geo, dtype, precision, choice.tile)
        return _PATCHES[choice.kind](a, b, geo, dtype, precision, choice.chunk)

    def whole(a: jax.Array, b: jax.Array) -> jax.Array:
        return image_patches.by_group(a, b, geo, convolution) if choice.by_group else convolution(a, b, geo)

    return lambda a, b: [wall(whole(a, b).astype(result))]


def _windows(eqn: JaxprEqn, platform: str, operand: int = 0) -> Windows | None:
    windows = Windows.of(eqn.params, _aval(eqn.invars[operand]).shape)
    return windows if plan_pooling(windows, platform, eqn.primitive.name) else None


def _pool(eqn: JaxprEqn, platform: str) -> Lowering | None:
    windows = _windows(eqn, platform)
    if windows is None:
        return None
    combine, extreme = _NEUTRAL[eqn.primitive.name]
    dtype = _aval(eqn.outvars[0]).dtype
    if extreme is not None:
        return lambda x: [pooling.reduce_windows(x, windows, combine, pooling.worst(dtype, extreme))]
    return lambda x: [pooling.reduce_windows(x.astype(_accumulator(dtype)), windows, combine, 0).astype(dtype)]


def _generic_pool(eqn: JaxprEqn, platform: str) -> Lowering | None:
    """`reduce_window` with its own initial value, for the reductions we know."""
    combine = _known_reduction(eqn.params.get("jaxpr"), eqn.params.get("consts", ()))
    windows = _windows(eqn, platform) if combine and len(eqn.invars) == 2 else None
    if combine is None or windows is None:
        return None
    neutral = 0 if combine is lax.add else pooling.worst(_aval(eqn.outvars[0]).dtype, combine)
    # XLA does not count padding as part of a window, but each window starts from the initial value.
    return lambda x, init: [
        combine(pooling.reduce_windows(x, windows, combine, neutral), jnp.broadcast_to(init, windows.out))
    ]


def _known_reduction(jaxpr: ClosedJaxpr | Jaxpr | None, consts: Sequence[object]) -> pooling.Binary | None:
    if jaxpr is None or len(consts):
        return None
    inner = jaxpr.jaxpr if isinstance(jaxpr, ClosedJaxpr) else jaxpr
    if len(inner.eqns) != 1 or set(map(id, inner.eqns[0].invars)) != set(map(id, inner.invars)):
        return None
    return _COMBINE.get(inner.eqns[0].primitive.name)


def _pool_gradient(eqn: JaxprEqn, platform: str) -> Lowering | None:
    windows = _windows(eqn, platform, operand=1)
    prefer = _PREFER.get(getattr(eqn.params["select_prim"], "name", ""))
    if windows is None or prefer is None:
        return None
    if eqn.primitive.name == "select_and_gather_add":
        return lambda t, x: [pooling.gather_windows(t, x, windows, prefer)]
    dtype = _aval(eqn.outvars[0]).dtype
    acc = dtype if windows.plain else _accumulator(dtype)
    return lambda t, x: [
        pooling.scatter_windows(t.astype(acc), x, windows, prefer, wall=LIMITS[platform].walls).astype(dtype)
    ]


_WINOGRAD = {
    "winograd": winograd.forward,
    "winograd_backward": winograd.backward,
    "winograd_scatter": winograd.scatter,
    "winograd_weights": winograd.weights,
}
_PATCHES = {
    "direct": direct,
    "gather": image_patches.gather,
    "gather_narrow": image_patches.gather_narrow,
    "gather_right": image_patches.gather_right,
    "scatter": image_patches.scatter,
}
_MAKERS: dict[str, Callable[[JaxprEqn, str], Lowering | None]] = {
    "conv_general_dilated": _convolution,
    "reduce_window_max": _pool,
    "reduce_window_min": _pool,
    "reduce_window_sum": _pool,
    "reduce_window": _generic_pool,
    "select_and_scatter_add": _pool_gradient,
    "select_and_gather_add": _pool_gradient,
}
