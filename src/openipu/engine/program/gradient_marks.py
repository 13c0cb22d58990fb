"""Gradients that code asks for after it has computed the value, as with a gradient tape.

JAX differentiates functions, not values that are already there. So a request only leaves a mark in the trace, and
`resolved` finds the marks when the traced function has ended. A mark names targets and sources. The equations that lead
from the sources to the targets are run as a function that JAX differentiates, in the place of the mark's equation:

    w ----> y = f(w) ----> loss ----> mark(loss, w) ----> update          the trace
    w ----> vjp of (w -> y, loss) ----> gradient --------> update         what is run

Equations that depend on the sources are run once, inside the differentiated function, and their other results are taken
from there. A mark that needs equations from before an earlier mark (a second request for the same loss, or the gradient
of a gradient) runs them again.
"""

from __future__ import annotations

import functools
import operator
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from openipu.engine.convolution.interpreter import bind, context
from openipu.engine.core.enqueued import traced_program
from openipu.engine.types import Array, Tree

import jax
import jax.numpy as jnp
import keras
import numpy as np
from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal, Primitive, Var

from . import added_losses
from .program_trace import ProgramTrace, current
from .variable_scope import VariableScope

_mark = Primitive("gradient_mark")
_mark.multiple_results = True
_local = threading.local()

Values = dict[Var, Any]


_mark.def_abstract_eval(lambda *avals, targets: avals[2 * targets :])


def level() -> object:
    """Identifies the function, body of a loop or branch whose marks are found together; None if there is none."""
    return getattr(_local, "level", None)


@dataclass(frozen=True, slots=True)
class Beginning:
    """Where code has begun to compute what it asks the gradients of."""

    level: object
    values: Mapping[int, Any]
    """The variables' values there, by identity."""

    @classmethod
    def here(cls) -> Beginning:
        """Where the code that is being traced is now."""
        trace = current()
        return cls(level(), {} if trace is None else trace.scope.snapshot())


def gradients(
    targets: Sequence[Array], sources: Sequence[Any], weights: Sequence[Array | None], began: Beginning
) -> list[Array]:
    """The gradients of the sum of `targets` with respect to `sources`; zeros where there is no connection.

    Args:
        targets: Values that the function being traced has computed.
        sources: Keras variables, or values that the targets were computed from.
        weights: What to multiply each target with, element by element; None for ones.
        began: Where the targets began to be computed. A variable that has got another value since then is meant with
            both of its values.
    """
    trace = current()
    if trace is None:
        raise RuntimeError(
            "The gradients of values of JAX were asked for outside of a program. Ask for them in a function that you "
            "give to `strategy.run`."
        )
    values = [_values(trace, began, s) if isinstance(s, keras.Variable) else [s] for s in sources]
    if trace.discovering:
        return [jnp.zeros(s.shape, jax.dtypes.canonicalize_dtype(s.dtype)) for s in sources]
    if level() is None or level() != traced_program():
        raise RuntimeError(
            "Gradients cannot be taken here: the function is not a `tf.function`, or it runs inside a loop, "
            "conditional or transformation of JAX. Decorate the function that you give to `strategy.run` with "
            "`@tf.function`, or use `ipu.training.value_and_gradients`."
        )
    if began.level != level():
        raise RuntimeError(
            "The tape was opened on one side of a loop, conditional or program, and the gradients are taken on the "
            "other. Do both on the same side."
        )
    pairs = zip(targets, weights, strict=True)
    scales = [jnp.ones_like(t) if w is None else jnp.asarray(w, t.dtype) for t, w in pairs]
    flat = [value for group in values for value in group]
    found = iter(_mark.bind(*targets, *scales, *flat, targets=len(targets)))
    return [functools.reduce(operator.add, [next(found) for _ in group]) for group in values]


def _values(trace: ProgramTrace, began: Beginning, variable: keras.Variable) -> list[Any]:
    now = trace.scope.get_current_value(variable)
    then = trace.scope.value_in(began.values, variable)
    return [now] if then is now or then is None else [then, now]


def resolved(function: Callable[[], Tree]) -> Tree:
    """The result of a function that may ask for gradients, in the program that is being traced."""
    trace = current()
    assert trace is not None
    if trace.discovering or level() == traced_program():
        return function()  # in the second case, the function around this one finds the marks
    found = _Traced(trace, function)
    closed, shapes = jax.make_jaxpr(found.run, return_shape=True)()
    out = _Program(closed).results()
    return found.finish(jax.tree.unflatten(jax.tree.structure(shapes), out))


class _Traced:
    """A function as one without side effects: what it assigns is among its results."""

    def __init__(self, trace: ProgramTrace, function: Callable[[], Tree]) -> None:
        self._trace, self._function = trace, function
        self._scope = VariableScope(trace.scope)
        self._static: list[Any] = []
        self._structure: Any = None
        self._losses: added_losses.Added = ()

    def run(self) -> Tree:
        before, _local.level = level(), traced_program()
        try:
            with self._trace.within(self._scope) as scope:
                result = self._function()
        finally:
            _local.level = before
        leaves, self._structure = jax.tree.flatten(result)
        self._static = [None if _is_array(leaf) else leaf for leaf in leaves]
        arrays = [leaf for leaf in leaves if _is_array(leaf)]
        values = [scope.state_mapping[id(v)] for v in scope.assigned.values()]
        self._losses = added_losses.taken(scope)
        cells = [scope.cell(owner) for owner in scope.touched.values()]
        return arrays, values, cells, [loss for _, loss in self._losses]

    def finish(self, results: Tree) -> Tree:
        """Make the changes in the scope around the function, and return its result."""
        arrays, values, cells, losses = results
        for variable, value in zip(self._scope.assigned.values(), values, strict=True):
            self._trace.scope.add_update((variable, value))
        for owner, cell in zip(self._scope.touched.values(), cells, strict=True):
            self._trace.scope.set_cell(owner, cell)
        added_losses.added_again((layer, loss) for (layer, _), loss in zip(self._losses, losses, strict=True))
        rest = iter(arrays)
        return jax.tree.unflatten(self._structure, [next(rest) if s is None else s for s in self._static])


