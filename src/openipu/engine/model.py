"""Keras model <-> pure functions over a named state.

Who does what: Keras owns layers, losses, metrics, optimizers and variables. This file turns them into `State` and
`Step` values, which is all that the rest of the engine sees. It is the only file that touches private Keras API, so a
new Keras release is met here and nowhere else.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import inspect
import logging
import math
import operator
import threading
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

from openipu.optimizers.base import by_engine
from openipu.optimizers.plan import map_gradients
from openipu.optimizers.plan import update as apply_update

import jax
import jax.numpy as jnp
import keras
import numpy as np
from jax import lax
from keras.src import api_export
from keras.src.backend.common import global_state, keras_tensor
from keras.src.backend.common.masking import get_keras_mask, set_keras_mask
from keras.src.backend.common.variables import AutocastScope, get_autocast_scope
from keras.src.backend.jax import random as keras_random
from keras.src.backend.jax.trainer import JAXTrainer
from keras.src.layers.layer import CallContext
from keras.src.models.functional import Functional, operation_fn, unpack_singleton
from keras.src.ops.node import Node as KerasNode
from keras.src.saving import object_registration
from keras.src.trainers.data_adapters import get_data_adapter
from keras.src.trainers.data_adapters.array_data_adapter import ArrayDataAdapter
from keras.src.trainers.data_adapters.array_slicing import convert_to_sliceable, train_validation_split
from keras.src.trainers.data_adapters.data_adapter import DataAdapter
from keras.src.trainers.data_adapters.py_dataset_adapter import PyDataset, PyDatasetAdapter
from keras.src.trainers.data_adapters.tf_dataset_adapter import TFDatasetAdapter
from keras.src.utils.python_utils import pythonify_logs

from . import offload
from .dependence import differentiable_inputs
from .options import MetricReduction, Options
from .place import Place
from .replicate import Replicas
from .shard import Shards
from .spread import AnySpread, Spread
from .state import Batch, Logs, Mode, Spot, State, Step, narrowed, parts_of, state_of

log = logging.getLogger("openipu")

__all__ = [
    "ArrayDataAdapter",
    "DataAdapter",
    "Held",
    "JAXTrainer",
    "Ledger",
    "Made",
    "Mode",
    "State",
    "Step",
    "get_data_adapter",
    "get_keras_mask",
    "pythonify_logs",
    "set_keras_mask",
    "train_validation_split",
]

# --- state -----------------------------------------------------------------------------------------------------------


def variables(model: Any, mode: Mode) -> State:
    """The Keras variables behind each part of the state that `mode` uses."""
    return State(
        list(model.trainable_variables),
        list(model.non_trainable_variables),
        list(model.optimizer.variables) if mode == "train" and model.optimizer is not None else [],
        list(model.metrics_variables) if mode != "predict" else [],
    )


def values_of(owners: State) -> State:
    """The values of variables."""
    return State(*([v.value for v in part] for part in owners))


def assign(owners: State, state: State) -> None:
    """Put a state into the variables; metrics may be those of several replicas, which add up."""
    for part, values in zip(owners, state, strict=True):
        for v, value in zip(part, values, strict=True):
            v.assign(value if value.ndim == len(v.shape) else np.asarray(value).sum(0))


class Held:
    """The state of a model while executions run: taken from its variables, put back when somebody looks.

    An execution consumes the buffers of the state it is given, so from `run` to `sync` the variables are empty.
    Keras' callbacks call `model.jax_state_sync()` before they look at the model, which ends in `sync`.
    """

    def __init__(self, model: Any, mode: Mode, spread: AnySpread) -> None:
        self._model, self._mode, self._spread = model, mode, spread
        self._state: State | None = None
        self._counted: tuple[list[Any], list[Any]] = [], []
        self._shown: State | None = None

    def run(self, execute: Callable[..., tuple[Any, State]], *args: Any) -> Any:
        """`execute(state, *args)` on the current state; keeps the state it returns, or the old one when it raises."""
        state = self._take()
        try:
            result, state = execute(state, *args)
        finally:
            # A state that was shown meanwhile is with the variables, where it may have been changed.
            self._state = None if state is self._shown else state
            self._shown = None
        return result

    def show(self, state: State) -> None:
        """Give the variables the state that `run` is about to keep, for somebody who looks before it does."""
        if state is not self._shown:
            self._state = self._shown = state
            self.sync()

    def sync(self) -> None:
        """Give the state back to the model's variables."""
        if self._state is None:
            return
        owners, spread = variables(self._model, self._mode), self._state
        assign(owners, self._spread.gather(spread))
        self._counted = [v.value for v in owners.metrics], spread.metrics
        self._state = None

    def snapshot(self) -> State:
        """The current state as plain arrays, but the metrics as each replica has counted them."""
        if self._state is None:
            values = values_of(variables(self._model, self._mode))
            return values._replace(metrics=self._own_metrics(values) or values.metrics)
        gathered = self._spread.gather(self._state._replace(metrics=[]))
        return gathered._replace(metrics=self._state.metrics)

    def load(self, state: State) -> None:
        """Go on from what `snapshot` gave, perhaps on another number of replicas."""
        owners = variables(self._model, self._mode)
        assign(owners, state)
        several = bool(state.metrics) and state.metrics[0].ndim > len(owners.metrics[0].shape)
        self._counted = [v.value for v in owners.metrics], self._spread.own_metrics(state.metrics) if several else []
        self._state = None

    def _own_metrics(self, values: State) -> list[Any]:
        """The metrics of each replica, unless somebody changed the variables since they were put there."""
        joined, counted = self._counted
        return counted if all(map(operator.is_, values.metrics, joined)) else []

    def _take(self) -> State:
        """The current state, detached from the model."""
        if self._state is None:
            owners = variables(self._model, self._mode)
            values = values_of(owners)
            self._state = self._spread.spread(values)
            own = self._own_metrics(values)
            if own:
                self._state = self._state._replace(metrics=own)
            for part in owners:
                for v in part:
                    v._value = None
        state, self._state = self._state, None
        return state


