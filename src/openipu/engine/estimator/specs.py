"""What a model_fn returns, and the rules for it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

from openipu import _validate as validate
from openipu.engine.core.state import Mode
from openipu.engine.types import Array, Tree

import jax
import keras
import numpy as np


class ModeKeys:
    """The modes in which model_fn is called.

    >>> ipu.estimator.ModeKeys.TRAIN, ipu.estimator.ModeKeys.EVAL, ipu.estimator.ModeKeys.PREDICT
    ('train', 'eval', 'infer')
    """

    TRAIN: Literal["train"] = "train"
    EVAL: Literal["eval"] = "eval"
    PREDICT: Literal["infer"] = "infer"


ENGINE_MODE: dict[str, Mode] = {ModeKeys.TRAIN: "train", ModeKeys.EVAL: "test", ModeKeys.PREDICT: "predict"}


@dataclass(frozen=True, slots=True, eq=False)
class TrainOp:
    """The record that `optimizer.minimize(loss)` returns. The engine differentiates `loss` and applies `optimizer`.

    >>> def model_fn(features, labels, mode):
    ...     loss = keras.ops.mean((keras.layers.Dense(1)(features)[:, 0] - labels) ** 2)
    ...     train_op = keras.optimizers.SGD(0.01).minimize(loss)
    ...     assert isinstance(train_op, ipu.estimator.TrainOp)
    ...     return ipu.estimator.EstimatorSpec(mode, loss=loss, train_op=train_op)
    >>> _ = ipu.estimator.IPUEstimator(model_fn, "run").train(input_fn, steps=1)
    """

    optimizer: keras.optimizers.Optimizer
    loss: Array
    variables: tuple[keras.Variable, ...]


@dataclass(frozen=True, slots=True, eq=False)
class LogOp:
    """The record that `IPULoggingTensorHook.log` returns."""

    hook: Any


@dataclass(frozen=True, slots=True, eq=False)
class Group:
    """Several records in one `train_op`."""

    ops: tuple[Any, ...]


def group(*ops: Any) -> Group:
    """Combine several records into one `train_op`, for example `group(optimizer.minimize(loss), hook.log(loss))`.

    >>> def model_fn(features, labels, mode):
    ...     loss = keras.ops.mean((keras.layers.Dense(1)(features)[:, 0] - labels) ** 2)
    ...     hook = ipu.estimator.IPULoggingTensorHook(every_n_iter=100)
    ...     train_op = ipu.estimator.group(keras.optimizers.SGD(0.01).minimize(loss), hook.log({"loss": loss}))
    ...     return ipu.estimator.EstimatorSpec(mode, loss=loss, train_op=train_op, training_hooks=[hook])
    >>> _ = ipu.estimator.IPUEstimator(model_fn, "logged").train(input_fn, steps=2)
    """
    return Group(ops)


@dataclass(frozen=True, slots=True, eq=False)
class IPUEstimatorSpec:
    """What a model_fn returns: the tensors and records that its mode needs.

    >>> def model_fn(features, labels, mode):
    ...     outputs = keras.layers.Dense(1)(features)[:, 0]
    ...     loss = keras.ops.mean((outputs - labels) ** 2)
    ...     error = keras.ops.mean(abs(outputs - labels))
    ...     return ipu.estimator.IPUEstimatorSpec(mode, loss=loss, eval_metric_ops={"error": error})
    >>> _ = estimator.train(input_fn, steps=2)
    >>> sorted(ipu.estimator.IPUEstimator(model_fn, "run").evaluate(input_fn, steps=2))
    ['error', 'global_step', 'loss']

    Args:
        mode: One of `ModeKeys`.
        predictions: An array, or a dict of arrays, with one row per example (PREDICT).
        loss: A scalar (TRAIN, EVAL).
        train_op: What `optimizer.minimize(loss)` returns, alone or in a list or `group` with other records (TRAIN).
        eval_metric_ops: Metrics on the device (EVAL), by name: a Keras metric that model_fn has updated, a tuple
            `(metric, y_true, y_pred[, sample_weight])`, or a scalar, which is averaged over all examples.
        eval_metrics: Or metrics on the host (EVAL): `(function, tensors)`. The function is called once with the tensors
            of all steps and replicas, in the order of the data, and returns a dict.
        host_call: `(function, [tensors])`, called on the host after each training step. It requires an
            `iterations_per_loop` of 1.
        training_hooks, evaluation_hooks, prediction_hooks: Hooks in addition to those passed to `train` and so on.
    """

    mode: str
    predictions: Tree = None
    loss: Any = None
    train_op: Any = None
    eval_metric_ops: dict[str, Any] | None = None
    eval_metrics: tuple[Callable[..., dict[str, Any]], Any] | None = None
    host_call: tuple[Callable[..., Any], list[Any]] | None = None
    training_hooks: Sequence[Any] | None = None
    evaluation_hooks: Sequence[Any] | None = None
    prediction_hooks: Sequence[Any] | None = None

    def __post_init__(self) -> None:
        validate.choice("mode", self.mode, ENGINE_MODE)
        for name in ("training_hooks", "evaluation_hooks", "prediction_hooks"):
            validate.sequence(name, getattr(self, name), optional=True)
        _check_pair("host_call", self.host_call, (list,))
        _check_pair("eval_metrics", self.eval_metrics, (list, dict))

    @property
    def hooks(self) -> tuple[Any, ...]:
        """The hooks for the spec's mode."""
        hooks = {"train": self.training_hooks, "eval": self.evaluation_hooks, "infer": self.prediction_hooks}
        return tuple(hooks[self.mode] or ())


