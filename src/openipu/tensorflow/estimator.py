"""TensorFlow 1's way of writing a model_fn: `tf.compat.v1.train`, `.metrics`, `.layers` and `.losses`.

`tf.estimator` itself is `openipu.estimator` (names.py). The functions and classes here do this only while a model_fn is
traced; outside, TensorFlow's own are used.
"""

from __future__ import annotations

import inspect
import logging
import re
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, Final

import openipu.estimator
from openipu.engine.estimator.hooks import in_hook
from openipu.engine.estimator.model_trace import ModelFnTrace, get_global_step
from openipu.engine.estimator.specs import TrainOp
from openipu.engine.estimator.variable_ledger import current_ledger
from openipu.engine.types import Array

import keras
import tensorflow as tf

from . import learning_rates
from .elementwise import Tensor
from .native import native
from .native_nn import cross_entropy, sparse_cross_entropy
from .replacements import Replacements
from .values import where

# --- optimizers ------------------------------------------------------------------------------------------------------


def _descent(learning_rate: float, use_locking: bool = False, name: str = "GradientDescent") -> Any:
    del use_locking, name
    return keras.optimizers.SGD(_rate(learning_rate))


def _momentum(
    learning_rate: float,
    momentum: float,
    use_locking: bool = False,
    name: str = "Momentum",
    use_nesterov: bool = False,
) -> Any:
    del use_locking, name
    return keras.optimizers.SGD(_rate(learning_rate), momentum, use_nesterov)


def _adam(
    learning_rate: float = 0.001,
    beta1: float = 0.9,
    beta2: float = 0.999,
    epsilon: float = 1e-8,
    use_locking: bool = False,
    name: str = "Adam",
) -> Any:
    del use_locking, name
    return keras.optimizers.Adam(_rate(learning_rate), beta1, beta2, epsilon)


def _adagrad(
    learning_rate: float, initial_accumulator_value: float = 0.1, use_locking: bool = False, name: str = "Adagrad"
) -> Any:
    del use_locking, name
    return keras.optimizers.Adagrad(_rate(learning_rate), initial_accumulator_value, epsilon=0.0)


def _adadelta(
    learning_rate: float = 0.001,
    rho: float = 0.95,
    epsilon: float = 1e-8,
    use_locking: bool = False,
    name: str = "Adadelta",
) -> Any:
    del use_locking, name
    return keras.optimizers.Adadelta(_rate(learning_rate), rho, epsilon)


class RMSProp(keras.optimizers.RMSprop):
    """RMSprop as in TensorFlow 1: the moving average of the squares starts at one."""

    def add_optimizer_variables(
        self, trainable_variables: Sequence[keras.Variable], name: str, initializer: str = "zeros"
    ) -> Any:
        """Add a variable for each weight."""
        first = "ones" if name == "velocity" else initializer
        return super().add_optimizer_variables(trainable_variables, name, first)


def _rmsprop(
    learning_rate: float,
    decay: float = 0.9,
    momentum: float = 0.0,
    epsilon: float = 1e-10,
    use_locking: bool = False,
    centered: bool = False,
    name: str = "RMSProp",
) -> Any:
    del use_locking, name
    return RMSProp(_rate(learning_rate), decay, momentum, epsilon, centered)


def _ftrl(
    learning_rate: float,
    learning_rate_power: float = -0.5,
    initial_accumulator_value: float = 0.1,
    l1_regularization_strength: float = 0.0,
    l2_regularization_strength: float = 0.0,
    use_locking: bool = False,
    name: str = "Ftrl",
    accum_name: str | None = None,
    linear_name: str | None = None,
    l2_shrinkage_regularization_strength: float = 0.0,
    beta: float | None = None,
) -> Any:
    del use_locking, name, accum_name, linear_name
    return keras.optimizers.Ftrl(
        _rate(learning_rate), learning_rate_power, initial_accumulator_value, l1_regularization_strength,
        l2_regularization_strength, l2_shrinkage_regularization_strength, beta or 0.0,
    )  # fmt: skip


OPTIMIZERS: Final[dict[str, Callable[..., Any]]] = {
    "AdadeltaOptimizer": _adadelta,
    "AdagradOptimizer": _adagrad,
    "AdamOptimizer": _adam,
    "FtrlOptimizer": _ftrl,
    "GradientDescentOptimizer": _descent,
    "MomentumOptimizer": _momentum,
    "RMSPropOptimizer": _rmsprop,
}
OTHER_OPTIMIZERS: Final = (
    "AdagradDAOptimizer", "ProximalAdagradOptimizer", "ProximalGradientDescentOptimizer", "SyncReplicasOptimizer",
)  # fmt: skip
"""Optimizers that Keras does not have."""