# --- steps -----------------------------------------------------------------------------------------------------------


def make_step(model: Any, mode: Mode, place: Place, options: Options, spread: Spread, twin: Any = None) -> Step:
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


def on_replicas(step: Step, place: Place) -> Step:
    """A step as one of the replicas of `place`: random numbers by position, statistics by group."""
    if place.replicas.count == 1:
        return step
    return replace(step, micro=functools.partial(on_one_of, place.replicas, place.batch_norm_group, step.micro))


def make_update(optimizer: Any, spread: Spread, twin: Any, averaged: bool) -> Callable[[State, list[Any]], State]:
    """The update by a built `optimizer`, or by its `twin` where its state is divided over replicas."""
    update = functools.partial(_update, optimizer, spread.replicas, averaged)
    if spread.shards is not None:
        update = functools.partial(_update_shares, spread.shards, twin, averaged)
    return offload.around(update) if spread.offloaded else update


def has_own_train_step(model: Any) -> bool:
    """Whether the user wrote the training step, so that gradients and updates cannot be told apart."""
    return overrides(model, "train_step")


def overrides(model: Any, name: str) -> bool:
    return getattr(type(model), name) is not getattr(JAXTrainer, name)


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


def _update(optimizer: Any, replicas: Replicas, averaged: bool, state: State, gradients: list[Any]) -> State:
    gradients = replicas.mean(gradients) if averaged else replicas.sum(gradients)
    trainable, slots = apply_update(optimizer, state.optimizer, gradients, state.trainable)
    return state._replace(trainable=trainable, optimizer=slots)


def _update_shares(shards: Shards, twin: Any, averaged: bool, state: State, gradients: list[Any]) -> State:
    if averaged:
        gradients = [g / shards.replicas.count for g in gradients]
    shares, optimizer = twin.stateless_apply(state.optimizer, shards.scatter(gradients), shards.mine(state.trainable))
    return state._replace(trainable=shards.gather(list(shares)), optimizer=list(optimizer))


def test_micro(model: Any, state: State, batch: Batch) -> tuple[State, list[Any], Logs]:
    x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(batch)
    _, (unscaled, y_pred, non_trainable, metrics) = model.compute_loss_and_updates(
        state.trainable, state.non_trainable, state.metrics, x, y, sample_weight, training=False
    )
    logs, metrics = model._update_metrics_variables(metrics, unscaled, x, y, y_pred, sample_weight)
    return state._replace(non_trainable=list(non_trainable), metrics=list(metrics)), [], logs


def predict_micro(model: Any, state: State, batch: Batch) -> tuple[State, list[Any], Any]:
    outputs, non_trainable = model.predict_step((state.trainable, state.non_trainable), batch)
    return state._replace(non_trainable=list(non_trainable)), [], outputs


# --- steps of a model whose forward is cut into stages ---------------------------------------------------------------


@contextlib.contextmanager
def called_by(model: Any, call: Callable[..., Any]) -> Iterator[None]:
    """While active, Keras' own steps get the model's outputs from `call` instead of running the model."""
    model.__dict__["stateless_call"] = call
    try:
        yield
    finally:
        del model.__dict__["stateless_call"]


def train_loss(model: Any, state: State, batch: Batch) -> tuple[Any, tuple[list[Any], list[Any], Logs]]:
    """The (scaled) loss of a micro-batch, and its non-trainable state, metrics and logs."""
    x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(batch)
    loss, (unscaled, y_pred, non_trainable, metrics) = model.compute_loss_and_updates(
        state.trainable, state.non_trainable, state.metrics, x, y, sample_weight,
        training=True, optimizer_variables=state.optimizer,
    )  # fmt: skip
    logs, metrics = model._update_metrics_variables(metrics, unscaled, x, y, y_pred, sample_weight)
    return loss, (list(non_trainable), list(metrics), logs)


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
    raise AssertionError("a model in stages has no step as a whole")


def forget(held: Sequence[Any]) -> None:
    """Free the memory of variables whose values always come from elsewhere."""
    for variable in held:
        variable._value = None


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
    original = optimizer.stateless_apply

    def apply(state: list[Any], gradients: list[Any], weights: list[Any]) -> Any:
        gradients = map_gradients(optimizer, gradients, weights, state)
        gradients = replicas.mean(gradients) if averaged else replicas.sum(gradients)
        with by_engine():
            return original(state, gradients, weights)

    optimizer.__dict__["stateless_apply"] = apply
    try:
        yield
    finally:
        del optimizer.__dict__["stateless_apply"]


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


# --- one replica of several ------------------------------------------------------------------------------------------


def on_one_of(
    replicas: Replicas,
    group: int,
    micro: Callable[..., Any],
    state: State,
    batch: Batch,
    active: Any = True,
    spot: Spot | None = None,
) -> Any:
    """`micro` as one of several replicas: random numbers by position in the global batch, statistics by group.

    Without a `spot`, micro-batches of this size lie side by side.
    """
    rows = jax.tree.leaves(batch)[0].shape[0]
    with one_of_several(replicas, group, lambda: rows, active, spot):
        return micro(state, batch)


@contextlib.contextmanager
def one_of_several(
    replicas: Replicas, group: int, rows: Callable[[], int | None], active: Any = True, spot: Spot | None = None
) -> Iterator[None]:
    """What is traced until the block ends is one of several replicas; `rows` tells the samples of a micro-batch.

    Without a `spot`, micro-batches of this size lie side by side.
    """
    with _random_by_position(replicas, rows, spot), _shared_statistics(replicas, group, active):
        yield


