"""Optimizers inside device programs: gradients are mapped, and reduced over replicas, when they are applied."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from openipu.engine.core.optimizer_chain import describe, map_gradients
from openipu.engine.core.wrapped_optimizer import apply_scaled, by_engine, is_by_engine
from openipu.engine.keras_compat.api import optimized_variables
from openipu.engine.keras_compat.patches import LOSS_SCALE_APPLY, OPTIMIZER_APPLY
from openipu.engine.types import Array

import keras

from .program_trace import ProgramTrace


@contextlib.contextmanager
def in_program(trace: ProgramTrace) -> Iterator[None]:
    """Until the block ends, every optimizer in this thread reduces gradients over replicas when it applies them."""

    def apply(
        original: Callable[..., Any],
        optimizer: keras.optimizers.Optimizer,
        grads: Iterable[Array],
        trainable_variables: Sequence[keras.Variable] | None = None,
    ) -> Any:
        own = functools.partial(original, optimizer)
        if is_by_engine():
            return own(grads, trainable_variables)
        return _apply(trace, own, optimizer, list(grads), trainable_variables)

    with OPTIMIZER_APPLY.using(apply), LOSS_SCALE_APPLY.using(apply):
        yield


def _apply(
    trace: ProgramTrace,
    original: Callable[..., Any],
    optimizer: keras.optimizers.Optimizer,
    gradients: list[Array],
    weights: Sequence[keras.Variable] | None,
) -> None:
    plan = describe(optimizer)
    if plan.accumulation is not None and plan.accumulation.steps > 1:
        raise RuntimeError(
            f"{optimizer.name!r} accumulates {plan.accumulation.steps} micro-batches per update, which only `fit` "
            "does, for models of a strategy. In a program of your own, add up gradients in a loop and apply their sum."
        )
    known = _known(optimizer) if weights is None else some_variables(weights)
    if not optimizer.built:
        optimizer.build(known)
    trace.optimizers[id(optimizer)] = optimizer
    gradients = map_gradients(optimizer, gradients, [v.value for v in known])
    replicas = trace.replicas
    gradients = replicas.reduced(gradients, plan.replica_reduction == "mean" or replicas.average)
    with by_engine():
        if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
            apply_scaled(optimizer, gradients, known)
        else:
            original(gradients, known)


def some_variables(variables: Iterable[keras.Variable]) -> list[keras.Variable]:
    """The variables, of which there must be at least one."""
    found = list(variables)
    if not found:
        raise ValueError(
            "There are no variables to train. A model that has not been built has no `trainable_variables` yet: give "
            "it a `keras.Input`, call `model.build(shape)`, or call it on a batch, before the function runs."
        )
    return found


def _known(optimizer: keras.optimizers.Optimizer) -> list[keras.Variable]:
    """The variables that the optimizer was built for."""
    if not optimizer.built:
        raise ValueError(
            f"{optimizer.name!r} was given gradients without variables, but it has not seen any yet. Give both: "
            "`optimizer.apply(gradients, model.trainable_variables)`."
        )
    return optimized_variables(optimizer)
