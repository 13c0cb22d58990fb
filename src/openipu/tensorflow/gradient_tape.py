"""`tf.GradientTape` and `tf.custom_gradient` in programs."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from openipu.engine.program import gradient_marks
from openipu.engine.types import Array, Tree

import jax
import jax.numpy as jnp
import keras
import tensorflow as tf

from .replacements import Replacements
from .values import any_foreign, is_foreign, native, where


def install(replacements: Replacements) -> None:
    """Let tapes differentiate values of programs."""
    tape = tf.GradientTape
    replacements.put(tape, "gradient", _gradient(tape.gradient))
    replacements.put(tape, "__enter__", _enter(tape.__enter__))
    replacements.put(tape, "watch", _watch(tape.watch))
    replacements.put(tf, "custom_gradient", _custom_gradient(tf.custom_gradient))
    for name in ("jacobian", "batch_jacobian"):
        replacements.put(tape, name, _refused(name, getattr(tape, name)))


def _enter(original: Callable[..., Any]) -> Callable[..., Any]:
    def enter(self: tf.GradientTape) -> Any:
        vars(self)["_began"] = gradient_marks.level()
        return original(self)

    return enter


def _gradient(original: Callable[..., Any]) -> Callable[..., Any]:
    def gradient(
        self: tf.GradientTape,
        target: Tree,
        sources: Tree,
        output_gradients: Tree = None,
        unconnected_gradients: Any = tf.UnconnectedGradients.NONE,
    ) -> Any:
        if not is_foreign(target):
            return original(self, target, sources, output_gradients, unconnected_gradients)
        targets: list[Array] = [native(t) for t in _leaves(target)]
        weights = [None] * len(targets) if output_gradients is None else list(map(native, _leaves(output_gradients)))
        flat = _leaves(sources)
        found = gradient_marks.gradients(targets, flat, weights, vars(self).get("_began"))
        return jax.tree.unflatten(jax.tree.structure(sources, is_leaf=_is_variable), found)

    return gradient


def _leaves(tree: Tree) -> list[Any]:
    return jax.tree.leaves(tree, is_leaf=_is_variable)


def _is_variable(value: object) -> bool:
    return isinstance(value, keras.Variable)


def _watch(original: Callable[..., None]) -> Callable[..., None]:
    def watch(self: tf.GradientTape, tensor: Tree) -> None:
        if not is_foreign(tensor):  # others can always be differentiated
            original(self, tensor)

    return watch


def _custom_gradient(original: Callable[..., Any]) -> Callable[..., Any]:
    """A function that returns its result and the function that computes gradients from those of the result."""

    def custom_gradient(function: Callable[..., Any] | None = None) -> Any:
        if function is None:
            return custom_gradient
        tensorflow = original(function)

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            if not any_foreign(args, kwargs):
                return tensorflow(*args, **kwargs)
            run = jax.custom_vjp(lambda *values: function(*values, **kwargs)[0])

            def backward(values: tuple[Array, ...], above: Tree) -> tuple[Array, ...]:
                _, slopes = function(*values, **kwargs)  # computed again; XLA does so only once
                found = slopes(*above) if isinstance(above, tuple | list) else slopes(above)
                return tuple(found) if isinstance(found, tuple | list) else (found,)

            run.defvjp(lambda *values: (function(*values, **kwargs)[0], values), backward)
            return run(*(jnp.asarray(native(value)) for value in args))

        return call

    return custom_gradient


def _refused(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    def method(self: tf.GradientTape, target: Tree, *args: Any, **kwargs: Any) -> Any:
        if is_foreign(target):
            raise NotImplementedError(
                f"`{name}` of a tape is not available in programs ({where()}). Use `jax.jacobian` of a function."
            )
        return original(self, target, *args, **kwargs)

    return method