@contextlib.contextmanager
def _random_by_position(replicas: Replicas, rows: Callable[[], int | None], spot: Spot | None = None) -> Iterator[None]:
    """Keras' random functions draw for the samples of all replicas and give each replica its own.

    So dropout does not depend on how a global batch is spread. XLA only computes what is used. What has a parameter
    per sample (`categorical`, ...) cannot be drawn that way; there, replicas get different random numbers.
    """
    true_jax, thread = keras_random.jax, threading.get_ident()

    class Random:
        def __getattr__(self, name: str) -> Any:
            function = getattr(jax.random, name)
            known = threading.get_ident() == thread and name in _SHAPED
            return functools.partial(_draw, function, replicas, rows(), spot) if known else function

    class Jax:
        random = Random()

        def __getattr__(self, name: str) -> Any:
            return getattr(true_jax, name)

    keras_random.jax = Jax()
    try:
        yield
    finally:
        keras_random.jax = true_jax


_SHAPED = ("normal", "uniform", "randint", "truncated_normal", "bernoulli", "gamma", "binomial", "beta", "categorical")


def _draw(
    function: Callable[..., Any],
    replicas: Replicas,
    rows: int | None,
    spot: Spot | None,
    key: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    if rows is None:
        return function(key, *args, **kwargs)
    spot = spot or Spot(replicas.index() * rows, replicas.count * rows)
    values = inspect.signature(function).bind(key, *args, **kwargs)
    shape = values.arguments.get("shape")
    if any(jnp.ndim(a) and jnp.shape(a)[0] == rows for a in values.args[1:] if isinstance(a, jax.Array)):
        return function(jax.random.fold_in(jax.random.wrap_key_data(key), replicas.index()), *args, **kwargs)
    if not shape or shape[0] != rows:
        return function(key, *args, **kwargs)
    values.arguments["shape"] = (spot.total, *shape[1:])
    return lax.dynamic_slice_in_dim(function(*values.args, **values.kwargs), spot.first, rows)


@contextlib.contextmanager
def _shared_statistics(replicas: Replicas, group: int, active: Any) -> Iterator[None]:
    """BatchNormalization takes mean and variance over the micro-batches of `group` consecutive replicas.

    Replicas that are not `active` have no micro-batch: they give nothing to the statistics nor to their gradients.
    """
    if group == 1:
        yield
        return
    cls = keras.layers.BatchNormalization
    original = cls._moments

    def moments(layer: Any, inputs: Any, mask: Any) -> tuple[Any, Any]:
        mean, variance = original(layer, inputs, mask)
        shared = over_group(mean)
        return shared, over_group(variance + jnp.square(mean - shared))

    def over_group(values: Any) -> Any:
        shared = replicas.mean_of_active(values, active, group)
        return jnp.where(active, shared, lax.stop_gradient(shared))

    cls._moments = moments
    try:
        yield
    finally:
        cls._moments = original


# --- what fit, evaluate and predict ask of a model -------------------------------------------------------------------


def needs_build(model: Any) -> bool:
    """Whether Keras has to see a batch before the model, its loss or its metrics have variables."""
    parts = (model._compile_metrics, model._compile_loss)
    return not _layers_built(model) or any(part is not None and not part.built for part in parts)


def build(model: Any, first_batch: Callable[[], Batch]) -> None:
    """Create all variables of a compiled model. `first_batch` is only called when Keras has to see one."""
    model._symbolic_build(data_batch=narrowed(first_batch()) if needs_build(model) else None)


def build_for_predict(model: Any, first_batch: Callable[[], Batch]) -> None:
    """Create the variables of a model that may never have been compiled."""
    if not _layers_built(model):
        x, _, _ = keras.utils.unpack_x_y_sample_weight(first_batch())
        with keras.StatelessScope(), keras.SymbolicScope():
            model(narrowed(x))


def is_built(model: Any) -> bool:
    """Whether all of the model's layers have their variables."""
    return bool(model.built) and _layers_built(model)


def _layers_built(model: Any) -> bool:
    return all(layer.built for layer in model._flatten_layers())


def assert_compiled(model: Any, caller: str) -> None:
    """Keras' own error when `compile` was not called."""
    model._assert_compile_called(caller)


def refuse_eager(model: Any) -> None:
    """Our error for `run_eagerly=True`."""
    if model.run_eagerly:
        raise RuntimeError(
            f"Model {model.name!r} is to run eagerly (`run_eagerly=True`), but under `IPUStrategy` all steps are "
            "compiled into one program. Compile it without `run_eagerly`, or make it outside the strategy's scope to "
            "debug it step by step."
        )


def mention_jit(model: Any) -> None:
    """Say that `jit_compile=False` has no effect."""
    if model.compiled and model.jit_compile is False:
        log.warning(
            "%s: jit_compile=False has no effect, because steps are always compiled under a strategy", model.name
        )


def mention_metrics(owner: str, metrics: Sequence[Any]) -> None:
    """Name the metrics of which it is not known that the sum of several replicas' variables is right."""
    parts = [part for metric in metrics for part in getattr(metric, "metrics", [metric])]
    names = [m.name for m in parts if not _adds_up(m)]
    if names:
        log.warning(
            "%s: on several replicas, the variables of a metric are added up. Make sure that this is right for %s: "
            "variables that start at zero and hold sums or counts.", owner, ", ".join(names),
        )  # fmt: skip


def _adds_up(metric: Any) -> bool:
    return isinstance(metric, keras.metrics.Mean) or type(metric).__module__.split(".")[0] == "keras"


def should_evaluate(model: Any, epoch: int, validation_freq: Any) -> bool:
    """Whether validation is due after this epoch."""
    return bool(model._should_eval(epoch, validation_freq))


def final_logs(model: Any, logs: Logs) -> Logs:
    """The metrics of the whole epoch, or the step's own logs where a user's step reports other keys."""
    return dict(model._get_metrics_result_or_logs(logs))


def in_order(model: Any, logs: Logs) -> Any:
    """Logs as the list (or scalar) that `evaluate` returns."""
    return model._flatten_metrics_in_order(logs)


def start_epoch(model: Any, initial_epoch: int) -> int:
    """Where training starts: a callback such as `BackupAndRestore` may have moved it."""
    return model._initial_epoch or initial_epoch


def callback_list(model: Any, callbacks: Any, **settings: Any) -> Any:
    """Keras' container of callbacks; one that is already there (validation inside `fit`) is used as is."""
    if isinstance(callbacks, keras.callbacks.CallbackList):
        return callbacks
    verbose = settings["verbose"]
    return keras.callbacks.CallbackList(callbacks, add_progbar=verbose != 0, model=model, **settings)


def decays(optimizer: Any, weight: Any) -> bool:
    """Whether an optimizer with weight decay applies it to `weight`."""
    return bool(optimizer._use_weight_decay(weight))


def optimized_variables(optimizer: Any) -> list[Any]:
    """The variables that an optimizer was built for."""
    return list(optimizer._trainable_variables)


def finalize(model: Any) -> None:
    """What an optimizer does to the weights when training ends, such as writing averages back."""
    if isinstance(model.optimizer, keras.optimizers.Optimizer):
        model.optimizer.finalize_variable_values(model.trainable_weights)


def whole_arrays(adapter: ArrayDataAdapter) -> Any:
    """The arrays behind an adapter, converted as Keras converts each batch (float64 becomes float32, and so on)."""

    def convert(part: Any) -> Any:
        return part.convert_to_jax_compatible(part[slice(None)])

    sliceables = convert_to_sliceable(adapter._inputs, target_backend="jax")
    return keras.tree.map_structure(convert, sliceables, none_is_leaf=False)


def resident_bytes(adapter: ArrayDataAdapter) -> int | None:
    """Bytes that the adapter's arrays take on a device, or None when they cannot be kept there (sparse arrays)."""
    leaves = jax.tree.leaves(adapter._inputs, is_leaf=lambda leaf: hasattr(leaf, "shape"))
    if any(hasattr(leaf, "todense") or hasattr(leaf, "dense_shape") for leaf in leaves):
        return None
    sizes: list[int] = [getattr(getattr(leaf, "dtype", None), "itemsize", 8) for leaf in leaves]
    return sum(int(math.prod(leaf.shape)) * size for leaf, size in zip(leaves, sizes, strict=True))


def array_order(adapter: ArrayDataAdapter) -> tuple[int, int, bool | str]:
    """(number of samples, batch size, shuffle) of an array adapter."""
    return adapter._num_samples, adapter._batch_size, adapter._shuffle


def batches(adapter: DataAdapter) -> Iterator[Batch]:
    """One pass over the batches of any other source."""
    return iter(adapter.get_jax_iterator())


def reads_ahead(adapter: DataAdapter) -> bool:
    """Whether workers fill a queue behind the adapter, so that a pass that was begun has to be gone on with."""
    return getattr(adapter, "enqueuer", None) is not None


def opens_once(adapter: DataAdapter) -> bool:
    """Whether a pass that was begun cannot be begun anew: its order comes from inside, or workers are at it."""
    return isinstance(adapter, TFDatasetAdapter) or reads_ahead(adapter)


def changes(adapter: DataAdapter) -> bool:
    """Whether the source has something of its own to do when an epoch ends, such as to shuffle."""
    kind = type(adapter.py_dataset) if isinstance(adapter, PyDatasetAdapter) else PyDataset
    return kind.on_epoch_begin is not PyDataset.on_epoch_begin or kind.on_epoch_end is not PyDataset.on_epoch_end


def replay_epochs(adapter: DataAdapter, before_ends: list[Callable[[], None]]) -> None:
    """Let a PyDataset do what it does around epochs, without reading them; each ends after one of `before_ends`."""
    for before_end in before_ends:
        adapter.py_dataset.on_epoch_begin()
        before_end()
        adapter.py_dataset.on_epoch_end()


def replay_passes(adapter: DataAdapter, passes: int) -> None:
    """Open a source that often: it may draw a new order then, which is when its first batch is read."""
    if not isinstance(adapter, PyDatasetAdapter):
        for _ in range(passes):
            next(batches(adapter), None)


# --- classes ---------------------------------------------------------------------------------------------------------


def extend_new_models(extend: Callable[[type], type | None], made: Callable[[Any], None]) -> Callable[[], None]:
    """Until the returned function is called, `extend(cls)` may swap the class of each Keras model that is made.

    Keras' `Model.__new__` is the one place that every way of making a model passes through: Sequential, Functional,
    subclasses, `from_config`, `clone_model` and loading. `made` is shown each model whose class was swapped.
    """
    original = keras.Model.__new__

    def new(cls: type, *args: Any, **kwargs: Any) -> Any:
        # `Model(inputs, outputs)` makes a Functional, whose own __new__ comes back here.
        extended = None if cls is keras.Model else extend(cls)
        model = original(extended or cls, *args, **kwargs)
        if extended is not None:
            made(model)
        return model

    keras.Model.__new__ = new

    def undo() -> None:
        keras.Model.__new__ = original

    return undo


def pickled(parts: Any) -> tuple[Any, ...]:
    """What Keras pickles a model to, without a reference to its swapped class, which has no importable name."""
    return (keras.Model._unpickle_model, *parts[1:])


def subclass_as(cls: type, extension: type) -> Any:
    """A class that behaves as `cls` with `extension`'s methods put between the user's classes and Keras'.

    It keeps the name, module and registered name, so that a saved model names the user's class and opens anywhere.
    Keras rewrites the bases of functional subclasses in place, hence one private copy of the extension per class.
    """
    between = type(extension.__name__, (extension, keras.Model), {"__module__": extension.__module__})

    def new(kind: type, *args: Any, **kwargs: Any) -> Any:
        # Cloning a model of a strategy outside of any scope ends here, and gives a plain one.
        model = super(extended, kind).__new__(kind, *args, **kwargs)
        return model if "_ipu_session" in model.__dict__ else cls(*args, **kwargs)

    namespace = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__, "__new__": new}
    extended: Any = type(cls.__name__, (cls, between), namespace)
    for names in (object_registration.GLOBAL_CUSTOM_NAMES, api_export.REGISTERED_OBJS_TO_NAMES):
        if cls in names:
            names[extended] = names[cls]
    return extended


