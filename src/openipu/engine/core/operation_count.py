"""How many operations a traced program takes: the single count behind reports and automatic splits.

XLA's own count is not used, because it counts the body of a loop once, however often it runs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from openipu.engine.facts.layers import is_backward_in_trace, layer_in_trace

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
_VIEWS = frozenset(
    """
    broadcast_in_dim dynamic_slice expand_dims gather name pvary reshape rev sharding_constraint slice squeeze
    stop_gradient transpose
    """.split()  # noqa: SIM905
)
"""Primitives whose result is computed where it is read, as far as XLA can: they are no traffic of their own."""
_BY_INPUT = ("reduce", "arg", "cum", "scatter", "select_and", "sort")
"""Name prefixes of primitives that take one operation per element they read. Their inner programs are scalar."""
_CALLS = frozenset("jit pjit closed_call core_call custom_jvp_call custom_vjp_call checkpoint remat remat2".split())  # noqa: SIM905
"""Primitives that only call an inner program."""
PRODUCTS: Final = ("dot_general", "conv_general_dilated")


@dataclass(frozen=True, slots=True)
class Unit:
    """Where in a model something is computed."""

    layer: str
    """Names of layers from outside to inside, with slashes; empty outside of all layers."""
    backward: bool


@dataclass(frozen=True, slots=True, eq=False)
class Value:
    """An array in a traced program."""

    bytes: float
    maker: Unit | None
    """None for what comes from outside of a program or of a loop."""
    source: int | None
    """The number of the program's argument that it is a part of, if it is."""


@dataclass(frozen=True, slots=True)
class Work:
    """An equation of a traced program, with everything that it does over all turns of the loops around it."""

    equation: JaxprEqn | None
    """None for what a program returns."""
    unit: Unit | None
    """None for loops, whose bodies are in other values of this kind, and for the end of a program."""
    times: float
    operations: float
    reads: tuple[Value, ...]
    writes: tuple[Value, ...]


def operations(program: ClosedJaxpr | Jaxpr) -> float:
    """How many operations a traced program takes on one device.

    A loop counts as often as it runs, or once if that is not known in advance. Of several branches, only the most
    expensive one counts, and what no result depends on does not count.
    """
    return float(sum(work.operations for work in works(program)))


def works(program: ClosedJaxpr | Jaxpr) -> list[Work]:
    """The equations of a program, and of those inside it, one by one."""
    walk, jaxpr = _Walk([]), _open(program)
    given = [_value(variable, None, number) for number, variable in enumerate(jaxpr.invars)]
    results = walk.run(jaxpr, given, (), 1.0)
    return [*walk.done, Work(None, None, 1.0, 0.0, tuple(results), ())]


@dataclass(frozen=True, slots=True)
class _Walk:
    """Follows values through a program. Inner programs that are only called become parts of it."""

    done: list[Work]

    def run(self, jaxpr: Jaxpr, given: list[Value], names: tuple[Any, ...], times: float) -> list[Value]:
        """Follow a program that is given these values. Returns those that it returns."""
        known = dict(zip(jaxpr.invars, given, strict=True))
        known |= {variable: _value(variable) for variable in jaxpr.constvars}

        def read(variable: Var | Literal) -> Value:
            return Value(0.0, None, None) if isinstance(variable, Literal) else known[variable]

        for equation in _needed(jaxpr):
            values = [read(variable) for variable in equation.invars]
            inside = (*names, *equation.source_info.name_stack.stack)
            known.update(zip(equation.outvars, self._equation(equation, values, inside, times), strict=True))
        return [read(variable) for variable in jaxpr.outvars]

    def _equation(self, equation: JaxprEqn, values: list[Value], names: tuple[Any, ...], times: float) -> list[Value]:
        name, inner = equation.primitive.name, [_open(program) for program in _inner(equation.params)]
        if name in _VIEWS:
            [new] = equation.outvars
            return [Value(min(values[0].bytes, _bytes(new)), values[0].maker, values[0].source)]
        if inner and not name.startswith(_BY_INPUT):
            if name in _CALLS and len(inner) == 1 and len(inner[0].invars) == len(values):
                return self.run(inner[0], values, names, times)
            return self._around(equation, inner, values, names, times)
        unit = _unit(names)
        changed = values[1:] if name == "dynamic_update_slice" else values
        made = [Value(_bytes(variable), unit, None) for variable in equation.outvars]
        if name == "dynamic_update_slice":
            made = [Value(values[1].bytes, unit, None)]
        self.done.append(Work(equation, unit, times, times * _of(equation), tuple(changed), tuple(made)))
        return made

    def _around(
        self, equation: JaxprEqn, inner: list[Jaxpr], values: list[Value], names: tuple[Any, ...], times: float
    ) -> list[Value]:
        """Follow the inner programs of a loop, of branches, or of a program for each device."""
        name = equation.primitive.name
        turns = times * int(equation.params["length"]) if name == "scan" else times
        programs = [max(inner, key=operations)] if name == "cond" else inner
        made = [Value(_bytes(variable), None, None) for variable in equation.outvars]
        self.done.append(Work(equation, None, times, 0.0, tuple(values), tuple(made)))
        outer = values[1:] if name == "cond" else values
        for program in programs:
            same = outer if len(outer) == len(program.invars) else [None] * len(program.invars)
            given = [
                _value(variable, None, value.source if value else None)
                for variable, value in zip(program.invars, same, strict=True)
            ]
            results = self.run(program, given, names, turns)
            self.done.append(Work(equation, None, turns, 0.0, tuple(results), ()))
        return made


