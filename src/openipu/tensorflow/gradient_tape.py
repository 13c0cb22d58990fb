"""`tf.GradientTape` and `tf.custom_gradient` in programs, and `minimize` of optimizers, which uses a tape."""

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

from .control_flow import converted
from .replacements import Replacements
from .values import any_foreign, being_traced, is_foreign, native, where


def install(replacements: Replacements) -> None:
    """Let tapes differentiate values of programs."""
    tape = tf.GradientTape
    replacements.put(tape, "gradient", _gradient(tape.gradient))
    replacements.put(tape, "__enter__", _enter(tape.__enter__))
    replacements.put(tape, "watch", _watch(tape.watch))
    replacements.put(tf, "custom_gradient", _custom_gradient(tf.custom_gradient))
    base: Any = next(kind for kind in keras.optimizers.Optimizer.__mro__ if "apply_gradients" in vars(kind))
    replacements.put(base, "minimize", _minimize)
    replacements.put(base, "compute_gradients", _compute_gradients)
    for name in ("jacobian", "batch_jacobian"):
        replacements.put(tape, name, _refused(name, getattr(tape, name)))


def _enter(original: Callable[..., Any]) -> Callable[..., Any]:
    def enter(self: tf.GradientTape) -> Any:
        here = gradient_marks.Beginning.here()
        if vars(self).setdefault("_began", here).level != here.level:  # a tape can be opened again, and goes on then
            vars(self)["_began"] = here
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
        began = vars(self).get("_began") or gradient_marks.Beginning(None, {})
        found = gradient_marks.gradients(targets, flat, weights, began)
        return jax.tree.unflatten(jax.tree.structure(sources, is_leaf=_is_variable), found)

    return gradient


def _minimize(
    self: keras.optimizers.Optimizer,
    loss: Any,
    var_list: Any,
    grad_loss: Tree = None,
    name: str | None = None,
    tape: tf.GradientTape | None = None,
) -> Any:
    """Compute the gradients of a loss and apply them.

    Args:
        loss: A function that computes the loss; or the loss, with the tape under which it was computed.
        var_list: The variables to update, or a function that returns them.
        grad_loss: What to multiply the loss with; None for ones.
        name: Has no effect: operations have no names here.
        tape: The tape of a loss that is given as a value.
    """
    del name
    return self.apply_gradients(_compute_gradients(self, loss, var_list, grad_loss, tape))


def _compute_gradients(
    self: keras.optimizers.Optimizer,
    loss: Any,
    var_list: Any,
    grad_loss: Tree = None,
    tape: tf.GradientTape | None = None,
) -> list[tuple[Any, keras.Variable]]:
    """Pairs of gradients and variables; arguments as for `minimize`."""
    del self
    if not callable(loss) and tape is None:
        raise ValueError(
            "`minimize` was given the value of a loss without the tape under which it was computed. Give "
            "`tape=tape`, or a function that computes the loss."
        )
    tape = tf.GradientTape() if tape is None else tape
    if callable(loss):
        compute = converted(loss) if being_traced() else loss
        with tape:
            loss = compute()
    variables = list(var_list() if callable(var_list) else var_list)
    return list(zip(tape.gradient(loss, variables, grad_loss), variables, strict=True))


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
