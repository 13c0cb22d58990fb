"""Keras model -> `Step`: a micro-batch and an update as pure functions over `State`."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from openipu.engine.devices.placement import Placement
from openipu.engine.devices.replicas import Replicas
from openipu.engine.keras_compat.api import overrides, update_metrics
from openipu.engine.keras_compat.patches import STATELESS_APPLY, STATELESS_CALL

import jax
import keras

from . import offload
from .gradient_dependence import differentiable_inputs
from .optimizer_chain import map_gradients
from .optimizer_chain import update as apply_update
from .optimizer_sharding import Shards
from .options import MetricReduction, Options
from .replicated_step import on_replicas
from .state import Batch, Logs, Mode, State, Step, parts_of, state_of
from .state_layout import ReplicaLayout
from .wrapped_optimizer import by_engine


def make_step(
    model: Any, mode: Mode, place: Placement, options: Options, spread: ReplicaLayout, twin: Any = None
) -> Step:
    """The step of `model` for `mode`; a user's own `train_step`, `test_step` or `predict_step` is used as is.

    `twin` updates a replica's shares in place of the optimizer, where its state is divided.
    """
    replicas = place.replicas
    logs = functools.partial(metric_logs, model, replicas, options.metric_reduction)
    if mode == "predict":
        step = Step(functools.partial(predict_micro, model), None, "all")
    elif overrides(model, f"{mode}_step"):
        own = functools.partial(_user_micro, model, mode, replicas, options.average_replicas)
        step = Step(own, None, "last", needs_all=mode == "train")
    elif mode == "train":
        micro = functools.partial(_train_micro, model, place.recompute, spread.shards)
        check = functools.partial(_check_gradients, model, spread.shards)
        step = Step(micro, make_update(model.optimizer, spread, twin, options.average_replicas), "none", logs, check)
    else:
        step = Step(functools.partial(test_micro, model), None, "none", logs)
    if step.collect == "none" and overrides(model, "compute_metrics"):
        step = replace(step, collect="last", finish=logs if replicas.count > 1 else None)
    return on_replicas(step, place)


def make_staged_step(model: Any, mode: Mode, replicas: Replicas, options: Options) -> Step:
    """What an execution of a model in stages collects; the stages themselves compute it."""
    logs = functools.partial(metric_logs, model, replicas, options.metric_reduction)
    if mode == "predict":
        return Step(in_stages, None, "all")
    check = functools.partial(_check_gradients, model, None) if mode == "train" else None
    if overrides(model, "compute_metrics"):
        return Step(in_stages, None, "last", logs if replicas.count > 1 else None, check)
    return Step(in_stages, None, "none", logs, check)


def in_stages(*_: Any) -> Any:
    """In the place of `Step.micro` where only stages are run."""
    raise AssertionError("a model in stages has no step as a whole")


# --- one micro-batch


def _train_micro(
    model: Any, recompute: bool, shards: Shards | None, state: State, batch: Batch
) -> tuple[State, list[Any], Logs]:
    optimizer, loss = _loss(model, shards, state, batch)
    gradient = jax.value_and_grad(jax.checkpoint(loss) if recompute else loss, has_aux=True)
    (_, (non_trainable, metrics, logs)), gradients = gradient(state.trainable)
    gradients = map_gradients(model.optimizer, gradients, state.trainable, optimizer)
    return state._replace(non_trainable=non_trainable, metrics=metrics), gradients, logs


def _loss(model: Any, shards: Shards | None, state: State, batch: Batch) -> tuple[list[Any], Callable[..., Any]]:
    """The optimizer's variables as Keras sees them, and the loss with its results as a function of the weights."""
    # Keras reads a loss scale from here, and checks all shapes.
    optimizer = shards.stand_ins(state.optimizer) if shards else state.optimizer

    def loss(trainable: list[Any]) -> Any:
        return train_loss(model, state._replace(trainable=trainable, optimizer=optimizer), batch)

    return optimizer, loss


def train_loss(model: Any, state: State, batch: Batch) -> tuple[Any, tuple[list[Any], list[Any], Logs]]:
    """The (scaled) loss of a micro-batch, and its non-trainable state, metrics and logs."""
    x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(batch)
    loss, (unscaled, y_pred, non_trainable, metrics) = model.compute_loss_and_updates(
        state.trainable, state.non_trainable, state.metrics, x, y, sample_weight,
        training=True, optimizer_variables=state.optimizer,
    )  # fmt: skip
    logs, metrics = update_metrics(model, metrics, unscaled, x, y, y_pred, sample_weight)
    return loss, (list(non_trainable), list(metrics), logs)


