"""Keras model -> `Step`: a micro-batch and an update as pure functions over `State`."""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from openipu import _validate as validate
from openipu.engine.devices.placement import Placement
from openipu.engine.devices.replicas import Replicas
from openipu.engine.keras_compat.api import loss_reductions, overrides, update_metrics
from openipu.engine.keras_compat.patches import STATELESS_APPLY, STATELESS_CALL
from openipu.engine.types import Array

import keras

from .gradient_dependence import without_gradient
from .model_state import carried_by
from .optimizer_chain import describe, map_gradients
from .options import MetricReduction, Options
from .replicated_step import on_replicas
from .state import Batch, Logs, Mode, Outcome, State, Step, parts_of, state_of
from .trainer import Trainer, loss_of
from .wrapped_optimizer import by_engine

log = logging.getLogger("openipu")


def make_step(model: keras.Model, mode: Mode, place: Placement, options: Options, trainer: Trainer | None) -> Step:
    """The step of `model` for `mode`. A user's own `train_step`, `test_step` or `predict_step` is used as is.

    Mode "train" needs a `trainer`.
    """
    replicas = place.replicas
    outcome = make_outcome(model, mode, replicas, options, trainer)
    if mode == "predict":
        step = Step(functools.partial(predict_micro, model), None, outcome)
    elif overrides(model, f"{mode}_step"):
        step = _own_step(model, mode, replicas, options)
    elif trainer is not None:
        micro = functools.partial(trainer.micro, functools.partial(_train_forward, model))
        step = Step(micro, trainer.update, outcome)
    else:
        step = Step(functools.partial(test_micro, model), None, outcome)
    return on_replicas(step, place)


def _own_step(model: keras.Model, mode: Mode, replicas: Replicas, options: Options) -> Step:
    """The step of a model with a `train_step` or `test_step` of its own."""
    if takes_data_alone(getattr(type(model), f"{mode}_step")):
        raise TypeError(
            f"`{mode}_step(self, data)` of model {model.name!r} is written for TensorFlow. With JAX, Keras calls "
            f"`{mode}_step(self, state, data)`. Run the script with `openipu run`, or see docs/migrate.md."
        )
    reported: set[str] = set()
    logs = functools.partial(_reported_logs, model, replicas, options.metric_reduction, reported)
    averaged = options.average_replicas or replicas.average
    micro = functools.partial(_user_micro, model, mode, replicas, averaged, reported)
    return Step(micro, None, Outcome("last", logs if replicas.count > 1 else None), applies=mode == "train")


def takes_data_alone(step: Callable[..., Any]) -> bool:
    """Whether a step is written in TensorFlow's style: it changes the model, and is not given its state.

    A decorator may turn such a step into one of Keras' own style, so it is the decorated function that counts.
    """
    parameters = list(inspect.signature(step, follow_wrapped=False).parameters.values())
    return len(parameters) == 2 and parameters[1].kind is inspect.Parameter.POSITIONAL_OR_KEYWORD


def make_outcome(
    model: keras.Model, mode: Mode, replicas: Replicas, options: Options, trainer: Trainer | None = None
) -> Outcome:
    """What an execution of Keras' own step returns. A model in stages is trained without a `trainer`."""
    if mode == "predict":
        return Outcome("all")
    logs = functools.partial(metric_logs, model, replicas, options.metric_reduction)
    check = functools.partial(_check_gradients, model, trainer) if mode == "train" else None
    adds = mode == "train" and _adds_samples(model, replicas.count * options.updates.accumulation.steps)
    if overrides(model, "compute_metrics"):
        return Outcome("last", logs if replicas.count > 1 else None, check, adds=adds)
    return Outcome("none", logs, check, adds=adds)