# --- graph -----------------------------------------------------------------------------------------------------------


class Call(NamedTuple):
    """One call of a layer or operation with symbolic tensors, and the stage that a `PipelineStage` gave it."""

    operation: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: list[Any]
    stage: int | None


class Recording(NamedTuple):
    """What a model does to symbolic inputs: the calls in the order in which they run."""

    inputs: list[Any]
    outputs: Any
    calls: list[Call]


def has_graph(model: Any) -> bool:
    """Whether Keras knows the graph of the model, so that `recorded` gives it."""
    return _functional(model) is not None


def replaces_call(model: Any) -> bool:
    """Whether a Functional or Sequential model has a `call` of its own, which its graph says nothing about."""
    kind = next((kind for kind in (Functional, keras.Sequential) if isinstance(model, kind)), None)
    return kind is not None and type(model).call is not kind.call


def can_be_inlined(operation: Any) -> bool:
    """Whether calling the operation is nothing but running the graph it contains."""
    return isinstance(operation, keras.Model) and has_graph(operation) and not operation.supports_masking


def can_be_traced(operation: Any) -> bool:
    """Whether calling the operation is nothing but running its `call`, written by a user, on converted inputs."""
    return (
        isinstance(operation, keras.Model)
        and not has_graph(operation)
        and not replaces_call(operation)
        and not operation.supports_masking
        and operation.activity_regularizer is None
        and not any("mask" in name for name in inspect.signature(operation.call).parameters)
    )


