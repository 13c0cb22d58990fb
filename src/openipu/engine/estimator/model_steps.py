"""`WholeModel` -> `ModelProgram`: the step that the engine's loop runs for an estimator."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from openipu.engine.core.enqueued import carried
from openipu.engine.core.gradient_dependence import refuse_without_gradient
from openipu.engine.core.options import Options
from openipu.engine.core.replicated_step import on_replicas
from openipu.engine.core.state import Outcome, State, Step
from openipu.engine.core.state_layout import StateLayout
from openipu.engine.core.trainer import Forward, Trainer, loss_of, make_trainer
from openipu.engine.devices.dtypes import is_numeric
from openipu.engine.devices.placement import Placement
from openipu.engine.devices.replicas import Replicas
from openipu.engine.loop.arrays import rows_of
from openipu.engine.loop.loop import Loop, Result, concatenate
from openipu.engine.loop.replica_loop import make_replica_loop
from openipu.engine.types import Array, Tree

import jax
import jax.numpy as jnp
import keras
import numpy as np
from jax.typing import ArrayLike

from .model_trace import DiscoveredModel, ModelFnTrace, WholeModel, assigned_rates, metrics_of
from .outbox import Mean, Outbox
from .specs import ENGINE_MODE, IPUEstimatorSpec, check_metric_names, train_op_of

Micro = Callable[[State, Tree], tuple[State, list[Array], Tree]]
"""A micro-batch as a pure function: state and batch -> new state, gradients and results."""


@dataclass(frozen=True, slots=True, eq=False)
class ModelProgram:
    """A model_fn in one mode, ready to run: its model, its loop, and how its state is laid out on the devices."""

    model: DiscoveredModel
    loop: Loop
    layout: StateLayout
    place: Placement
    options: Options
    metrics: Callable[[], list[Any]]
    """Returns the `metrics` part of the state before the first step."""
    on_host: Callable[[list[Result]], dict[str, Any]] | None = None
    """Computes the results of an evaluation on the host. None if they are computed on the device."""


def make_program(model: WholeModel, place: Placement, options: Options, outbox: Outbox, name: str) -> ModelProgram:
    """The program of a model_fn on one device per replica. It is compiled at its first launch."""
    mode, trainer = ENGINE_MODE[model.mode], None
    if mode == "train":
        weights = dict(model.in_part("trainable"))
        trainer = make_trainer(model.optimizer, [made.variable for made in weights.values()], place, options)
        forward = train_forward(model, outbox)
        outcome, metrics = train_outcome(place.replicas, outbox)
        outcome = replace(outcome, check=_gradient_check(trainer, forward, list(weights)))
        step = Step(_train_micro(trainer, forward), trainer.update, outcome)
    else:
        step, metrics = infer_step(model, place)
    step = on_replicas(step, place)
    # The loop traces a step several times for one program, but a jitted function is traced only once per shape.
    step = replace(step, micro=carried(partial(jax.jit, inline=True), step.micro))
    loop, layout = make_replica_loop(f"{name}_{mode}", step, place, trainer)
    return ModelProgram(model, loop, layout, place, options, metrics, on_host(model))


def infer_step(model: WholeModel, place: Placement) -> tuple[Step, Callable[[], list[Any]]]:
    """The step of an evaluation or prediction, and a function that returns its initial metrics."""
    if model.mode == "eval":
        return _eval_step(model, place)
    return Step(_predict_micro(model), None, Outcome("all")), list


def on_host(model: WholeModel) -> Callable[[list[Result]], dict[str, Any]] | None:
    """A function that computes the results of an evaluation on the host; None if the device computes them."""
    host = model.spec.eval_metrics if model.mode == "eval" else None
    return partial(_on_host, host[0]) if host is not None else None


# --- training --------------------------------------------------------------------------------------------------------


def train_forward(model: WholeModel, outbox: Outbox) -> Forward:
    """The forward pass of a micro-batch: its scaled loss, the new state with the old weights, and learning rates.

    These are the values that model_fn has given to the optimizer's learning rate, by their position in its variables.
    """

    def forward(state: State, batch: Tree) -> tuple[Any, State, dict[int, Array]]:
        def results(spec: IPUEstimatorSpec, trace: ModelFnTrace) -> Any:
            op = train_op_of(spec)
            leaving = [tensors for _, tensors in trace.logs] + ([spec.host_call[1]] if spec.host_call else [])
            scaled = jnp.reshape(op.optimizer.scale_loss(jnp.asarray(op.loss)), ())
            rates = assigned_rates(trace, op.optimizer)
            return scaled, spec.loss, model.after(trace, "non_trainable", state), leaving, rates

        scaled, value, non_trainable, leaving, rates = model.run(state, batch, results)
        metrics = outbox.put_with(state.metrics, value, rows_of(batch), leaving)
        return scaled, state._replace(non_trainable=non_trainable, metrics=metrics), rates

    return forward


def _train_micro(trainer: Trainer, forward: Forward) -> Micro:
    """A micro-batch of training. It counts the steps in the first non-trainable variable, and sets learning rates."""

    def micro(state: State, batch: Tree) -> tuple[State, list[Array], Tree]:
        new, gradients, rates = trainer.micro(forward, state, batch)
        step, *rest = new.non_trainable
        optimizer = [rates.get(position, value) for position, value in enumerate(new.optimizer)]
        return new._replace(non_trainable=[step + 1, *rest], optimizer=optimizer), gradients, ()

    return micro


def _gradient_check(trainer: Trainer, forward: Forward, names: list[str]) -> Callable[[State, Tree], None]:
    """For `Outcome.check`: raises if the loss does not depend on all weights, which have these names."""

    def check(state: State, batch: Tree) -> None:
        loss = loss_of(forward, trainer.seen_by_keras(state), batch)
        remedy = "Use them in model_fn, leave them out of `var_list`, or make them with `trainable=False`."
        refuse_without_gradient(lambda weights: loss(weights)[0], state.trainable, names, remedy)

    return check


def train_outcome(replicas: Replicas, outbox: Outbox) -> tuple[Outcome, Callable[[], list[Any]]]:
    """The outcome of training, mean loss and tensors in `outbox`, and a function that returns its initial metrics."""

    def start() -> list[Any]:
        return [*Mean.start(), *outbox.start()]

    def finish(state: State) -> dict[str, Any]:
        mean = replicas.sum(state.metrics[: Mean.SIZE])
        count, tensors = outbox.results(state.metrics[Mean.SIZE :], replicas)
        return {"loss": Mean.result(mean), "count": count, "tensors": tensors}

    return Outcome("none", finish, begin=lambda state: state._replace(metrics=start())), start


# --- evaluation ------------------------------------------------------------------------------------------------------


def _eval_step(model: WholeModel, place: Placement) -> tuple[Step, Callable[[], list[Any]]]:
    if model.spec.eval_metrics is not None:
        return Step(_host_eval_micro(model), None, Outcome("all")), list
    variables = [made for _, made in model.in_part("metrics")]
    count = len(variables)
    scalars = [name for name, value in (model.spec.eval_metric_ops or {}).items() if name not in metrics_of(model.spec)]

    def start() -> list[Any]:
        means = [zero for _ in range(1 + len(scalars)) for zero in Mean.start()]
        return [*(jnp.asarray(made.initial()) for made in variables), *means]

    def micro(state: State, batch: Tree) -> tuple[State, list[Array], Tree]:
        def results(spec: IPUEstimatorSpec, trace: ModelFnTrace) -> Any:
            values = [spec.loss, *((spec.eval_metric_ops or {})[name] for name in scalars)]
            return values, model.after(trace, "metrics", state)[:count]

        values, metrics = model.run(state, batch, results)
        for number, value in enumerate(values):
            first = count + number * Mean.SIZE
            metrics += Mean.add(state.metrics[first : first + Mean.SIZE], value, rows_of(batch))
        return state._replace(metrics=metrics), [], ()

    def finish(state: State) -> dict[str, Any]:
        """The sum over replicas is what one device would have counted, so every metric is exact, not only means."""
        metrics = place.replicas.sum(state.metrics)
        means = [Mean.result(metrics[i : i + Mean.SIZE]) for i in range(count, len(metrics), Mean.SIZE)]
        logs = dict(zip(["loss", *scalars], means, strict=True))
        mapping = [(made.variable, value) for made, value in zip(variables, metrics[:count], strict=True)]
        with keras.StatelessScope(state_mapping=mapping):
            return logs | {name: metric.result() for name, metric in metrics_of(model.spec).items()}

    return Step(micro, None, Outcome("none", finish)), start


def _host_eval_micro(model: WholeModel) -> Micro:
    def results(spec: IPUEstimatorSpec, _: ModelFnTrace) -> Any:
        assert spec.eval_metrics is not None
        return spec.loss, spec.eval_metrics[1]

    def micro(state: State, batch: Tree) -> tuple[State, list[Array], Tree]:
        loss, tensors = model.run(state, batch, results)
        rows = jnp.full((1,), rows_of(batch), jnp.float32)
        return (
            state,
            [],
            {"loss": jnp.reshape(loss, (1,)), "rows": rows, "tensors": jax.tree.map(at_least_1d, tensors)},
        )

    return micro


def at_least_1d(tensor: ArrayLike) -> Array:
    """`tensor` with a first axis, along which the micro-batches can be joined."""
    array = jnp.asarray(tensor)
    return array[None] if array.ndim == 0 else array


def _on_host(function: Callable[..., dict[str, Any]], results: list[Result]) -> dict[str, Any]:
    """The metrics that a host function computes from the tensors of all steps and replicas."""
    whole = joined(results)
    tensors, rows = whole["tensors"], whole["rows"]
    logs = host_logs("eval_metrics", function(**tensors) if isinstance(tensors, dict) else function(*tensors))
    check_metric_names(logs)
    return {"loss": float((whole["loss"] * rows).sum() / rows.sum()), **logs}


def joined(results: list[Result]) -> Tree:
    """The results of all launches of a run, joined along the first axis."""
    return concatenate([result.rows() for result in results])


def host_logs(name: str, logs: object) -> dict[str, Any]:
    """The metrics that a user's function returned, as values."""
    if not isinstance(logs, dict):
        raise TypeError(f"The function of `{name}` returned a {type(logs).__name__}. Return a dict of metrics.")
    return {key: _host_value(name, key, entry) for key, entry in logs.items()}