def _adds_samples(model: keras.Model, micro_batches: int) -> bool:
    """Whether the losses add up samples. If only some do, the user is told what that means for incomplete updates."""
    reductions = loss_reductions(model)
    if "sum" in reductions and len(reductions) > 1 and micro_batches > 1:
        validate.notice(
            f"Some losses of model {model.name!r} add up their samples and others do not ({sorted(reductions)}). If "
            f"the last update of the data has fewer than {micro_batches} micro-batches, the sums count for more in it. "
            "Use one `reduction`, or a number of samples that fills all updates."
        )
    return reductions == {"sum"}


# --- one micro-batch


def _train_forward(model: keras.Model, state: State, batch: Batch) -> tuple[Any, State, Logs]:
    loss, (non_trainable, metrics, logs) = train_loss(model, state, batch)
    return loss, state._replace(non_trainable=non_trainable, metrics=metrics), logs


def train_loss(model: keras.Model, state: State, batch: Batch) -> tuple[Any, tuple[list[Any], list[Any], Logs]]:
    """The (scaled) loss of a micro-batch, and the non-trainable state, metrics and logs after it."""
    x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(batch)
    loss, (unscaled, y_pred, non_trainable, metrics) = model.compute_loss_and_updates(
        state.trainable, state.non_trainable, state.metrics, x, y, sample_weight,
        training=True, optimizer_variables=state.optimizer,
    )  # fmt: skip
    logs, metrics = update_metrics(model, metrics, unscaled, x, y, y_pred, sample_weight)
    return loss, (list(non_trainable), list(metrics), logs)


def test_micro(model: keras.Model, state: State, batch: Batch) -> tuple[State, list[Any], Logs]:
    """Evaluate a micro-batch: the new state, no gradients, and the logs."""
    x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(batch)
    _, (unscaled, y_pred, non_trainable, metrics) = model.compute_loss_and_updates(
        state.trainable, state.non_trainable, state.metrics, x, y, sample_weight, training=False
    )
    logs, metrics = update_metrics(model, metrics, unscaled, x, y, y_pred, sample_weight)
    return state._replace(non_trainable=list(non_trainable), metrics=list(metrics)), [], logs


def predict_micro(model: keras.Model, state: State, batch: Batch) -> tuple[State, list[Any], Any]:
    """Predict a micro-batch: the new state, no gradients, and the outputs."""
    outputs, non_trainable = model.predict_step((state.trainable, state.non_trainable), batch)
    return state._replace(non_trainable=list(non_trainable)), [], outputs


def _user_micro(
    model: keras.Model,
    mode: Mode,
    replicas: Replicas,
    averaged: bool,
    reported: set[str],
    state: State,
    batch: Batch,
    active: Array | bool = True,
) -> tuple[State, list[Any], Logs]:
    """Run a user's own step. Adds to `reported` the names of the metrics that it updates."""
    applied: list[None] = []
    with contextlib.ExitStack() as reducing:
        for optimizer in (model.optimizer, *carried_by(model).optimizers):
            own = averaged if optimizer is model.optimizer else _averages(optimizer, replicas)
            reducing.enter_context(_reduced_in_apply(optimizer, replicas, own, active, applied))
        logs, parts = getattr(model, f"{mode}_step")(parts_of(mode, state), batch)
    new = state_of(mode, parts)
    reported |= _updated_metrics(model, state.metrics, new.metrics)
    if mode == "train" and replicas.count > 1 and not applied and any(map(operator.is_not, new[0], state[0])):
        validate.notice(
            f"The `train_step` of model {model.name!r} changes weights without `self.optimizer.stateless_apply`, which "
            f"is where gradients are reduced over replicas. Make sure that it does the same on all {replicas.count} "
            "replicas, also on those that have no data in the last step."
        )
    return new, [], logs


def _averages(optimizer: keras.optimizers.Optimizer, replicas: Replicas) -> bool:
    return describe(optimizer).replica_reduction == "mean" or replicas.average


