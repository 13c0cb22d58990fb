"""Loops and conditionals of a `tf.function`, a layer, a loss or a metric, as part of the program.

AutoGraph turns `for`, `while` and `if` into calls that get the variables of the function (its state) and the bodies.
Here they become the loops and conditionals of the engine, if what decides about them is computed by the program;
otherwise they stay Python's.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from openipu.engine.program.gradient_marks import resolved
from openipu.engine.program.part import as_part
from openipu.engine.program.program_trace import ProgramTrace
from openipu.engine.types import Array

import jax
import jax.numpy as jnp
import tensorflow as tf

from .loop_state import (
    Carried,
    Range,
    State,
    as_array,
    as_arrays,
    choose,
    inside,
    is_carried,
    is_traced,
    is_undefined,
    note_added,
    the_trace,
)
from .replacements import Replacements
from .values import being_traced, where

Body = Callable[..., None]


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
        "not_": _not, "converted_call": _noting_lists,
    }.items():  # fmt: skip
        replacements.put(operators, name, make(getattr(operators, name)))
    registry = control_flow.for_loop_registry
    replacements.put(registry, "_registry", registry._registry | {Range: _for_range, jax.Array: _for_rows})


def converted(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function in which AutoGraph has turned loops and conditionals into calls."""
    autograph = tf.__internal__.autograph
    found: Callable[..., Any] = autograph.tf_convert(function, autograph.control_status_ctx(), user_requested=True)
    return found


def _followed(
    construct: Callable[[ProgramTrace], None], get: Callable[[], State], put: Callable[[State], None]
) -> None:
    """Run a loop or conditional, which may be traced more than once, each time from the same state."""
    first = get()

    def run() -> None:
        put(first)
        construct(the_trace())

    as_part(run)


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
    def loop(trace: ProgramTrace) -> None:
        state = Carried(get_state, set_state, names)

        def turn(carry: list[Any]) -> list[Any]:
            def run() -> list[Any]:
                index, *values = carry
                state.put(values)
                body(over.at(index))
                return [index + 1, *state.get()]

            with inside():
                return list(resolved(run))

        def goes_on(carry: list[Any]) -> Any:
            assert extra_test is not None
            state.put(carry[1:])
            return jnp.logical_and(carry[0] < over.count, extra_test())

        first = [jnp.int32(0), *state.values]
        if extra_test is None:
            last = trace.repeat(over.count, turn, first)
        else:
            last = trace.while_loop(goes_on, turn, first, None)
        state.put(last[1:])

    _followed(loop, get_state, set_state)


def _for_rows(rows: Array, extra_test: Callable[[], Any] | None, body: Body, *rest: Any) -> None:
    """A loop over the first axis of an array."""
    if not being_traced():
        for row in rows:
            if extra_test is not None and not extra_test():
                return
            body(row)
        return
    over = Range(0, int(rows.shape[0]), 1, jnp.int32)
    _for_range(over, extra_test, lambda index: body(rows[index]), *rest)


def _while_statement(original: Callable[..., None]) -> Callable[..., None]:
    def while_stmt(
        test: Callable[[], Any],
        body: Body,
        get_state: Callable[[], State],
        set_state: Callable[[State], None],
        names: Sequence[str],
        options: object,
    ) -> None:
        if not being_traced():
            original(test, body, get_state, set_state, names, options)
            return
        if not is_traced(test()):
            while test():
                body()
            return

        def loop(trace: ProgramTrace) -> None:
            state = Carried(get_state, set_state, names)

            def goes_on(carry: list[Any]) -> Any:
                state.put(carry)
                return test()

            def turn(carry: list[Any]) -> list[Any]:
                def run() -> list[Any]:
                    state.put(carry)
                    body()
                    return state.get()

                with inside():
                    return list(resolved(run))

            state.put(trace.while_loop(goes_on, turn, state.values, None))

        _followed(loop, get_state, set_state)

    return while_stmt


# --- conditionals ----------------------------------------------------------------------------------------------------


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
        if is_traced(condition):
            choice = functools.partial(_chosen, condition, (body, orelse), get_state, set_state, names, nouts)
            _followed(choice, get_state, set_state)
        else:
            original(condition, body, orelse, get_state, set_state, names, nouts)

    return if_stmt


def _chosen(
    condition: Array,
    bodies: tuple[Body, Body],
    get_state: Callable[[], State],
    set_state: Callable[[State], None],
    names: Sequence[str],
    nouts: int,
    trace: ProgramTrace,
) -> None:
    """Set the variables of a function to what the branch that is taken makes of them."""
    first, after = get_state(), {}

    def branch(run: Body) -> list[Any]:
        set_state(first)
        run()
        state = get_state()[:nouts]
        carried = [is_carried(value) for value in state]
        after[run] = state, carried
        return [as_arrays(value) if known else jnp.int32(0) for value, known in zip(state, carried, strict=True)]

    try:
        values = choose(trace, condition, [functools.partial(branch, run) for run in bodies])
    except TypeError as error:
        raise TypeError(
            f"The branches of an `if` on a value of the program ({where()}) leave different values in "
            f"{', '.join(names[:nouts])}. Give each of them a value of one shape and dtype in both branches. "
            f"{error}"
        ) from None
    (one, carried), (other, _) = (after[run] for run in bodies)
    same = [a is b or (is_undefined(a) and is_undefined(b)) for a, b in zip(one, other, strict=True)]
    for name, alike, known in zip(names, same, carried, strict=False):
        if not alike and not known:
            raise TypeError(
                f"`{name}` has no number or array as its value in one branch of an `if` on a value of the program "
                f"({where()}). Set it in both branches, or before the `if`."
            )
    merged = [a if alike else value for a, alike, value in zip(one, same, values, strict=True)]
    set_state((*merged, *first[nouts:]))


def _if_expression(original: Callable[..., Any]) -> Callable[..., Any]:
    def if_exp(condition: Any, if_true: Callable[[], Any], if_false: Callable[[], Any], text: str) -> Any:
        if not is_traced(condition):
            return original(condition, if_true, if_false, text)
        branches = [lambda: [as_array(if_true())], lambda: [as_array(if_false())]]
        return as_part(lambda: choose(the_trace(), condition, branches))[0]

    return if_exp


def _and(original: Callable[..., Any]) -> Callable[..., Any]:
    def and_(a: Callable[[], Any], b: Callable[[], Any]) -> Any:
        value = a()
        return jnp.logical_and(value, b()) if is_traced(value) else original(lambda: value, b)

    return and_


def _or(original: Callable[..., Any]) -> Callable[..., Any]:
    def or_(a: Callable[[], Any], b: Callable[[], Any]) -> Any:
        value = a()
        return jnp.logical_or(value, b()) if is_traced(value) else original(lambda: value, b)

    return or_


def _noting_lists(original: Callable[..., Any]) -> Callable[..., Any]:
    def converted_call(f: Any, args: Any, kwargs: Any, *rest: Any, **options: Any) -> Any:
        note_added(f, args)
        return original(f, args, kwargs, *rest, **options)

    return converted_call


def _not(original: Callable[..., Any]) -> Callable[..., Any]:
    def not_(value: Any) -> Any:
        return jnp.logical_not(value) if is_traced(value) else original(value)

    return not_
