"""`tf.range`, `tf.cond`, `tf.case`, `tf.switch_case` and `tf.while_loop` in programs."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from openipu.engine.program.gradient_marks import resolved
from openipu.engine.program.part import as_part
from openipu.engine.program.program_trace import current

import jax
import jax.numpy as jnp
import tensorflow as tf
from jax.typing import ArrayLike

from .loop_state import Range, as_array, choose, inside, is_traced, like, the_trace
from .replacements import Replacements
from .values import being_traced, native, where


def install(replacements: Replacements) -> None:
    """Let TensorFlow's functions for loops and conditionals take part in programs."""
    for module in (tf, tf.compat.v1):
        replacements.put(module, "range", _range(module.range))
        replacements.put(module, "cond", _cond_function(module.cond))
        replacements.put(module, "case", _case_function(module.case))
        replacements.put(module, "switch_case", _switch_function(module.switch_case))
        replacements.put(module, "while_loop", _while_function(module.while_loop))


def _range(original: Callable[..., Any]) -> Callable[..., Any]:
    def range_(
        start: ArrayLike, limit: ArrayLike | None = None, delta: ArrayLike = 1, dtype: Any = None, name: str = "range"
    ) -> Any:
        if not being_traced():
            return original(start, limit, delta, dtype=dtype, name=name)
        first, end = (0, native(start)) if limit is None else (native(start), native(limit))
        kind = jnp.result_type(first, end, delta) if dtype is None else native(dtype)
        found = Range(first, end, native(delta), jax.dtypes.canonicalize_dtype(kind))
        # Layers take arrays. A range whose length is not known can only be the range of a loop.
        return jnp.asarray(found) if current() is None and isinstance(found.count, int) else found

    return range_


def _cond_function(original: Callable[..., Any]) -> Callable[..., Any]:
    def cond(pred: Any, true_fn: Any = None, false_fn: Any = None, name: str | None = None) -> Any:
        if not is_traced(pred):
            return original(pred, true_fn, false_fn, name=name)
        structures: list[Any] = []

        def branch(function: Callable[[], Any]) -> list[Any]:
            leaves, structure = jax.tree.flatten(function())
            structures.append(structure)
            return [as_array(leaf) for leaf in leaves]

        branches = [functools.partial(branch, true_fn), functools.partial(branch, false_fn)]
        found = as_part(lambda: choose(the_trace(), pred, branches))
        return jax.tree.unflatten(structures[-1], found)

    return cond


def _case_function(original: Callable[..., Any]) -> Callable[..., Any]:
    def case(
        pred_fn_pairs: Any, default: Any = None, exclusive: bool = False, strict: bool = False, **name: Any
    ) -> Any:
        pairs = list(pred_fn_pairs.items() if isinstance(pred_fn_pairs, dict) else pred_fn_pairs)
        if not any(is_traced(condition) for condition, _ in pairs):
            return original(pred_fn_pairs, default, exclusive, strict, **name)
        return _first_of(pairs, default)

    return case


def _switch_function(original: Callable[..., Any]) -> Callable[..., Any]:
    def switch_case(branch_index: Any, branch_fns: Any, default: Any = None, **name: Any) -> Any:
        if not is_traced(branch_index):
            return original(branch_index, branch_fns, default, **name)
        branches = list(branch_fns.items() if isinstance(branch_fns, dict) else branch_fns)
        numbered = list(enumerate(branches)) if callable(branches[0]) else branches
        index = native(branch_index)
        pairs = [(index == number, function) for number, function in sorted(numbered, key=lambda pair: pair[0])]
        return _first_of(pairs, default)

    return switch_case


def _first_of(pairs: Sequence[tuple[Any, Callable[[], Any]]], default: Callable[[], Any] | None) -> Any:
    """What the function next to the first condition that holds returns. Without a default, it is the last one."""
    if not pairs:
        assert default is not None
        return default()
    (condition, function), *others = pairs
    if default is None and not others:
        return function()
    return tf.cond(condition, function, lambda: _first_of(others, default))


def _while_function(original: Callable[..., Any]) -> Callable[..., Any]:
    def while_loop(
        cond: Callable[..., Any], body: Callable[..., Any], loop_vars: Any, *args: Any, **kwargs: Any
    ) -> Any:
        if not being_traced():
            return original(cond, body, loop_vars, *args, **kwargs)
        kwargs.pop("name", None)
        most = kwargs.pop("maximum_iterations", None)
        if args or kwargs:
            raise NotImplementedError(
                f"`tf.while_loop` in a program takes `maximum_iterations` only ({where()}). Leave out {sorted(kwargs)}."
            )
        leaves, structure = jax.tree.flatten(tuple(loop_vars))
        first = [as_array(leaf) for leaf in leaves]

        def goes_on(carry: list[Any]) -> Any:
            return cond(*jax.tree.unflatten(structure, carry))

        def turn(carry: list[Any]) -> list[Any]:
            with inside():
                new = resolved(lambda: jax.tree.leaves(tuple(body(*jax.tree.unflatten(structure, carry)))))
            return [like("loop_vars", old, value) for old, value in zip(first, new, strict=True)]

        last = as_part(lambda: the_trace().while_loop(goes_on, turn, first, most))
        return jax.tree.unflatten(structure, last)

    return while_loop