def converted(layer: Any, values: Sequence[Any]) -> list[Any]:
    """Tensors as a layer that is called with them sees them: floats in its dtype."""
    found = [layer.dtype_policy.convert_input(value, layer.autocast, layer.input_dtype) for value in values]
    for value, new in zip(values, found, strict=True):
        mask = get_keras_mask(value)
        if mask is not None:
            set_keras_mask(new, mask)
    return found


def takes_training(layer: Any) -> bool:
    """Whether `call` has an argument `training`."""
    return bool(layer._call_has_training_arg)


def default_training(layer: Any) -> bool | None:
    """What `call` takes `training` to be when nobody says."""
    if not isinstance(layer, keras.Layer):
        return None
    parameter = inspect.signature(layer.call).parameters.get("training")
    return None if parameter is None or parameter.default is parameter.empty else parameter.default


def _functional(model: Any) -> Any:
    if replaces_call(model):
        return None
    return model if isinstance(model, Functional) else getattr(model, "_functional", None)


def recorded(model: Any) -> Recording:
    """The graph of a Functional model, or of a Sequential model that knows the shape of its input."""
    functional = _functional(model)
    by_depth = functional._nodes_by_depth
    nodes = [node for depth in sorted(by_depth, reverse=True) for node in by_depth[depth]]
    calls = [_call(node) for node in nodes if node.operation and not node.is_input]
    return Recording(list(functional.inputs), unpack_singleton(functional._outputs_struct), calls)


def _call(node: Any) -> Call:
    args, kwargs = node.arguments.args, node.arguments.kwargs
    return Call(node.operation, args, kwargs, list(node.outputs), vars(node).get(_STAGE))


def standardized(model: Any, inputs: Any) -> list[Any]:
    """The flat inputs of the model's graph, converted as the model itself does (structure, dtype, last axis)."""
    functional = _functional(model)
    if functional is None:
        return list(keras.tree.flatten(inputs))
    return list(functional._standardize_inputs(inputs))


def run_call(operation: Any, args: Any, kwargs: Any, training: bool | None, within: Sequence[Any]) -> Any:
    """Call an operation of a graph as Keras does when it runs the models that the call is `within`."""
    with _autocast(() if isinstance(operation, keras.Layer) else within):
        return operation_fn(operation, training=training)(*args, **kwargs)


