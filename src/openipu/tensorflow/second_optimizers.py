"""Optimizers of a model besides the one that was given to `compile`, as in the `train_step` of a GAN.

`fit` carries their variables from step to step. These have to exist before the step is compiled, so the step is traced
once only to see which weights each optimizer updates.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from typing import Any

from openipu.engine.core.enqueued import ignored
from openipu.engine.core.model_state import Carried, carried_by, carry, values_of, variables_of
from openipu.engine.core.optimizer_chain import describe
from openipu.engine.core.state import parts_of
from openipu.engine.devices.dtypes import narrowed
from openipu.engine.keras_compat.api import random_seed
from openipu.engine.keras_compat.patches import OWN_APPLY, OWN_APPLY_GRADIENTS, tracing
from openipu.engine.shapes import specs_of
from openipu.engine.types import Array, Tree

import jax
import keras
from keras.optimizers import Optimizer


def second_optimizers(model: keras.Model) -> dict[str, Optimizer]:
    """The optimizers that are attributes of a model, by name, without the one of `compile`."""
    first = getattr(model, "optimizer", None)
    return {
        name: value
        for name, value in vars(model).items()
        if isinstance(value, Optimizer) and value is not first and not name.startswith("_")
    }


def prepare(model: keras.Model, first_batch: Callable[[], Tree]) -> None:
    """Let `fit` carry the model's second optimizers, and random numbers of its step."""
    second = second_optimizers(model)
    for name, optimizer in second.items():
        _check_accumulation(name, optimizer)
    seeds = carried_by(model).seeds or keras.random.SeedGenerator(random_seed())
    unbuilt = {name: optimizer for name, optimizer in second.items() if not optimizer.built}
    if unbuilt:
        built = tuple(optimizer for optimizer in second.values() if optimizer.built)
        carry(model, Carried(built, seeds))
        for name, weights in _updated(model, unbuilt, narrowed(first_batch())).items():
            unbuilt[name].build(weights)
    carry(model, Carried(tuple(optimizer for optimizer in second.values() if optimizer.built), seeds))


def _check_accumulation(name: str, optimizer: Optimizer) -> None:
    accumulation = describe(optimizer).accumulation
    if accumulation is not None and accumulation.steps > 1:
        raise ValueError(
            f"The optimizer `{name}` of the model accumulates {accumulation.steps} micro-batches per update, but the "
            "model's own `train_step` makes an update for each. Give the model an optimizer that does not accumulate."
        )


def _updated(model: keras.Model, optimizers: dict[str, Optimizer], batch: Tree) -> dict[str, list[keras.Variable]]:
    """The weights that the step updates with each of these optimizers, which have no variables yet."""
    found: dict[str, dict[int, keras.Variable]] = {}

    def noting(name: str) -> tuple[Callable[..., None], Callable[..., None]]:
        def apply(_original: Any, _grads: Iterable[Array], weights: Iterable[keras.Variable] | None = None) -> None:
            found.setdefault(name, {}).update({id(v): v for v in weights or ()})

        def apply_gradients(original: Any, pairs: Iterable[Any], *_args: Any, **_kwargs: Any) -> None:
            apply(original, (), [v for _, v in pairs])

        return apply, apply_gradients

    def run(values: Any, batch: Tree) -> None:
        model.train_step(parts_of("train", values), batch)

    with contextlib.ExitStack() as noted, tracing(), ignored():
        for name, optimizer in optimizers.items():
            apply, apply_gradients = noting(name)
            noted.enter_context(OWN_APPLY.using(apply, on=optimizer))
            noted.enter_context(OWN_APPLY_GRADIENTS.using(apply_gradients, on=optimizer))
        jax.eval_shape(run, specs_of(values_of(variables_of(model, "train"))), specs_of(batch))
    return {name: list(weights.values()) for name, weights in found.items() if weights}
