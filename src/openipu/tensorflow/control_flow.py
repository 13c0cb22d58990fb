"""Loops and conditionals of a `tf.function`, as part of the program.

AutoGraph turns `for`, `while` and `if` into calls that get the variables of the function (its state) and the bodies.
Here they become the loops and conditionals of the engine, if what decides about them is computed by the program;
otherwise they stay Python's.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from openipu.engine.program.gradient_marks import resolved
from openipu.engine.program.program_trace import ProgramTrace, current
from openipu.engine.types import Array

import jax
import jax.numpy as jnp
import numpy as np
import tensorflow as tf
from jax.typing import ArrayLike

from .replacements import Replacements
from .values import Lazy, being_traced, native, where

State = tuple[Any, ...]
Body = Callable[..., None]


@dataclass(frozen=True, slots=True)
class Range(Lazy):
    """`tf.range` in a program: a loop runs over it without having its values."""

    start: Any
    limit: Any
    delta: Any
    dtype: Any

    @property
    def count(self) -> Any:
        """How many values it has; a number if that is known while tracing."""
        parts = (self.start, self.limit, self.delta)
        if not any(isinstance(part, jax.core.Tracer) for part in parts):
            return max(0, int(np.ceil((np.asarray(self.limit) - np.asarray(self.start)) / np.asarray(self.delta))))
        return jnp.maximum(0, jnp.ceil((self.limit - self.start) / self.delta)).astype(jnp.int32)

    def at(self, index: ArrayLike) -> Array:
        """The value at an index."""
        return jnp.asarray(self.start + index * self.delta).astype(self.dtype)

    def __jax_array__(self) -> Array:
        return jnp.arange(self.start, self.limit, self.delta, self.dtype)

    def __iter__(self) -> Iterator[Array]:
        return map(self.at, map(jnp.int32, range(self.count)))


def install(replacements: Replacements) -> None:
    """Let AutoGraph make loops and conditionals of programs."""
    from tensorflow.python.autograph.core import config
    from tensorflow.python.autograph.impl import api
    from tensorflow.python.autograph.operators import control_flow

    rules = tuple(config.DoNotConvert(package) for package in ("openipu", "jax", "jaxlib", "optree", "typing"))
    replacements.put(config, "CONVERSION_RULES", (*rules, *config.CONVERSION_RULES))
    # The namespace of all converted functions.
    operators = api._TRANSPILER.get_extra_locals()["ag__"]
    for name, make in {
        "if_stmt": _if_statement, "while_stmt": _while_statement, "if_exp": _if_expression, "and_": _and, "or_": _or,
        "not_": _not,
    }.items():  # fmt: skip
        replacements.put(operators, name, make(getattr(operators, name)))
    registry = control_flow.for_loop_registry
    replacements.put(registry, "_registry", registry._registry | {Range: _for_range, jax.Array: _for_rows})
    for module in (tf, tf.compat.v1):
        replacements.put(module, "range", _range(module.range))
        replacements.put(module, "cond", _cond_function(module.cond))
        replacements.put(module, "while_loop", _while_function(module.while_loop))


def _is_traced(value: object) -> bool:
    return isinstance(value, jax.core.Tracer)


# --- the state of a function -----------------------------------------------------------------------------------------


class _Carried:
    """The variables of a function that a loop carries: numbers and arrays. Others have to stay what they are."""

    def __init__(self, get: Callable[[], State], put: Callable[[State], None], names: Sequence[str]) -> None:
        self._get, self._put, self._names = get, put, names
        self._first = get()
        self._places = [i for i, value in enumerate(self._first) if _is_number(value)]
        self.values = [_array(self._first[i]) for i in self._places]

    def put(self, values: Sequence[Any]) -> None:
        """Set the variables, the others to what they were before the loop."""
        state = list(self._first)
        for place, value in zip(self._places, values, strict=True):
            state[place] = value
        self._put(tuple(state))

    def get(self) -> list[Any]:
        """The variables after the body."""
        state = self._get()
        for place, value in enumerate(state):
            before = self._first[place]
            if place not in self._places and value is not before and not _is_undefined(before):
                raise TypeError(
                    f"A loop changes `{self._names[place]}` from {before!r} to {value!r} ({where()}). A program "
                    "carries only numbers and arrays through a loop. Start with one."
                )
        pairs = ((self._names[p], old, state[p]) for p, old in zip(self._places, self.values, strict=True))
        return [_like(name, old, new) for name, old, new in pairs]


def _is_number(value: object) -> bool:
    return isinstance(value, bool | int | float | np.generic | np.ndarray | jax.Array | tf.Tensor)


def _is_undefined(value: object) -> bool:
    return type(value).__name__ in ("Undefined", "UndefinedReturnValue")


def _array(value: Any) -> Array:
    array = jnp.asarray(native(value))
    return jax.lax.convert_element_type(array, array.dtype)


def _like(name: str, old: Array, new: Any) -> Array:
    if not _is_number(new):
        raise TypeError(
            f"A loop or branch sets `{name}` to {new!r}, but it began as an array ({where()}). Set an array."
        )
    array = jnp.asarray(native(new))
    if array.shape != old.shape or (array.dtype != old.dtype and not getattr(array, "weak_type", False)):
        raise TypeError(
            f"A loop changes `{name}` from {old.dtype}{list(old.shape)} to {array.dtype}{list(array.shape)} "
            f"({where()}). Start with a value of the same shape and dtype (0.0, not 0)."
        )
    return jax.lax.convert_element_type(array, old.dtype)


# --- loops -----------------------------------------------------------------------------------------------------------


def _for_range(
    over: Range,
    extra_test: Callable[[], Any] | None,
    body: Body,
    get_state: Callable[[], State],
    set_state: Callable[[State], None],
    names: Sequence[str],
    _options: object,
) -> None:
    trace = current()
    assert trace is not None
    state = _Carried(get_state, set_state, names)

    def turn(carry: list[Any]) -> list[Any]:
        def run() -> list[Any]:
            index, *values = carry
            state.put(values)
            body(over.at(index))
            return [index + 1, *state.get()]

        return list(resolved(run))

    first = [jnp.int32(0), *state.values]
    if extra_test is None:
        last = trace.repeat(over.count, turn, first)
    else:

        def goes_on(carry: list[Any]) -> Any:
            state.put(carry[1:])
            return jnp.logical_and(carry[0] < over.count, extra_test())

        last = trace.while_loop(goes_on, turn, first, None)
    state.put(last[1:])


def _for_rows(rows: Array, *rest: Any) -> None:
    """A loop over the first axis of an array."""
    extra_test, body, *others = rest
    if current() is None:
        for row in rows:
            body(row)
        return
    over = Range(0, int(rows.shape[0]), 1, jnp.int32)
    _for_range(over, extra_test, lambda index: body(rows[index]), *others)


def _while_statement(original: Callable[..., None]) -> Callable[..., None]:
    def while_stmt(
        test: Callable[[], Any],
        body: Body,
        get_state: Callable[[], State],
        set_state: Callable[[State], None],
        names: Sequence[str],
        options: object,
    ) -> None:
        trace = current()
        if trace is None:
            original(test, body, get_state, set_state, names, options)
            return
        if not _is_traced(test()):
            while test():
                body()
            return
        state = _Carried(get_state, set_state, names)

        def goes_on(carry: list[Any]) -> Any:
            state.put(carry)
            return test()

        def turn(carry: list[Any]) -> list[Any]:
            def run() -> list[Any]:
                state.put(carry)
                body()
                return state.get()

            return list(resolved(run))

        state.put(trace.while_loop(goes_on, turn, state.values, None))

    return while_stmt


# --- conditionals ----------------------------------------------------------------------------------------------------


def _choose(trace: ProgramTrace, condition: Array, branches: Sequence[Callable[[], list[Any]]]) -> list[Any]:
    """The values of the branch that is taken."""
    if condition.shape:
        raise TypeError(f"The condition of an `if` has shape {condition.shape} ({where()}). Give one boolean.")

    def branch(function: Callable[[], list[Any]]) -> Callable[[list[Any]], list[Any]]:
        return lambda _: list(resolved(function))

    demanded = dict(trace.demands)
    chosen = trace.cond(condition.astype(bool), (branch(branches[0]), branch(branches[1])), [])
    if trace.demands != demanded:
        raise ValueError(
            f"A branch of an `if` takes an element from an iterator ({where()}). Take it before the `if`, because "
            "every iteration of a loop takes the same number of elements."
        )
    return chosen


def _if_statement(original: Callable[..., None]) -> Callable[..., None]:
    def if_stmt(
        condition: Any,
        body: Body,
        orelse: Body,
        get_state: Callable[[], State],
        set_state: Callable[[State], None],
        names: Sequence[str],
        nouts: int,
    ) -> None:
        trace = current()
        if trace is None or not _is_traced(condition):
            original(condition, body, orelse, get_state, set_state, names, nouts)
            return
        first, after = get_state(), {}

        def branch(run: Body) -> list[Any]:
            set_state(first)
            run()
            state = get_state()[:nouts]
            after[run] = state
            return [_array(value) if _is_number(value) else jnp.int32(0) for value in state]

        try:
            values = _choose(trace, condition, [functools.partial(branch, run) for run in (body, orelse)])
        except TypeError as error:
            raise TypeError(
                f"The branches of an `if` on a value of the program ({where()}) leave different values in "
                f"{', '.join(names[:nouts])}. Give each of them a value of one shape and dtype in both branches. "
                f"{error}"
            ) from None
        one, other = after[body], after[orelse]
        same = [a is b or (_is_undefined(a) and _is_undefined(b)) for a, b in zip(one, other, strict=True)]
        for name, alike, value in zip(names, same, one, strict=False):
            if not alike and not _is_number(value):
                raise TypeError(
                    f"`{name}` has no number or array as its value in one branch of an `if` on a value of the program "
                    f"({where()}). Set it in both branches, or before the `if`."
                )
        merged = [value if _is_number(a) else a for a, value in zip(one, values, strict=True)]
        set_state((*merged, *first[nouts:]))

    return if_stmt


def _if_expression(original: Callable[..., Any]) -> Callable[..., Any]:
    def if_exp(condition: Any, if_true: Callable[[], Any], if_false: Callable[[], Any], text: str) -> Any:
        trace = current()
        if trace is None or not _is_traced(condition):
            return original(condition, if_true, if_false, text)
        return _choose(trace, condition, [lambda: [_array(if_true())], lambda: [_array(if_false())]])[0]

    return if_exp


def _and(original: Callable[..., Any]) -> Callable[..., Any]:
    def and_(a: Callable[[], Any], b: Callable[[], Any]) -> Any:
        value = a()
        return jnp.logical_and(value, b()) if _is_traced(value) else original(lambda: value, b)

    return and_


def _or(original: Callable[..., Any]) -> Callable[..., Any]:
    def or_(a: Callable[[], Any], b: Callable[[], Any]) -> Any:
        value = a()
        return jnp.logical_or(value, b()) if _is_traced(value) else original(lambda: value, b)

    return or_


def _not(original: Callable[..., Any]) -> Callable[..., Any]:
    def not_(value: Any) -> Any:
        return jnp.logical_not(value) if _is_traced(value) else original(value)

    return not_


# --- the same as functions -------------------------------------------------------------------------------------------


def _range(original: Callable[..., Any]) -> Callable[..., Any]:
    def range_(
        start: ArrayLike, limit: ArrayLike | None = None, delta: ArrayLike = 1, dtype: Any = None, name: str = "range"
    ) -> Any:
        if not being_traced():
            return original(start, limit, delta, dtype=dtype, name=name)
        first, end = (0, native(start)) if limit is None else (native(start), native(limit))
        kind = jnp.result_type(first, end, delta) if dtype is None else native(dtype)
        found = Range(first, end, native(delta), jax.dtypes.canonicalize_dtype(kind))
        return jnp.asarray(found) if current() is None else found

    return range_


def _cond_function(original: Callable[..., Any]) -> Callable[..., Any]:
    def cond(pred: Any, true_fn: Any = None, false_fn: Any = None, name: str | None = None) -> Any:
        if not _is_traced(pred):
            return original(pred, true_fn, false_fn, name=name)
        trace, structures = current(), []
        if trace is None:
            return jax.lax.cond(pred, true_fn, false_fn)

        def branch(function: Callable[[], Any]) -> list[Any]:
            leaves, structure = jax.tree.flatten(function())
            structures.append(structure)
            return [_array(leaf) for leaf in leaves]

        found = _choose(trace, pred, [functools.partial(branch, true_fn), functools.partial(branch, false_fn)])
        return jax.tree.unflatten(structures[-1], found)

    return cond


def _while_function(original: Callable[..., Any]) -> Callable[..., Any]:
    def while_loop(
        cond: Callable[..., Any], body: Callable[..., Any], loop_vars: Any, *args: Any, **kwargs: Any
    ) -> Any:
        trace = current()
        if trace is None or not being_traced():
            return original(cond, body, loop_vars, *args, **kwargs)
        kwargs.pop("name", None)
        most = kwargs.pop("maximum_iterations", None)
        if args or kwargs:
            raise NotImplementedError(
                f"`tf.while_loop` in a program takes `maximum_iterations` only ({where()}). Leave out {sorted(kwargs)}."
            )
        leaves, structure = jax.tree.flatten(tuple(loop_vars))
        first = [_array(leaf) for leaf in leaves]

        def turn(carry: list[Any]) -> list[Any]:
            new = resolved(lambda: jax.tree.leaves(tuple(body(*jax.tree.unflatten(structure, carry)))))
            return [_like("loop_vars", old, value) for old, value in zip(first, new, strict=True)]

        last = trace.while_loop(lambda carry: cond(*jax.tree.unflatten(structure, carry)), turn, first, most)
        return jax.tree.unflatten(structure, last)

    return while_loop