@dataclass(frozen=True, slots=True, eq=False)
class EstimatorSpec:
    """What a model_fn returns, in the form of `tf.estimator`. For the arguments see `IPUEstimatorSpec`.

    `export_outputs` and `scaffold` have no effect; a warning says so once.

    >>> def model_fn(features, labels, mode):
    ...     loss = keras.ops.mean((keras.layers.Dense(1)(features)[:, 0] - labels) ** 2)
    ...     return ipu.estimator.EstimatorSpec(mode, loss=loss, train_op=keras.optimizers.SGD(0.01).minimize(loss))
    >>> _ = ipu.estimator.IPUEstimator(model_fn, "run").train(input_fn, steps=2)
    """

    mode: str
    predictions: Tree = None
    loss: Any = None
    train_op: Any = None
    eval_metric_ops: dict[str, Any] | None = None
    export_outputs: Any = None
    training_chief_hooks: Sequence[Any] | None = None
    training_hooks: Sequence[Any] | None = None
    scaffold: Any = None
    evaluation_hooks: Sequence[Any] | None = None
    prediction_hooks: Sequence[Any] | None = None

    def __post_init__(self) -> None:
        self.as_ipu_spec()
        unused = {"export_outputs": "Keras saves models", "scaffold": "there are no sessions"}
        validate.no_effect({f"EstimatorSpec.{n}": why for n, why in unused.items() if getattr(self, n) is not None})

    def as_ipu_spec(self) -> IPUEstimatorSpec:
        """This spec in the form that the engine uses."""
        shared = {field.name for field in fields(IPUEstimatorSpec)} & {field.name for field in fields(EstimatorSpec)}
        values = {name: getattr(self, name) for name in shared}
        training = (
            *validate.sequence("training_hooks", self.training_hooks, optional=True),
            *validate.sequence("training_chief_hooks", self.training_chief_hooks, optional=True),
        )
        return IPUEstimatorSpec(**values | {"training_hooks": training})


def checked(spec: object, mode: str) -> IPUEstimatorSpec:
    """The spec that model_fn returned; raises if it is not a spec or not complete for `mode`."""
    if not isinstance(spec, EstimatorSpec | IPUEstimatorSpec):
        found = "a tensor" if isinstance(spec, jax.Array) else f"a value of type {type(spec).__name__}"
        raise ValueError(f"model_fn returned {found}. Return an `EstimatorSpec` or `IPUEstimatorSpec`.")
    complete: IPUEstimatorSpec = spec.as_ipu_spec() if isinstance(spec, EstimatorSpec) else spec
    _check_complete(complete, mode)
    return complete