@contextlib.contextmanager
def _reduced_in_apply(
    optimizer: keras.optimizers.Optimizer | None,
    replicas: Replicas,
    averaged: bool,
    active: Array | bool,
    applied: list[None],
) -> Iterator[None]:
    """Until the block ends, gradients are reduced over replicas when a user's own step applies them.

    If only some replicas are `active`, the update is as strong as that of all of them. `applied` grows with each
    update.
    """
    if replicas.count == 1 or optimizer is None:
        yield
        return

    def reduced(gradients: list[Array]) -> list[Array]:
        if active is True:
            return list(replicas.reduced(gradients, averaged))
        return [g if averaged else replicas.count * g for g in replicas.mean_of_active(gradients, active)]

    def apply(original: Callable[..., Any], state: list[Any], gradients: list[Any], weights: list[Any]) -> Any:
        applied.append(None)
        gradients = reduced(map_gradients(optimizer, gradients, weights, state))
        with by_engine():
            return original(state, gradients, weights)

    with STATELESS_APPLY.using(apply, on=optimizer):
        yield


def called_by(model: keras.Model, call: Callable[..., Any]) -> contextlib.AbstractContextManager[None]:
    """Until the block ends, Keras' own step gets the model's outputs from `call` instead of running the model.

    That is its first call. A loss of the user's own may call the model again, on other inputs.
    """
    first = iter([call])
    return STATELESS_CALL.using(lambda original, *args, **kwargs: next(first, original)(*args, **kwargs), on=model)


def _check_gradients(model: keras.Model, trainer: Trainer | None, state: State, batch: Batch) -> None:
    """Name the trainable weights that the loss does not depend on, because users may believe they are trained."""
    seen = state if trainer is None else trainer.seen_by_keras(state)
    loss = loss_of(functools.partial(_train_forward, model), seen, batch)
    paths = [v.path for v in model.trainable_variables]
    # The scales of float8 layers get new values in place of gradients, though no loss depends on them.
    replaced = {v.path for v in model.trainable_variables if v.overwrite_with_gradient}
    names = without_gradient(lambda weights: loss(weights)[0], state.trainable, paths)
    names = [name for name in names if name not in replaced]
    if names:
        log.warning(
            "%d of %d trainable weights of model %r have no gradient, because the loss does not depend on them: %s. "
            "They are not trained. If that is meant, freeze their layers: `layer.trainable = False`.",
            len(names), len(paths), model.name, ", ".join(names),
        )  # fmt: skip


# --- logs


def metric_logs(model: keras.Model, replicas: Replicas, method: MetricReduction, state: State) -> Logs:
    """The logs over all replicas. Keras' metrics hold sums, so adding up their variables gives the true values."""
    if method is MetricReduction.NONE:
        return metric_results(model, state._replace(metrics=replicas.sum(state.metrics)))
    own = metric_results(model, state)
    if method is MetricReduction.LIST:
        return dict(replicas.gather(own))
    return dict(replicas.sum(own) if method is MetricReduction.SUM else replicas.mean(own))


def _reported_logs(
    model: keras.Model, replicas: Replicas, method: MetricReduction, names: set[str], state: State
) -> Logs:
    """The logs over all replicas of the metrics with these names."""
    return {name: value for name, value in metric_logs(model, replicas, method, state).items() if name in names}


def _updated_metrics(model: keras.Model, old: Sequence[Array], new: Sequence[Array]) -> set[str]:
    """The names in the logs of those metrics whose variables a step has changed."""
    variables = model.metrics_variables
    changed = {id(v) for v, a, b in zip(variables, old, new, strict=False) if a is not b}
    names: set[str] = set()
    with keras.StatelessScope(state_mapping=list(zip(variables, new, strict=False))):
        for metric in model.metrics:
            if any(id(v) in changed for v in metric.variables):
                result = metric.result()
                names |= set(result) if isinstance(result, dict) else {metric.name}
    return names


def metric_results(model: keras.Model, state: State) -> Logs:
    """The logs Keras reports, from the metric variables in `state`."""
    mapping = list(zip(model.metrics_variables, state.metrics, strict=True))
    with keras.StatelessScope(state_mapping=mapping):
        return dict(model.get_metrics_result())