def _host_value(name: str, key: str, entry: Any) -> Any:
    """A number, an array of numbers (such as one per class), or the result of a metric."""
    if isinstance(entry, tuple) and entry and hasattr(entry[0], "update_state"):
        metric, *arguments = entry
        metric.reset_state()  # The arguments cover the whole evaluation.
        metric.update_state(*arguments)
        entry = metric
    if hasattr(entry, "update_state"):
        return entry.result()
    if isinstance(entry, list | tuple) or not is_numeric(np.asarray(entry).dtype):
        raise TypeError(
            f"The function of `{name}` returned a {type(entry).__name__} as {key!r}. Return a number, an array of "
            "numbers, a Keras metric, or a tuple (metric, y_true, y_pred)."
        )
    return entry


# --- prediction ------------------------------------------------------------------------------------------------------


def _predict_micro(model: WholeModel) -> Micro:
    def micro(state: State, batch: Tree) -> tuple[State, list[Array], Tree]:
        rows = rows_of(batch)
        predictions = model.run(state, batch, lambda spec, _: spec.predictions)
        return state, [], row_by_row(predictions, rows)

    return micro


def row_by_row(predictions: Tree, rows: int) -> Tree:
    """Predictions as arrays; raises if one of them does not have `rows` rows."""
    predictions = jax.tree.map(jnp.asarray, predictions)
    for leaf in jax.tree.leaves(predictions):
        if leaf.ndim == 0 or leaf.shape[0] != rows:
            raise ValueError(
                f"A prediction has shape {leaf.shape} for a batch of {rows} examples. Return one row per example."
            )
    return predictions