def _check_complete(spec: IPUEstimatorSpec, mode: str) -> None:
    if spec.mode != mode:
        raise ValueError(f"model_fn was called for {mode!r} but returned a spec for {spec.mode!r}. Pass on `mode`.")
    needed = {"train": ("loss", "train_op"), "eval": ("loss",), "infer": ("predictions",)}[mode]
    for name in needed:
        if getattr(spec, name) is None:
            raise ValueError(f"The spec that model_fn returned for {mode!r} has no `{name}`. Add it.")
    if mode == "eval":
        _check_metrics(spec)
    if spec.loss is not None and np.shape(spec.loss) not in ((), (1,)):
        raise ValueError(
            f"`loss` has shape {np.shape(spec.loss)} instead of one number per micro-batch. Take its `keras.ops.mean`."
        )


def train_op_of(spec: IPUEstimatorSpec) -> TrainOp:
    """The record of `optimizer.minimize(loss)` in a spec's `train_op`; raises unless there is exactly one."""
    found = [op for op in _flat(spec.train_op) if isinstance(op, TrainOp)]
    others = [op for op in _flat(spec.train_op) if not isinstance(op, TrainOp | LogOp)]
    if others or len(found) != 1:
        raise ValueError(
            f"`train_op` holds {len(found)} records of `optimizer.minimize(loss)`"
            + (f" and a {type(others[0]).__name__}" if others else "")
            + ". Give exactly one, alone or together with what `IPULoggingTensorHook.log` returns."
        )
    return found[0]


def _flat(op: object) -> list[object]:
    if isinstance(op, Group):
        op = op.ops
    return [leaf for part in op for leaf in _flat(part)] if isinstance(op, list | tuple) else [op]


def _check_metrics(spec: IPUEstimatorSpec) -> None:
    given = [name for name in ("eval_metric_ops", "eval_metrics") if getattr(spec, name) is not None]
    if len(given) != 1:
        raise ValueError(
            f"{len(given)} of `eval_metric_ops` (on the device) and `eval_metrics` (on the host) are given for "
            "evaluation. Give exactly one of them."
        )
    metrics = validate.mapping("eval_metric_ops", spec.eval_metric_ops, optional=True)
    check_metric_names(metrics)
    for name, value in metrics.items():
        if isinstance(value, tuple) and not (len(value) > 1 and isinstance(value[0], keras.metrics.Metric)):
            raise TypeError(f"The metric {name!r} is a tuple without a Keras metric. Give (metric, y_true, y_pred).")
        if not isinstance(value, tuple | keras.metrics.Metric) and np.shape(value) != ():
            raise ValueError(
                f"The metric {name!r} has shape {np.shape(value)}. Give a Keras metric, a tuple (metric, y_true, "
                "y_pred), or a scalar."
            )


def check_metric_names(metrics: Iterable[str], own: Sequence[str] = ("loss", "global_step")) -> None:
    """Raise if a metric has a name that `evaluate` uses for a result of its own."""
    for name in metrics:
        if name in own:
            raise ValueError(f"A metric is called {name!r}, which `evaluate` reports itself. Choose another name.")


def _check_pair(name: str, pair: object, kinds: tuple[type, ...]) -> None:
    if pair is None:
        return
    wanted = " or ".join(f"a {kind.__name__}" for kind in kinds)
    if not isinstance(pair, tuple):
        raise TypeError(f"`{name}` is a {type(pair).__name__}. Give a tuple: a function and {wanted} of tensors.")
    if len(pair) != 2:
        raise ValueError(f"`{name}` has {len(pair)} elements. Give 2: a function and {wanted} of tensors.")
    validate.function(f"{name}[0]", pair[0])
    validate.instance(f"{name}[1]", pair[1], *kinds)