@contextlib.contextmanager
def counted_draws() -> Iterator[Counter[int]]:
    """How often each seed generator, known by the identity of its variable, is asked for a seed by this thread."""
    original, thread = keras.random.SeedGenerator.next, threading.get_ident()
    counts: Counter[int] = Counter()

    def counted(generator: Any, *args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() == thread:
            counts[id(generator.state)] += 1
        return original(generator, *args, **kwargs)

    keras.random.SeedGenerator.next = counted
    try:
        yield counts
    finally:
        keras.random.SeedGenerator.next = original


@contextlib.contextmanager
def _autocast(layers: Sequence[Any]) -> Iterator[None]:
    """What calls of these layers, one within the other, do to the dtype of variables. A layer does it by itself."""
    with contextlib.ExitStack() as stack:
        for layer in layers:
            current = get_autocast_scope()
            wanted = layer.compute_dtype if layer.autocast and "float" in layer.compute_dtype else None
            if current is None and layer.compute_dtype == layer.variable_dtype:
                continue
            stack.enter_context(AutocastScope(wanted))
        yield


def note_inputs(model: Any, inputs: Any) -> None:
    """Keep shapes and dtypes of the inputs that a model is first called with, for `noted_inputs`."""
    if _INPUTS not in vars(model) and not has_graph(model):
        leaves = keras.tree.flatten(inputs)
        if leaves and all(hasattr(leaf, "shape") and hasattr(leaf, "dtype") for leaf in leaves):
            vars(model)[_INPUTS] = keras.tree.map_structure(_symbol_like, inputs)


def noted_inputs(model: Any) -> Any:
    """Symbols for the inputs with which a subclassed model was first called or built, or None."""
    if _INPUTS in vars(model):
        return vars(model)[_INPUTS]
    shapes = next(iter((model._build_shapes_dict or {}).values()), None)
    if shapes is None:
        return None
    # Code that asks for the number of rows wants a number.
    return keras.tree.map_shape_structure(lambda shape: keras.KerasTensor((shape[0] or 1, *shape[1:])), shapes)


def _symbol_like(value: Any) -> Any:
    shape = tuple(value.shape)
    return keras.KerasTensor((shape[0] or 1, *shape[1:]), keras.backend.standardize_dtype(value.dtype))


# --- graph of a model's own `call` -----------------------------------------------------------------------------------


def traced(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Recording:
    """What `call` of a subclassed model does, traced with KerasTensors in the arguments.

    Calls of layers become calls of the graph, also those on constants (position embeddings), and so do operations on
    variables (tied weights), which Keras would compute once and for all.
    """
    layers = model._flatten_layers()
    unbuilt = [layer.name for layer in layers if not layer.built]
    if unbuilt:
        raise RuntimeError(
            f"Layer {unbuilt[0]!r} of model {model.name!r} has not been built, so its variables are not known. Call "
            "the model on a batch, or remove the layer if `call` does not use it."
        )
    known = [(layer, len(layer._inbound_nodes), len(layer._outbound_nodes)) for layer in layers]
    try:
        with _Trace() as trace:
            outputs = model.call(*args, **kwargs)
        wrong = [leaf for leaf in keras.tree.flatten(outputs) if not isinstance(leaf, keras.KerasTensor)]
        if wrong:
            raise TypeError(f"`call` returned {wrong[0]!r}, which does not depend on the inputs")
    except Exception as error:
        raise ValueError(_untraceable(model, error)) from error
    finally:
        for layer, inbound, outbound in known:
            del layer._inbound_nodes[inbound:], layer._outbound_nodes[outbound:]
    inputs = [leaf for leaf in keras.tree.flatten((args, kwargs)) if is_symbolic(leaf)]
    return Recording(inputs, outputs, trace.calls())


def _untraceable(model: Any, error: Exception) -> str:
    ours = (keras.__path__[0], jax.__path__[0], __file__)
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(ours)]
    where = f" at {frames[-1].filename}:{frames[-1].lineno} (`{frames[-1].line}`)" if frames else ""
    reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return (
        f"`call` of model {model.name!r} cannot be traced with symbolic tensors{where}: {reason} "
        "Use layers and `keras.ops` on tensors there, and put anything else (jax.numpy, values of tensors or "
        "variables, random numbers, `add_loss`) into the `call` of a layer."
    )


def _at_top() -> bool:
    """Whether no layer is being called, so that what happens is done by the traced `call` itself."""
    return global_state.get_global_attribute("current_call_ctx") is None


class _Untouched(keras.StatelessScope):
    """Makes sure that a trace neither reads nor writes variables: it would keep today's value as a constant."""

    def get_current_value(self, variable: Any) -> Any:
        raise TypeError(f"the value of variable {variable.path!r} is needed while tracing.")

    def add_update(self, update: Any) -> Any:
        raise TypeError(f"variable {update[0].path!r} is assigned outside of any layer.")


class _Trace:
    """Records what this thread calls from `__enter__` to `__exit__`."""

    def __init__(self) -> None:
        self._nodes: list[Any] = []
        self._given: dict[int, tuple[Any, Any]] = {}
        self._constants: dict[int, tuple[Any, Any]] = {}
        self._stack = contextlib.ExitStack()

    def calls(self) -> list[Call]:
        """The calls, with constants where they were given symbols."""
        found = []
        for node in self._nodes:
            call = _call(node)
            # Keras adds the mode and masks to the arguments that it records, which are for it to find at each run.
            args, kwargs = self._given.get(id(node), (call.args, call.kwargs))
            found.append(self._with_constants(call._replace(args=args, kwargs=kwargs)))
        return found

    def __enter__(self) -> _Trace:
        with contextlib.ExitStack() as stack:
            stack.enter_context(_marking(nodes=self._nodes))
            stack.enter_context(self._symbolic_variables())
            stack.enter_context(self._symbolic_layers())
            stack.enter_context(_Untouched())
            # Constants are constants even where the trace is part of a compilation.
            stack.enter_context(jax.ensure_compile_time_eval())
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def _with_constants(self, call: Call) -> Call:
        def constant(leaf: Any) -> Any:
            return self._constants[id(leaf)][1] if id(leaf) in self._constants else leaf

        args, kwargs = keras.tree.map_structure(constant, (call.args, call.kwargs))
        return call._replace(args=args, kwargs=kwargs)

    @contextlib.contextmanager
    def _symbolic_variables(self) -> Iterator[None]:
        """Operations on variables are recorded: Keras asks here whether an argument is symbolic."""
        true, thread = keras_tensor.KerasTensor, threading.get_ident()

        class Asked(type):
            def __instancecheck__(cls, value: Any) -> bool:
                if isinstance(value, true):
                    return True
                return isinstance(value, keras.Variable) and threading.get_ident() == thread and _at_top()

        keras_tensor.KerasTensor = Asked("KerasTensor", (), {})
        try:
            yield
        finally:
            keras_tensor.KerasTensor = true

    @contextlib.contextmanager
    def _symbolic_layers(self) -> Iterator[None]:
        """Calls of layers on constants are recorded."""
        original, thread = keras.Layer.__call__, threading.get_ident()

        def call(layer: Any, *args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() != thread or not _at_top():
                return original(layer, *args, **kwargs)
            if not any(map(is_symbolic, keras.tree.flatten((args, kwargs)))):
                args, kwargs = keras.tree.map_structure(self._symbol, (args, kwargs))
            outputs = original(layer, *args, **kwargs)
            self._given[id(self._nodes[-1])] = args, kwargs
            return outputs

        keras.Layer.__call__ = call
        try:
            yield
        finally:
            keras.Layer.__call__ = original

    def _symbol(self, value: Any) -> Any:
        if not (keras.ops.is_tensor(value) or isinstance(value, keras.Variable | np.ndarray)):
            return value
        symbol = keras.KerasTensor(value.shape, keras.backend.standardize_dtype(value.dtype))
        self._constants[id(symbol)] = symbol, value
        return symbol


def is_symbolic(value: Any) -> bool:
    """Whether the value stands for a tensor of a graph."""
    return isinstance(value, keras.KerasTensor)


# --- stages given by `PipelineStage` ---------------------------------------------------------------------------------

_STAGE, _OPENS, _INPUTS = "_openipu_stage", "_openipu_opens_stages", "_openipu_inputs"
_marks = threading.local()
_marking_lock = threading.Lock()
_marking_users: list[object] = []
_marked = False
"""Whether anything in this process can have a mark."""
_true_inits = (KerasNode.__init__, keras.Operation.__init__)


def stage_of_layer(layer: Any) -> int | None:
    """The stage in whose `PipelineStage` the layer was made."""
    stage: int | None = vars(layer).get(_STAGE)
    return stage


def current_stage() -> int | None:
    """The stage of the `PipelineStage` that is open in this thread."""
    stage: int | None = getattr(_marks, "stage", None)
    return stage


def marking(stage: int) -> contextlib.AbstractContextManager[None]:
    """Until it is left, layers that this thread makes, and symbolic calls, get `stage`."""
    global _marked
    _marked, model = True, _called_model()
    if model is not None:
        vars(model)[_OPENS] = True
    return _marking(stage=stage)


def in_own_call() -> bool:
    """Whether a model that was made in a strategy's scope is being called, or anything is being traced."""
    tracing, model = global_state.get_global_attribute("stateless_scope") is not None, _called_model()
    return tracing or (model is not None and "_ipu_session" in vars(model))


def _called_model() -> Any:
    """The outermost layer that is being called, or None."""
    return getattr(global_state.get_global_attribute("current_call_ctx"), "entry_layer", None)


def opens_stages(model: Any) -> bool:
    """Whether a `PipelineStage` was entered when the model, a subclassed one, was called; before, whether it may be."""
    if _OPENS in vars(model) or has_graph(model):
        return _OPENS in vars(model)
    return not is_built(model) and any(_names_stages(type(layer).call) for layer in model._flatten_layers())


def _names_stages(function: Any) -> bool:
    """Whether a function mentions `PipelineStage`, by whatever name it knows it."""
    names = getattr(getattr(function, "__code__", None), "co_names", ())
    known = (getattr(function.__globals__.get(name), "__name__", name) for name in names)
    return "PipelineStage" in known


def has_marks(model: Any) -> bool:
    """Whether a layer of the model was made, or a call of its graph recorded, inside a `PipelineStage`."""
    if not _marked:
        return False
    layers = model._flatten_layers(include_self=False)
    graphs = [_functional(part) for part in (model, *layers) if isinstance(part, keras.Model)]
    nodes = (node for graph in graphs if graph is not None for part in graph._nodes_by_depth.values() for node in part)
    return any(stage_of_layer(layer) is not None for layer in layers) or any(_STAGE in vars(node) for node in nodes)


def forget_losses(layers: Sequence[Any]) -> None:
    """Drop the losses that these layers have added in the scope: Keras does so when it calls one again."""
    for layer in layers:
        layer._clear_losses()


@contextlib.contextmanager
def _marking(**marks: Any) -> Iterator[None]:
    """Set marks of this thread; Keras' constructors are hooked while any thread has some."""
    user, before = object(), dict(vars(_marks))
    with _marking_lock:
        _marking_users.append(user)
        KerasNode.__init__, keras.Operation.__init__ = _mark_node, _mark_operation
    vars(_marks).update(marks)
    try:
        yield
    finally:
        vars(_marks).clear()
        vars(_marks).update(before)
        with _marking_lock:
            _marking_users.remove(user)
            if not _marking_users:
                KerasNode.__init__, keras.Operation.__init__ = _true_inits


def _mark_node(node: Any, *args: Any, **kwargs: Any) -> None:
    _true_inits[0](node, *args, **kwargs)
    if current_stage() is not None:
        vars(node)[_STAGE] = current_stage()
    if hasattr(_marks, "nodes") and _at_top():
        _marks.nodes.append(node)


def _mark_operation(operation: Any, *args: Any, **kwargs: Any) -> None:
    _true_inits[1](operation, *args, **kwargs)
    if current_stage() is not None:
        vars(operation)[_STAGE] = current_stage()


# --- functions that make variables -----------------------------------------------------------------------------------

Kind = Literal["weight", "seed", "optimizer", "metric"]


@dataclass(frozen=True, slots=True)
class Made:
    """A variable that was made inside a `Ledger`. `initial()` computes the value it is to begin with."""

    variable: Any
    path: str
    shape: tuple[int, ...]
    dtype: str
    kind: Kind
    initial: Callable[[], Any]


class Ledger(keras.StatelessScope):
    """A scope for code that makes its layers, optimizers and metrics anew each time it is traced.

    `bind(made, number)` gives the value of each variable as it is made, in order. New values end in the ledger, so the
    code is a pure function of what `bind` gives. Names start from scratch, so they are the same in every trace.
    Variables from outside are constants inside: training or changing one is an error. Layers that are not told take
    `training` from here.
    """

    def __init__(self, bind: Callable[[Made, int], Any], minimize: Callable[..., Any], training: bool) -> None:
        super().__init__(collect_losses=True, initialize_variables=False)
        self._bind, self._minimize, self.training = bind, minimize, training
        self.made: list[Made] = []
        self._before: dict[str, Any] = {}

    def __enter__(self) -> Ledger:
        fresh: dict[str, Any] = {
            "object_name_uids": collections.defaultdict(int),
            "name_scope_stack": [],
            "uninitialized_variables": [],
        }
        self._before = {name: global_state.get_global_attribute(name) for name in fresh}
        for name, value in fresh.items():
            global_state.set_global_attribute(name, value)
        _ledgers.__dict__.setdefault("stack", []).append(self)
        _patch_variables(1)
        super().__enter__()
        return self

    def __exit__(self, *args: Any, **kwargs: Any) -> None:
        super().__exit__(*args, **kwargs)
        _patch_variables(-1)
        _ledgers.stack.pop()
        for name, value in self._before.items():
            global_state.set_global_attribute(name, value)

    def names(self) -> dict[str, int]:
        """How often each automatic name has been given so far."""
        return dict(global_state.get_global_attribute("object_name_uids"))

    def go_on_naming(self, names: dict[str, int]) -> None:
        """Give names as if these had been given before."""
        global_state.set_global_attribute("object_name_uids", collections.defaultdict(int, names))

    def add(self, variable: Any, initial: Callable[[], Any]) -> None:
        """Called for each variable after it was made."""
        made = Made(variable, variable.path, tuple(variable.shape), variable._dtype, _kind(), initial)
        self.made.append(made)
        self.state_mapping[id(variable)] = self._bind(made, len(self.made) - 1)

    def get_current_value(self, variable: Any) -> Any:
        """The value of a variable inside; None makes Keras take the one it has outside."""
        value = super().get_current_value(variable)
        if value is None and variable.trainable and variable._value is not None:
            raise ValueError(
                f"model_fn uses the trainable variable {variable.path!r}, which was made outside of it, so it would "
                "never be trained. Make the layer inside model_fn, or set `trainable = False` on it."
            )
        return value

    def add_update(self, update: tuple[Any, Any]) -> None:
        """Keep a variable's new value."""
        if id(update[0]) not in self.state_mapping:
            raise ValueError(
                f"model_fn changes the variable {update[0].path!r}, which was made outside of it, so the change would "
                "be lost. Make the layer, metric or seed generator inside model_fn."
            )
        super().add_update(update)


_ledgers = threading.local()
_patch_lock = threading.Lock()
_patches = 0
_variable_init = keras.Variable.__init__


def current_ledger() -> Ledger | None:
    """The ledger of the code that is being traced in this thread."""
    stack = getattr(_ledgers, "stack", None)
    return stack[-1] if stack else None


def _patch_variables(change: int) -> None:
    """While any ledger is open, variables report to their thread's, and layers and optimizers ask it."""
    global _patches
    with _patch_lock:
        _patches += change
        if change == 1 and _patches == 1:
            keras.Variable.__init__ = _reporting_init
            keras.optimizers.Optimizer.minimize = _minimize
            CallContext.training = property(_get_training, _set_training)
        elif _patches == 0:
            keras.Variable.__init__ = _variable_init
            del keras.optimizers.Optimizer.minimize, CallContext.training


def _get_training(context: Any) -> bool | None:
    """What the outermost layer call was told, else what the ledger says."""
    ledger = current_ledger()
    told: bool | None = vars(context).get("training")
    return ledger.training if told is None and ledger is not None else told


def _set_training(context: Any, value: bool | None) -> None:
    vars(context)["training"] = value


def _minimize(optimizer: Any, loss: Any, *args: Any, **kwargs: Any) -> Any:
    ledger = current_ledger()
    if ledger is None:
        raise RuntimeError("`minimize` belongs into the model_fn of an estimator, but none is being traced here.")
    return ledger._minimize(optimizer, loss, *args, **kwargs)


def _reporting_init(
    variable: Any, initializer: Any, shape: Any = None, dtype: Any = None, *args: Any, **kwargs: Any
) -> None:
    """Keras' own constructor; inside a ledger, initial values are computed by whoever asks for them later.

    Keras allows no initial values (only initializers) in a stateless scope, though optimizers are made from them.
    """
    ledger = current_ledger()
    if ledger is None:
        _variable_init(variable, initializer, shape, dtype, *args, **kwargs)
        return
    make = keras.initializers.get(initializer) if isinstance(initializer, str) else initializer
    if not callable(make):
        if isinstance(make, jax.core.Tracer):
            raise ValueError("A variable was made from a value that is computed inside model_fn. Give an initializer.")
        with jax.ensure_compile_time_eval():
            value = keras.ops.convert_to_tensor(initializer, dtype=dtype)
        shape, dtype, make = value.shape, value.dtype, lambda *_, **__: value

    def bound(*_: Any, **__: Any) -> Any:
        return ledger.state_mapping[id(variable)]

    _variable_init(variable, bound, shape, dtype, *args, **kwargs)
    ledger.add(variable, functools.partial(make, tuple(variable.shape), dtype=variable._dtype))


def _kind() -> Kind:
    """What the variable that is being made belongs to: Keras' name scopes know who opened them."""
    callers = [scope.caller for scope in global_state.get_global_attribute("name_scope_stack") or ()]
    if callers and isinstance(callers[-1], keras.random.SeedGenerator):
        return "seed"
    for caller in callers:
        if isinstance(caller, keras.optimizers.Optimizer):
            return "optimizer"
        if isinstance(caller, keras.metrics.Metric):
            return "metric"
    return "weight"
