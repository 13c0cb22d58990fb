"""The private parts of Keras that the rest of the package uses, under plain names.

Only this file, graph_api.py and patches.py import from `keras.src` or read underscore attributes of Keras' objects. So
a new Keras release requires changes nowhere else. Nothing is decided here: each function is one thing that Keras knows
or does.
"""

from __future__ import annotations

import collections
import contextlib
import secrets
from collections.abc import Collection, Iterator, Sequence
from typing import Any, NoReturn

from openipu.engine.types import Array, Data, Tree

import jax.numpy as jnp
import keras
import numpy as np
from keras.src import api_export
from keras.src.backend.common import global_state
from keras.src.backend.common.masking import get_keras_mask, set_keras_mask
from keras.src.backend.common.variables import AutocastScope, get_autocast_scope
from keras.src.backend.jax.trainer import JAXTrainer
from keras.src.layers.layer import CallContext
from keras.src.layers.preprocessing.data_layer import DataLayer
from keras.src.losses.losses import LossFunctionWrapper
from keras.src.models.functional import Functional
from keras.src.saving import object_registration
from keras.src.trainers.data_adapters import get_data_adapter
from keras.src.trainers.data_adapters.array_data_adapter import ArrayDataAdapter
from keras.src.trainers.data_adapters.array_slicing import Sliceable, convert_to_sliceable, train_validation_split
from keras.src.trainers.data_adapters.data_adapter import DataAdapter
from keras.src.trainers.data_adapters.py_dataset_adapter import PyDataset, PyDatasetAdapter
from keras.src.trainers.data_adapters.tf_dataset_adapter import TFDatasetAdapter
from keras.src.utils import rng_utils
from keras.src.utils.naming import to_snake_case
from keras.src.utils.python_utils import pythonify_logs

__all__ = [
    "ArrayDataAdapter",
    "AutocastScope",
    "DataAdapter",
    "Functional",
    "PyDataset",
    "PyDatasetAdapter",
    "TFDatasetAdapter",
    "get_autocast_scope",
    "get_data_adapter",
    "get_keras_mask",
    "pythonify_logs",
    "set_keras_mask",
    "train_validation_split",
]


# --- variables and optimizers ----------------------------------------------------------------------------------------


def has_value(variable: keras.Variable) -> bool:
    """Whether a variable has a value of its own, regardless of open scopes."""
    return variable._value is not None


def value_in(variable: keras.Variable) -> Array:
    """The value of a variable of its own, regardless of open scopes."""
    value: Array = variable._value
    return value


def drop_values(variables: Sequence[keras.Variable]) -> None:
    """Free the memory of variables. Each one is empty until it is assigned again."""
    for variable in variables:
        variable._value, variable._initializer = None, _in_a_program


def _in_a_program(*_: object, **__: object) -> NoReturn:
    """What Keras calls to get the value of an empty variable."""
    raise RuntimeError(
        "The values of this variable are in a running program, because a `fit` or another call uses its model. Read it "
        "when that call has ended. In a callback, use `self.model`, which waits for the values."
    )


@contextlib.contextmanager
def placeholders(variables: Sequence[keras.Variable]) -> Iterator[None]:
    """Until the block ends, empty variables can be read where only their shape matters. They are zero and take no room.

    Keras fills in an initial value there, but a variable that had a value does not know its initializer any more.
    """

    def zeros(shape: Sequence[int], dtype: str) -> np.ndarray:
        return np.broadcast_to(np.zeros((), jnp.dtype(dtype)), shape)

    empty = [(variable, variable._initializer) for variable in variables if not has_value(variable)]
    for variable, _ in empty:
        variable._initializer = zeros
    try:
        yield
    finally:
        for variable, initializer in empty:
            variable._initializer = initializer


def stored_dtype(variable: keras.Variable) -> str:
    """The dtype of a variable's value, even if an autocast scope shows another one."""
    dtype: str = variable._dtype
    return dtype


def rename(variable: keras.Variable, like: keras.Variable) -> None:
    """Give a variable the name and the path of another one."""
    variable._name, variable._path = like.name, like.path


def decays(optimizer: keras.optimizers.Optimizer, weight: keras.Variable) -> bool:
    """Whether an optimizer with weight decay applies it to `weight`."""
    return bool(optimizer._use_weight_decay(weight))


def optimized_variables(optimizer: keras.optimizers.Optimizer) -> list[keras.Variable]:
    """The variables that an optimizer was built for."""
    return list(optimizer._trainable_variables)


# --- losses and metrics -----------------------------------------------------------------------------------------------


def function_wrappers() -> list[tuple[type, str]]:
    """The classes that make a loss or a metric of a function, and the attribute in which each keeps it."""
    return [(LossFunctionWrapper, "fn"), (keras.metrics.MeanMetricWrapper, "_fn")]


# --- models and their trainer ----------------------------------------------------------------------------------------