def _needed(jaxpr: Jaxpr) -> list[JaxprEqn]:
    """The equations that results depend on. The compiler removes all others."""
    read = {variable for variable in jaxpr.outvars if isinstance(variable, Var)}
    found = []
    for equation in reversed(jaxpr.eqns):
        if equation.effects or not read.isdisjoint(equation.outvars):
            read.update(variable for variable in equation.invars if isinstance(variable, Var))
            found.append(equation)
    return found[::-1]


def _of(equation: JaxprEqn) -> float:
    """The operations of an equation without inner programs."""
    name = equation.primitive.name
    if name in _MOVES:
        return 0.0
    if name == "dot_general":
        ((contracted, _), _) = equation.params["dimension_numbers"]
        left = _shape(equation.invars[0])
        return 2 * _written(equation) * float(math.prod(left[axis] for axis in contracted))
    if name == "conv_general_dilated":
        return _convolution(equation)
    if name.startswith(_BY_INPUT):
        return float(max(_size(variable) for variable in equation.invars))
    return _written(equation)


def _convolution(equation: JaxprEqn) -> float:
    """Each output takes a kernel's worth of multiply-adds, not counting the zeros between dilated inputs."""
    kernel = _shape(equation.invars[1])
    features = kernel[equation.params["dimension_numbers"].rhs_spec[0]]
    apart = math.prod(equation.params["lhs_dilation"])
    return 2 * _written(equation) * float(math.prod(kernel) / max(features, 1) / apart)


def _unit(names: tuple[Any, ...]) -> Unit:
    return Unit(layer_in_trace(names), is_backward_in_trace(names))


def _written(equation: JaxprEqn) -> float:
    return float(sum(map(_size, equation.outvars)))


def _size(variable: Var | Literal) -> int:
    return math.prod(_shape(variable))


def _bytes(variable: Var | Literal) -> float:
    return float(_size(variable) * getattr(getattr(variable.aval, "dtype", None), "itemsize", 0))


def _value(variable: Var | Literal, maker: Unit | None = None, source: int | None = None) -> Value:
    return Value(_bytes(variable), maker, source)


def _shape(variable: Var | Literal) -> tuple[int, ...]:
    shape: tuple[int, ...] = getattr(variable.aval, "shape", ())
    return shape


def _open(program: ClosedJaxpr | Jaxpr) -> Jaxpr:
    return program.jaxpr if isinstance(program, ClosedJaxpr) else program


def _inner(parameters: dict[str, Any]) -> Iterator[ClosedJaxpr | Jaxpr]:
    for value in parameters.values():
        for part in value if isinstance(value, list | tuple) else (value,):
            if isinstance(part, ClosedJaxpr | Jaxpr):
                yield part