def test_micro(model: Any, state: State, batch: Batch) -> tuple[State, list[Any], Logs]:
    """A micro-batch of evaluation: the new state and the logs."""
    x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(batch)
    _, (unscaled, y_pred, non_trainable, metrics) = model.compute_loss_and_updates(
        state.trainable, state.non_trainable, state.metrics, x, y, sample_weight, training=False
    )
    logs, metrics = update_metrics(model, metrics, unscaled, x, y, y_pred, sample_weight)
    return state._replace(non_trainable=list(non_trainable), metrics=list(metrics)), [], logs


def predict_micro(model: Any, state: State, batch: Batch) -> tuple[State, list[Any], Any]:
    """A micro-batch of prediction: the new state and the outputs."""
    outputs, non_trainable = model.predict_step((state.trainable, state.non_trainable), batch)
    return state._replace(non_trainable=list(non_trainable)), [], outputs


def _user_micro(
    model: Any, mode: Mode, replicas: Replicas, averaged: bool, state: State, batch: Batch
) -> tuple[State, list[Any], Logs]:
    with _reduced_in_apply(model.optimizer, replicas, averaged):
        logs, parts = getattr(model, f"{mode}_step")(parts_of(mode, state), batch)
    return state_of(mode, parts), [], logs


@contextlib.contextmanager
def _reduced_in_apply(optimizer: Any, replicas: Replicas, averaged: bool) -> Iterator[None]:
    """A user's own step applies gradients itself; they are reduced over replicas where it does so."""
    if replicas.count == 1 or optimizer is None:
        yield
        return

    def apply(original: Callable[..., Any], state: list[Any], gradients: list[Any], weights: list[Any]) -> Any:
        gradients = map_gradients(optimizer, gradients, weights, state)
        gradients = replicas.mean(gradients) if averaged else replicas.sum(gradients)
        with by_engine():
            return original(state, gradients, weights)

    with STATELESS_APPLY.using(apply, on=optimizer):
        yield


def called_by(model: Any, call: Callable[..., Any]) -> contextlib.AbstractContextManager[None]:
    """While active, Keras' own steps get the model's outputs from `call` instead of running the model."""
    return STATELESS_CALL.using(lambda _original, *args, **kwargs: call(*args, **kwargs), on=model)


def _check_gradients(model: Any, shards: Shards | None, state: State, batch: Batch) -> None:
    """Refuse trainable weights that the loss does not depend on: they would be taken for trained."""
    _, loss = _loss(model, shards, state, batch)
    used = differentiable_inputs(lambda weights: loss(weights)[0], state.trainable)
    names = [v.path for v, is_used in zip(model.trainable_variables, used, strict=True) if not is_used]
    if names:
        raise ValueError(
            f"{len(names)} of {len(used)} trainable weights of model {model.name!r} have no gradient, because the loss "
            f"does not depend on them: {', '.join(names)}. Freeze their layers (`layer.trainable = False`), or use "
            "them."
        )


# --- one update


def make_update(
    optimizer: Any, spread: ReplicaLayout, twin: Any, averaged: bool
) -> Callable[[State, list[Any]], State]:
    """The update by a built `optimizer`, or by its `twin` where its state is divided over replicas."""
    update = functools.partial(_update, optimizer, spread.replicas, averaged)
    if spread.shards is not None:
        update = functools.partial(_update_shares, spread.shards, twin, averaged)
    return offload.around(update) if spread.offloaded else update


def _update(optimizer: Any, replicas: Replicas, averaged: bool, state: State, gradients: list[Any]) -> State:
    gradients = replicas.mean(gradients) if averaged else replicas.sum(gradients)
    trainable, slots = apply_update(optimizer, state.optimizer, gradients, state.trainable)
    return state._replace(trainable=trainable, optimizer=slots)


def _update_shares(shards: Shards, twin: Any, averaged: bool, state: State, gradients: list[Any]) -> State:
    if averaged:
        gradients = [g / shards.replicas.count for g in gradients]
    shares, optimizer = twin.stateless_apply(state.optimizer, shards.scatter(gradients), shards.mine(state.trainable))
    return state._replace(trainable=shards.gather(list(shares)), optimizer=list(optimizer))


# --- logs


def metric_logs(model: Any, replicas: Replicas, method: MetricReduction, state: State) -> Logs:
    """The logs over all replicas. Keras' metrics add up, so the sum of their variables is the truth."""
    if method is MetricReduction.NONE:
        return metric_results(model, state._replace(metrics=replicas.sum(state.metrics)))
    own = metric_results(model, state)
    if method is MetricReduction.LIST:
        return dict(replicas.gather(own))
    return dict(replicas.sum(own) if method is MetricReduction.SUM else replicas.mean(own))


def metric_results(model: Any, state: State) -> Logs:
    """The logs Keras reports, from the metric variables in `state`."""
    mapping = list(zip(model.metrics_variables, state.metrics, strict=True))
    with keras.StatelessScope(state_mapping=mapping):
        return dict(model.get_metrics_result())
