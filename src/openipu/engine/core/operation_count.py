"""How many operations a traced program takes: the single count behind reports and automatic splits.

XLA's own count is not used, because it counts the body of a loop once, however often it runs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var

_MOVES = frozenset(
    """
    all_gather all_to_all axis_index bitcast_convert_type broadcast broadcast_in_dim concatenate
    convert_element_type copy copy_p create_token device_put dynamic_slice dynamic_update_slice empty expand_dims
    gather iota name optimization_barrier pad pbroadcast ppermute psum psum2 psum_invariant pvary random_seed
    random_unwrap random_wrap reduce_precision reduce_scatter reshape rev scatter select_n sharding_constraint
    slice split squeeze stop_gradient transpose
    """.split()  # noqa: SIM905
)
"""Primitives that only move data, within a device or between devices."""
_BY_INPUT = ("reduce", "arg", "cum", "scatter", "select_and", "sort")
"""Name prefixes of primitives that take one operation per element they read. Their inner programs are scalar."""


def operations(program: ClosedJaxpr | Jaxpr) -> float:
    """How many operations a traced program takes on one device.

    A loop counts as often as it runs, or once if that is not known in advance. Of several branches, only the most
    expensive one counts, and what no result depends on does not count.
    """
    jaxpr = program.jaxpr if isinstance(program, ClosedJaxpr) else program
    return float(sum(map(_of, _needed(jaxpr))))


def _needed(jaxpr: Jaxpr) -> list[JaxprEqn]:
    """The equations that results depend on. The compiler removes all others."""
    read = {variable for variable in jaxpr.outvars if isinstance(variable, Var)}
    found = []
    for equation in reversed(jaxpr.eqns):
        if equation.effects or not read.isdisjoint(equation.outvars):
            read.update(variable for variable in equation.invars if isinstance(variable, Var))
            found.append(equation)
    return found


def _of(equation: JaxprEqn) -> float:
    name, parameters = equation.primitive.name, equation.params
    if name in _MOVES:
        return 0.0
    if name == "dot_general":
        ((contracted, _), _) = parameters["dimension_numbers"]
        left = _shape(equation.invars[0])
        return 2 * _written(equation) * float(math.prod(left[axis] for axis in contracted))
    if name == "conv_general_dilated":
        return _convolution(equation)
    if name.startswith(_BY_INPUT):
        return float(max(_size(variable) for variable in equation.invars))
    inner = list(_inner(parameters))
    if not inner:
        return _written(equation)
    costs = [operations(program) for program in inner]
    turns = int(parameters["length"]) if name == "scan" else 1
    return max(costs) if name == "cond" else turns * sum(costs)


def _convolution(equation: JaxprEqn) -> float:
    """Each output takes a kernel's worth of multiply-adds, not counting the zeros between dilated inputs."""
    kernel = _shape(equation.invars[1])
    features = kernel[equation.params["dimension_numbers"].rhs_spec[0]]
    apart = math.prod(equation.params["lhs_dilation"])
    return 2 * _written(equation) * float(math.prod(kernel) / max(features, 1) / apart)


def _written(equation: JaxprEqn) -> float:
    return float(sum(map(_size, equation.outvars)))


def _size(variable: Var | Literal) -> int:
    return math.prod(_shape(variable))


def _shape(variable: Var | Literal) -> tuple[int, ...]:
    shape: tuple[int, ...] = getattr(variable.aval, "shape", ())
    return shape


def _inner(parameters: dict[str, Any]) -> Iterator[ClosedJaxpr | Jaxpr]:
    for value in parameters.values():
        for part in value if isinstance(value, list | tuple) else (value,):
            if isinstance(part, ClosedJaxpr | Jaxpr):
                yield part
