"""Tells whether two traced programs compute the same: the proof that a layer may be run in parts.

Every result is written as a number that depends on the operations and the arguments it is computed from, so neither
the order of equations nor results that nobody uses make a difference. What can be computed from constants alone is
computed, because a trace may have done that already.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var

Known = int | np.ndarray
"""A number that stands for a result, or a constant."""

_CALLS = ("jit", "pjit", "closed_call", "core_call")
"""Primitives that do nothing but run the program inside them."""
_LARGEST = 2**20
"""The size up to which constants are computed."""


def same_program(first: ClosedJaxpr, second: ClosedJaxpr) -> bool:
    """Whether two programs take the same arguments and compute the same results from them."""
    with jax.ensure_compile_time_eval():
        return _signature(first) == _signature(second)


def _signature(program: ClosedJaxpr) -> tuple[list[Any], list[int]]:
    arguments = [(getattr(aval, "shape", None), str(_dtype(aval))) for aval in program.in_avals]
    return arguments, list(map(_number, _inside(program, range(len(arguments)))))


def _inside(program: ClosedJaxpr, arguments: Iterable[Known]) -> list[Known]:
    return _results(program.jaxpr, list(map(np.asarray, program.consts)), arguments)


def _results(jaxpr: Jaxpr, constants: Sequence[Known], arguments: Iterable[Known]) -> list[Known]:
    known: dict[Var, Known] = dict(zip(jaxpr.constvars, constants, strict=True))
    known |= zip(jaxpr.invars, arguments, strict=True)

    def of(atom: Var | Literal) -> Known:
        return np.asarray(atom.val, _dtype(atom.aval)) if isinstance(atom, Literal) else known[atom]

    for equation in jaxpr.eqns:
        known |= zip(equation.outvars, _equation(equation, [of(atom) for atom in equation.invars]), strict=True)
    return [of(atom) for atom in jaxpr.outvars]


def _equation(equation: JaxprEqn, arguments: list[Known]) -> list[Known]:
    name, parameters = equation.primitive.name, equation.params
    if name in _CALLS:
        return _inside(parameters["jaxpr" if "jaxpr" in parameters else "call_jaxpr"], arguments)
    if name == "convert_element_type" and _dtype(equation.invars[0].aval) == _dtype(equation.outvars[0].aval):
        return arguments  # it only makes a type firm
    if _is_constant(equation, arguments):
        found = equation.primitive.bind(*arguments, **parameters)
        return [np.asarray(value) for value in (found if equation.primitive.multiple_results else [found])]
    made = hash((name, _parameter(parameters), tuple(map(_number, arguments))))
    return [hash((made, i)) for i in range(len(equation.outvars))]


def _is_constant(equation: JaxprEqn, arguments: Sequence[Known]) -> bool:
    """Whether an equation has constant arguments only, and is small and simple enough to be computed."""
    if equation.effects or any(isinstance(value, ClosedJaxpr | Jaxpr) for value in equation.params.values()):
        return False
    sizes = [math.prod(getattr(made.aval, "shape", ())) for made in equation.outvars]
    return max(sizes, default=0) <= _LARGEST and all(isinstance(value, np.ndarray) for value in arguments)


def _dtype(aval: Any) -> Any:
    return getattr(aval, "dtype", None)


def _parameter(value: Any) -> Any:
    """A setting of an operation, as something that can be compared."""
    if isinstance(value, ClosedJaxpr):
        return tuple(map(_number, _inside(value, range(len(value.jaxpr.invars)))))
    if isinstance(value, Jaxpr):
        return tuple(map(_number, _results(value, range(-len(value.constvars), 0), range(len(value.invars)))))
    if isinstance(value, dict):
        # Whether a type is weak does not change a value.
        return tuple((name, _parameter(part)) for name, part in value.items() if name != "weak_type")
    if isinstance(value, list | tuple):
        return tuple(map(_parameter, value))
    if callable(value) and not isinstance(value, type):
        return type(value).__name__
    return re.sub(r"0x[0-9a-f]+", "", str(value))


def _number(value: Known) -> int:
    if isinstance(value, np.ndarray):
        return hash((value.shape, str(value.dtype), value.tobytes()))
    return value
