"""Optimizers inside device programs: gradients are mapped and reduced over replicas where they are applied."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

from openipu.engine.core.optimizer_chain import describe, map_gradients
from openipu.engine.core.wrapped_optimizer import by_engine, chain, is_by_engine
from openipu.engine.keras_compat.api import optimized_variables
from openipu.engine.keras_compat.patches import LOSS_SCALE_APPLY, OPTIMIZER_APPLY

import keras

from .program_trace import ProgramTrace


@contextlib.contextmanager
def in_program(trace: ProgramTrace) -> Iterator[None]:
    """Until the block ends, `apply` of every optimizer in this thread knows that it runs on one of several replicas."""

    def apply(original: Callable[..., Any], optimizer: Any, grads: Any, trainable_variables: Any = None) -> Any:
        own = functools.partial(original, optimizer)
        if is_by_engine():
            return own(grads, trainable_variables)
        return _apply(trace, own, optimizer, list(grads), trainable_variables)

    with OPTIMIZER_APPLY.using(apply), LOSS_SCALE_APPLY.using(apply):
        yield


def _apply(
    trace: ProgramTrace, original: Callable[..., Any], optimizer: Any, gradients: list[Any], weights: Any
) -> None:
    plan = describe(optimizer)
    if plan.accumulation is not None and plan.accumulation.steps > 1:
        raise RuntimeError(
            f"{optimizer.name!r} accumulates {plan.accumulation.steps} micro-batches per update, which `fit` does for "
            "models of a strategy. In a program of your own, add gradients up in a loop and apply their sum."
        )
    if weights is not None and not optimizer.built:
        optimizer.build(list(weights))
    known = _known(optimizer) if weights is None else list(weights)
    trace.optimizers[id(optimizer)] = optimizer
    gradients = map_gradients(optimizer, gradients, [v.value for v in known])
    replicas = trace.replicas
    gradients = replicas.mean(gradients) if plan.replica_reduction == "mean" else replicas.sum(gradients)
    with by_engine():
        if not any(isinstance(link, keras.optimizers.LossScaleOptimizer) for link in chain(optimizer)):
            original(gradients, known)
            return
        # Keras decides here whether gradients are finite, and only its stateless form can do so while it is traced.
        new, state = optimizer.stateless_apply(
            [v.value for v in optimizer.variables], gradients, [v.value for v in known]
        )
    for variable, value in (*zip(known, new, strict=True), *zip(optimizer.variables, state, strict=True)):
        variable.assign(value)


def _known(optimizer: Any) -> list[Any]:
    if not optimizer.built:
        raise ValueError(
            f"{optimizer.name!r} was given gradients without variables before it has seen any. Give both: "
            "`optimizer.apply(gradients, model.trainable_variables)`."
        )
    return optimized_variables(optimizer)
