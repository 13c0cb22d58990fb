"""Gradients and updates for your own training steps.

>>> def step(x, y):
...     def loss():
...         return keras.ops.mean((model(x, training=True)[:, 0] - y) ** 2)
...
...     return ipu.training.minimize(model.optimizer, loss, model.trainable_variables)
>>> loss = strategy.run(step, args=(x, y))

These functions work inside and outside of device programs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from openipu.engine.keras_compat.api import stateless_scope
from openipu.engine.program.optimizer_calls import some_variables
from openipu.engine.program.part import as_part
from openipu.engine.program.program_trace import current
from openipu.engine.program.variable_scope import VariableScope

import jax
import keras

__all__ = ["gradients", "minimize", "value_and_gradients"]


def value_and_gradients(
    loss_fn: Callable[[], Any], variables: Sequence[Any], has_aux: bool = False
) -> tuple[Any, list[Any]]:
    """The result of `loss_fn()`, and the gradients of the loss with respect to `variables`.

    Changes that `loss_fn` makes to anything else (moving statistics, metrics, random seeds, feeds) are kept.

    >>> weight = keras.Variable([3.0])
    >>> loss, (slope,) = ipu.training.value_and_gradients(lambda: keras.ops.sum(weight**2), [weight])
    >>> print(loss, slope)
    9.0 [6.]

    Args:
        loss_fn: A function without arguments that returns a scalar; with `has_aux`, a tuple of it and anything else.
        variables: Keras variables.
        has_aux: Whether `loss_fn` returns more than the loss.
    """
    if current() is None and stateless_scope() is not None:  # in a layer, or in the loss of other gradients
        return as_part(lambda: value_and_gradients(loss_fn, variables, has_aux))
    variables = some_variables(variables)
    unique = list({id(v): v for v in variables}.values())
    trace = current()
    parent = None if trace is None else trace.scope
    owners: dict[str, list[Any]] = {}

    def loss(values: list[Any]) -> tuple[Any, Any]:
        scope = VariableScope(parent, zip(unique, values, strict=True))
        if trace is None:
            with scope:
                result = loss_fn()
        else:
            with trace.within(scope):
                result = loss_fn()
        owners["variables"] = list(scope.assigned.values())
        owners["feeds"] = list(scope.touched.values())
        changes = [scope.state_mapping[id(v)] for v in owners["variables"]], [scope.cell(f) for f in owners["feeds"]]
        return (result[0] if has_aux else result), (result, changes)

    (_, (result, (values, cells))), slopes = jax.value_and_grad(loss, has_aux=True)([v.value for v in unique])
    for variable, value in zip(owners["variables"], values, strict=True):
        variable.assign(value)
    if trace is not None:
        for owner, cell in zip(owners["feeds"], cells, strict=True):
            trace.scope.set_cell(owner, cell)
    slope = {id(v): found for v, found in zip(unique, slopes, strict=True)}
    return result, [slope[id(v)] for v in variables]


def gradients(loss_fn: Callable[[], Any], variables: Sequence[Any]) -> list[Any]:
    """The gradients of `loss_fn()` with respect to `variables`, as in `value_and_gradients`.

    >>> weight = keras.Variable([3.0])
    >>> print(*ipu.training.gradients(lambda: keras.ops.sum(weight**2), [weight]))
    [6.]
    """
    return value_and_gradients(loss_fn, variables)[1]


def minimize(optimizer: keras.optimizers.Optimizer, loss_fn: Callable[[], Any], variables: Sequence[Any]) -> Any:
    """Update `variables` once, and return the loss before the update.

    On several replicas, gradients are summed (or averaged, by a `CrossReplicaOptimizer`) before they are applied. With
    a `LossScaleOptimizer`, gradients are those of the scaled loss, but the true loss is returned.

    >>> weight, optimizer = keras.Variable([3.0]), keras.optimizers.SGD(0.25)
    >>> loss = ipu.training.minimize(optimizer, lambda: keras.ops.sum(weight**2), [weight])
    >>> print(loss, weight.numpy())
    9.0 [1.5]
    """

    def scaled() -> tuple[Any, Any]:
        loss = loss_fn()
        return optimizer.scale_loss(loss), loss

    variables = some_variables(variables)
    if not optimizer.built:
        optimizer.build(variables)
    (_, loss), slopes = value_and_gradients(scaled, variables, has_aux=True)
    optimizer.apply(slopes, variables)
    return loss