def _rate(rate: Any) -> Any:
    return float(rate) if isinstance(rate, int) else rate


def _optimizer(name: str, original: type) -> type:
    make = OPTIMIZERS.get(name)

    class Optimizer(original):
        def __new__(cls, *args: Any, **kwargs: Any) -> Any:
            if cls is not Optimizer or current_ledger() is None:
                return super().__new__(cls)
            if make is None:
                raise NotImplementedError(
                    f"`{name}` is not available in a model_fn ({where()}). Use an optimizer of `tf.keras.optimizers`, "
                    f"or one of {', '.join(OPTIMIZERS)}."
                )
            return _with_rate(make, *args, **kwargs)

    Optimizer.__name__ = Optimizer.__qualname__ = name
    return Optimizer


def _with_rate(make: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """An optimizer whose learning rate may be a value that model_fn computes, such as a decay of the global step."""
    given = inspect.signature(make).bind(*args, **kwargs)
    rate = given.arguments.get("learning_rate")
    if not isinstance(rate, Array | tf.Tensor):
        return make(*args, **kwargs)
    given.arguments["learning_rate"] = 0.0
    optimizer = make(*given.args, **given.kwargs)
    optimizer.learning_rate = keras.ops.convert_to_tensor(rate)
    return optimizer


def _own_step(original: Callable[..., TrainOp]) -> Callable[..., TrainOp]:
    """`minimize(loss, global_step)`: the estimator counts its own step already."""

    def minimize(
        self: ModelFnTrace, optimizer: Any, loss: Array, global_step: object = None, *args: Any, **kwargs: Any
    ) -> TrainOp:
        own = None if global_step is self.global_step else global_step
        return original(self, optimizer, loss, own, *args, **kwargs)

    return minimize


def _step(original: Callable[..., Any]) -> Callable[..., Any]:
    """The global step: a value in model_fn, and in hooks the name by which `SessionRunArgs` asks for it."""

    def global_step(graph: Any = None) -> Any:
        if current_ledger() is not None:
            return get_global_step()
        return "global_step" if in_hook() else original(graph)

    return global_step


def _trainable_variables(original: Callable[..., Any]) -> Callable[..., Any]:
    """What model_fn has made so far and can be trained, for example to sum up its weights."""

    def trainable_variables(scope: str | None = None) -> Any:
        ledger = current_ledger()
        if ledger is None:
            return original(scope)
        made = [m.variable for m in ledger.made if m.kind == "weight" and m.variable.trainable]
        return [v for v in made if scope is None or re.match(scope, v.path)]

    return trainable_variables


def _group(original: Callable[..., Any]) -> Callable[..., Any]:
    def group(*inputs: Any, **kwargs: Any) -> Any:
        return original(*inputs, **kwargs) if current_ledger() is None else openipu.estimator.group(*inputs)

    return group


def _summary(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    def summary(*args: Any, **kwargs: Any) -> Any:
        if current_ledger() is not None:
            raise NotImplementedError(
                f"`tf.summary.{name}` is not available in a model_fn ({where()}): a running program cannot write event "
                "files. The loss is written anyway; log other tensors with `IPULoggingTensorHook`, or write them in a "
                "`host_call`."
            )
        return original(*args, **kwargs)

    return summary


def _verbosity(original: Callable[..., None]) -> Callable[..., None]:
    """Show loss and speed, which the logger `openipu` gets here, where scripts ask TensorFlow's to show them."""

    def set_verbosity(v: int | str) -> None:
        original(v)
        log = logging.getLogger("openipu")
        log.setLevel(v)
        if not log.hasHandlers():
            log.propagate = False  # packages that are loaded later may show what comes to the root
            for handler in tf.get_logger().handlers:
                log.addHandler(handler)

    return set_verbosity


SUMMARIES: Final = ("audio", "histogram", "image", "scalar", "text")
HOOKS: Final = (
    "CheckpointSaverListener", "SessionRunArgs", "SessionRunContext", "SessionRunHook", "SessionRunValues",
)  # fmt: skip

# --- metrics ---------------------------------------------------------------------------------------------------------

METRICS: Final[dict[str, Any]] = {
    "accuracy": keras.metrics.Accuracy,
    "mean": keras.metrics.Mean,
    "mean_absolute_error": keras.metrics.MeanAbsoluteError,
    "mean_squared_error": keras.metrics.MeanSquaredError,
    "precision": keras.metrics.Precision,
    "recall": keras.metrics.Recall,
    "root_mean_squared_error": keras.metrics.RootMeanSquaredError,
}


def _metric(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    """A metric as TensorFlow 1 returns it: the value and the update, here a Keras metric and its arguments."""

    kind: Any = METRICS[name]

    class Metric(kind):
        def update_state(self, arguments: tuple[Tensor, ...]) -> None:
            super().update_state(*arguments)

    def metric(*tensors: Tensor, weights: Tensor = None, name: str | None = None, **kwargs: Any) -> Any:
        if current_ledger() is None:
            return original(*tensors, weights=weights, name=name, **kwargs)
        named = [kwargs.pop(argument) for argument in ("labels", "predictions", "values") if argument in kwargs]
        if kwargs:
            raise NotImplementedError(f"A metric in a model_fn has no {sorted(kwargs)} ({where()}). Leave them out.")
        return Metric(), (*tensors, *named, *(() if weights is None else (weights,)))

    return metric


# --- layers and losses -----------------------------------------------------------------------------------------------

LAYERS: Final[dict[str, Any]] = {
    "average_pooling2d": keras.layers.AveragePooling2D,
    "batch_normalization": keras.layers.BatchNormalization,
    "conv1d": keras.layers.Conv1D,
    "conv2d": keras.layers.Conv2D,
    "dense": keras.layers.Dense,
    "flatten": keras.layers.Flatten,
    "max_pooling2d": keras.layers.MaxPooling2D,
}


def layers_module() -> ModuleType:
    """`tf.compat.v1.layers`, which TensorFlow has lost together with Keras 2."""
    module = ModuleType("tensorflow.compat.v1.layers", "Layers as functions that make their own variables.")
    for name, layer in LAYERS.items():
        setattr(module, name, _layer(name, layer))
    vars(module)["dropout"] = _dropout
    return module


def _layer(name: str, layer: Any) -> Callable[..., Any]:
    modes = name == "batch_normalization"  # not in training unless told so

    def make(inputs: Tensor, *args: Any, training: bool = False, **kwargs: Any) -> Any:
        if kwargs.pop("reuse", None):
            raise NotImplementedError(
                f"`{name}(reuse=True)` is not available ({where()}). Make a layer of `tf.keras.layers`, and call it "
                "twice."
            )
        made = layer(*args, **kwargs)
        return made(inputs, training=training) if modes else made(inputs)

    make.__name__ = name
    return make


def _dropout(inputs: Tensor, rate: float = 0.5, training: bool = False, name: str | None = None) -> Any:
    return keras.layers.Dropout(rate, name=name)(inputs, training=training)


@native("losses.sparse_softmax_cross_entropy")
def _sparse_loss(labels: Tensor, logits: Tensor) -> Tensor:
    return keras.ops.mean(sparse_cross_entropy(labels, logits))


@native("losses.softmax_cross_entropy")
def _softmax_loss(onehot_labels: Tensor, logits: Tensor) -> Tensor:
    return keras.ops.mean(cross_entropy(onehot_labels, logits))


@native("losses.mean_squared_error")
def _squared_loss(labels: Tensor, predictions: Tensor) -> Tensor:
    return keras.ops.mean(keras.ops.square(labels - predictions))


@native("losses.absolute_difference")
def _absolute_loss(labels: Tensor, predictions: Tensor) -> Tensor:
    return keras.ops.mean(keras.ops.abs(labels - predictions))


def install(replacements: Replacements) -> None:
    """Let model functions use TensorFlow 1's names."""
    v1 = tf.compat.v1
    for name in (*OPTIMIZERS, *OTHER_OPTIMIZERS):
        replacements.put(v1.train, name, _optimizer(name, getattr(v1.train, name)))
    for name in ("get_global_step", "get_or_create_global_step"):
        replacements.put(v1.train, name, _step(getattr(v1.train, name)))
    replacements.put(ModelFnTrace, "minimize", _own_step(ModelFnTrace.minimize))
    for name in METRICS:
        replacements.put(v1.metrics, name, _metric(name, getattr(v1.metrics, name)))
    replacements.put(v1, "layers", layers_module())
    replacements.put(v1, "trainable_variables", _trainable_variables(v1.trainable_variables))
    replacements.put(v1.logging, "set_verbosity", _verbosity(v1.logging.set_verbosity))
    for module in (tf, v1):
        replacements.put(module, "group", _group(module.group))
        for name in SUMMARIES:
            replacements.put(module.summary, name, _summary(name, getattr(module.summary, name)))
    for name in HOOKS:
        replacements.put(v1.train, name, getattr(openipu.estimator, name))
    learning_rates.install(replacements)