def all_layers(model: keras.Layer, itself: bool = True) -> list[keras.Layer]:
    """The layers of a model at all depths, with or without the model itself."""
    return list(model._flatten_layers(include_self=itself))


def prefix_of_names(kind: type) -> str:
    """How the names begin that Keras makes for objects of a class. A number follows, except for the first one."""
    prefix: str = to_snake_case(kind.__name__)
    return prefix


def compiled_parts(model: keras.Model) -> list[Any]:
    """The losses and metrics that `compile` made. They have variables once Keras has seen a batch."""
    return [part for part in (model._compile_metrics, model._compile_loss) if part is not None]


def loss_tracker(model: keras.Model) -> Any:
    """The metric that a compiled model reports as its loss; None before it is compiled."""
    return model._loss_tracker


def compiled_metrics(model: keras.Model) -> Any:
    """What `compile` made of the metrics: one metric for all. None if there are none."""
    return model._compile_metrics


def builder() -> tuple[type, str]:
    """The method with which Keras builds a model from a batch: its class and its name."""
    name = "_symbolic_build"
    return next(kind for kind in keras.Model.__mro__ if name in vars(kind)), name


def symbolic_build(model: keras.Model, batch: Tree) -> None:
    """Create the variables of a compiled model, its optimizer and metrics.

    `batch` may be None if the model and its metrics already have their variables.
    """
    model._symbolic_build(data_batch=batch)


def assert_compiled(model: keras.Model, caller: str) -> None:
    """Raise Keras' own error if `compile` was not called."""
    model._assert_compile_called(caller)


def overrides(model: keras.Model, name: str) -> bool:
    """Whether the user has overridden a method of Keras' trainer, such as `train_step`."""
    return getattr(type(model), name) is not getattr(JAXTrainer, name)


def layers_without_jit(model: keras.Model) -> tuple[list[keras.Layer], list[keras.Layer]]:
    """The layers because of which Keras does not compile the model's steps, and those of them that JAX can compile.

    The latter are Keras' own random augmentations: TensorFlow cannot compile them. JAX cannot compile the slices of
    `RandomCrop` either.
    """
    found = [layer for layer in all_layers(model) if not layer.supports_jit]
    return found, [x for x in found if isinstance(x, DataLayer) and not isinstance(x, keras.layers.RandomCrop)]


def update_metrics(
    model: keras.Model, values: Sequence[Array], loss: Array, x: Tree, y: Tree, y_pred: Tree, sample_weight: Tree
) -> Any:
    """The logs, and the new values of the metrics' variables, after a batch with this loss and these outputs."""
    return model._update_metrics_variables(values, loss, x, y, y_pred, sample_weight)


def start_epoch(model: keras.Model, initial_epoch: int) -> int:
    """The epoch where training starts. A callback such as `BackupAndRestore` may have changed it."""
    return model._initial_epoch or initial_epoch


def should_evaluate(model: keras.Model, epoch: int, validation_freq: int | Collection[int]) -> bool:
    """Whether validation is due after this epoch."""
    return bool(model._should_eval(epoch, validation_freq))


def final_logs(model: keras.Model, logs: dict[str, Any]) -> dict[str, Any]:
    """The metrics of the whole epoch, or the step's own logs if a user's step reports other keys."""
    return dict(model._get_metrics_result_or_logs(logs))


def in_order(model: keras.Model, logs: dict[str, Any]) -> Any:
    """Logs as the list or scalar that `evaluate` returns."""
    return model._flatten_metrics_in_order(logs)


# --- losses ----------------------------------------------------------------------------------------------------------


def compiled_loss(model: keras.Model) -> Any:
    """The loss that `compile` made of all losses of a model, or None."""
    return model._compile_loss


def compilation(model: keras.Model) -> Any:
    """What stands for the latest call of `compile`: another object after each; None before the first."""
    return getattr(model, "_compile_config", None)


def loss_reductions(model: keras.Model) -> set[str]:
    """How the losses of a compiled and built model combine samples: "sum", "sum_over_batch_size" and so on."""
    return {loss.reduction for loss in _losses(model) if isinstance(loss, keras.losses.Loss)}


def sparse_losses(model: keras.Model) -> list[keras.losses.Loss]:
    """The sparse categorical crossentropies among the losses of a compiled and built model."""
    return [loss for loss in _losses(model) if is_sparse(loss)]


def _losses(model: keras.Model) -> list[Any]:
    return [entry.loss for entry in getattr(model._compile_loss, "_flat_losses", None) or ()]


def is_sparse(loss: keras.losses.Loss) -> bool:
    """Whether a loss is Keras' sparse categorical crossentropy, and not a variation of the user's own."""
    cls = type(loss)
    return (
        isinstance(loss, LossFunctionWrapper)
        and loss.fn is keras.losses.sparse_categorical_crossentropy
        and cls.call is LossFunctionWrapper.call
        and cls.__call__ is keras.losses.Loss.__call__
    )