def _is_array(leaf: object) -> bool:
    return isinstance(leaf, jax.Array | np.ndarray | np.generic)


@dataclass(frozen=True, slots=True)
class _Request:
    """What one mark asks for."""

    targets: list[Var | Literal]
    weights: list[Var | Literal]
    sources: list[Var]

    @classmethod
    def of(cls, eqn: JaxprEqn) -> _Request:
        count = eqn.params["targets"]
        sources = [source for source in eqn.invars[2 * count :] if not isinstance(source, Literal)]
        if len(sources) < len(eqn.outvars):
            raise ValueError(
                "A gradient was asked for with respect to a constant. Ask for it with respect to a variable, or to a "
                "value that the targets were computed from."
            )
        return cls(eqn.invars[:count], eqn.invars[count : 2 * count], sources)


class _Program:
    """The equations of a traced function."""

    def __init__(self, closed: ClosedJaxpr) -> None:
        self._eqns, self._out = closed.jaxpr.eqns, closed.jaxpr.outvars
        self._values: Values = dict(zip(closed.jaxpr.constvars, closed.consts, strict=True))

    def results(self) -> list[Any]:
        """Run the equations."""
        start = 0
        for index, eqn in enumerate(self._eqns):
            if eqn.primitive is _mark:
                self._run_up_to(start, index)
                start = index + 1
        self._run(range(start, len(self._eqns)), self._values)
        return [_read(v, self._values) for v in self._out]

    def _run_up_to(self, start: int, index: int) -> None:
        """Run the equations from `start` to the mark at `index`, and the mark."""
        eqn = self._eqns[index]
        request = _Request.of(eqn)
        path = self._between(request, index)
        if (path and path[0] < start) or self._nested(request, index):
            self._run(range(start, index), self._values)
            self._values.update(zip(eqn.outvars, self._gradients(index, self._values), strict=True))
            return
        dependent = self._dependent(request.sources, range(start, index))
        self._run([i for i in range(start, index) if i not in dependent], self._values)
        kept = [v for i in sorted(dependent) for v in self._eqns[i].outvars]
        found, results = self._differentiated(request, sorted(dependent), kept, self._values)
        self._values.update(zip(kept, results, strict=True))
        self._values.update(zip(eqn.outvars, found, strict=True))

    def _gradients(self, index: int, values: Values) -> list[Array]:
        request = _Request.of(self._eqns[index])
        parts = [request]
        if self._nested(request, index):  # one by one, because a source cannot be given and computed at once
            parts = [_Request(request.targets, request.weights, [source]) for source in request.sources]
        return [g for part in parts for g in self._differentiated(part, self._between(part, index), [], values)[0]]

    def _nested(self, request: _Request, end: int) -> bool:
        """Whether a source is computed from another one."""
        made = {v for i in self._dependent(request.sources, range(end)) for v in self._eqns[i].outvars}
        return not made.isdisjoint(request.sources)

    def _differentiated(
        self, request: _Request, indices: Sequence[int], kept: Sequence[Var], values: Values
    ) -> tuple[list[Array], list[Array]]:
        """The gradients that a mark asks for, and the values of `kept`, from the equations with these numbers."""

        def forward(sources: list[Array]) -> tuple[list[Array], list[Array]]:
            inner = values | dict(zip(request.sources, sources, strict=True))
            self._run(indices, inner)
            return [_read(t, inner) for t in request.targets], [inner[v] for v in kept]

        sources = [values[s] for s in request.sources]
        _, backward, results = jax.vjp(forward, sources, has_aux=True)
        inner = values | dict(zip(kept, results, strict=True))
        (found,) = backward([_read(w, inner) for w in request.weights])
        return found, results

    def _run(self, indices: Sequence[int], values: Values) -> None:
        for index in indices:
            eqn = self._eqns[index]
            with context(eqn):
                if eqn.primitive is _mark:
                    out: Sequence[Any] = self._gradients(index, values)
                else:
                    out = bind(eqn, eqn.params, [_read(v, values) for v in eqn.invars])
            values.update(zip(eqn.outvars, out, strict=True))

    def _dependent(self, sources: Sequence[Var], indices: Sequence[int]) -> set[int]:
        """The numbers of the equations whose results depend on the sources."""
        reached, found = set(sources), set()
        for index in indices:
            eqn = self._eqns[index]
            if any(not isinstance(v, Literal) and v in reached for v in eqn.invars):
                found.add(index)
                reached.update(eqn.outvars)
        return found

    def _between(self, request: _Request, end: int) -> list[int]:
        """The numbers of the equations that lead from the sources to the targets, in order."""
        dependent = self._dependent(request.sources, range(end))
        needed, found = {t for t in request.targets if not isinstance(t, Literal)}, []
        for index in range(end - 1, -1, -1):
            eqn = self._eqns[index]
            if index in dependent and not needed.isdisjoint(eqn.outvars):
                found.append(index)
                needed.update(v for v in eqn.invars if not isinstance(v, Literal))
        return found[::-1]


def _read(v: Var | Literal, values: Values) -> Any:
    return v.val if isinstance(v, Literal) else values[v]