def sparse_settings(loss: LossFunctionWrapper) -> tuple[int, int | None]:
    """The axis of the classes, and the label that is ignored, if any."""
    settings = loss._fn_kwargs
    return settings.get("axis", -1), settings.get("ignore_class")


# --- data adapters ---------------------------------------------------------------------------------------------------


def adapted_arrays(adapter: ArrayDataAdapter) -> Data:
    """The arrays behind an adapter, as the user gave them."""
    return adapter._inputs


def converted_arrays(adapter: ArrayDataAdapter) -> Tree:
    """The arrays behind an adapter, converted as Keras converts each batch (float64 becomes float32, and so on)."""

    def convert(part: Sliceable) -> Any:
        return part.convert_to_jax_compatible(part[slice(None)])

    sliceables = convert_to_sliceable(adapter._inputs, target_backend="jax")
    return keras.tree.map_structure(convert, sliceables, none_is_leaf=False)


def array_order(adapter: ArrayDataAdapter) -> tuple[int, int, bool | str]:
    """(number of samples, batch size, shuffle) of an array adapter."""
    return adapter._num_samples, adapter._batch_size, adapter._shuffle


# --- classes ---------------------------------------------------------------------------------------------------------


def model_opener() -> Any:
    """What Keras pickles in place of a model's class: the function that loads the pickle."""
    return keras.Model._unpickle_model


def take_names(new: type, cls: type) -> None:
    """Register `new` under the names that `cls` is saved under."""
    for names in (object_registration.GLOBAL_CUSTOM_NAMES, api_export.REGISTERED_OBJS_TO_NAMES):
        if cls in names:
            names[new] = names[cls]


# --- what is going on in this thread ---------------------------------------------------------------------------------


def random_seed() -> int:
    """A seed for random numbers that follows from `keras.utils.set_random_seed`, if it was called."""
    known = rng_utils.get_random_seed()
    return secrets.randbits(31) if known is None else int(known)


def forget_loss(layer: keras.Layer, loss: Array) -> None:
    """Let a layer no longer know a loss that it has added, because another value may get its identity."""
    layer._loss_ids.discard(id(loss))


def in_layer_call() -> bool:
    """Whether a layer is being called."""
    return global_state.get_global_attribute("current_call_ctx") is not None


def called_layer() -> keras.Layer | None:
    """The outermost layer that is being called, or None."""
    return getattr(global_state.get_global_attribute("current_call_ctx"), "entry_layer", None)


@contextlib.contextmanager
def inside_call(layer: keras.Layer) -> Iterator[None]:
    """Until the block ends, layers are called as if from `layer`, so they keep the losses of earlier calls."""
    before = global_state.get_global_attribute("current_call_ctx")
    global_state.set_global_attribute("current_call_ctx", CallContext(entry_layer=layer))
    try:
        yield
    finally:
        global_state.set_global_attribute("current_call_ctx", before)


def stateless_scope() -> keras.StatelessScope | None:
    """The stateless scope that is open, if there is one."""
    scope: keras.StatelessScope | None = global_state.get_global_attribute("stateless_scope")
    return scope


def in_stateless_scope() -> bool:
    """Whether a stateless scope is open, which means that something is being traced."""
    return stateless_scope() is not None


def in_symbolic_scope() -> bool:
    """Whether Keras runs code only to find out shapes and to make variables."""
    return global_state.get_global_attribute("symbolic_scope") is not None


def name_scopes() -> list[Any]:
    """The objects (layers, optimizers, metrics, ...) whose variables are being made, outermost first."""
    return [scope.caller for scope in global_state.get_global_attribute("name_scope_stack") or ()]


@contextlib.contextmanager
def fresh_names() -> Iterator[None]:
    """Until the block ends, automatic names are counted from the start."""
    fresh: dict[str, Any] = {
        "object_name_uids": collections.defaultdict(int),
        "name_scope_stack": [],
        "uninitialized_variables": [],
    }
    before = {name: global_state.get_global_attribute(name) for name in fresh}
    for name, value in fresh.items():
        global_state.set_global_attribute(name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            global_state.set_global_attribute(name, value)


def given_names() -> dict[str, int]:
    """How often each automatic name has been used so far."""
    return dict(global_state.get_global_attribute("object_name_uids"))


def go_on_naming(names: dict[str, int]) -> None:
    """Continue automatic naming as if these names had been used already."""
    global_state.set_global_attribute("object_name_uids", collections.defaultdict(int, names))


@contextlib.contextmanager
def calls_forgotten(layers: Sequence[keras.Layer]) -> Iterator[None]:
    """When the block ends, the layers forget the calls that were recorded inside it."""
    known = [(layer, len(layer._inbound_nodes), len(layer._outbound_nodes)) for layer in layers]
    try:
        yield
    finally:
        for layer, inbound, outbound in known:
            del layer._inbound_nodes[inbound:], layer._outbound_nodes[outbound:]
