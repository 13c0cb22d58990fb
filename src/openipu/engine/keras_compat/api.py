"""The private parts of Keras that the rest of the package uses, under plain names.

Only this file and patches.py import from `keras.src` or read underscore attributes of Keras' objects, so a new Keras
release is met here and nowhere else. Nothing is decided here: each function is one thing that Keras knows or does.
"""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import keras
from keras.src import api_export
from keras.src.backend.common import global_state
from keras.src.backend.common.masking import get_keras_mask, set_keras_mask
from keras.src.backend.common.variables import AutocastScope, get_autocast_scope
from keras.src.backend.jax.trainer import JAXTrainer
from keras.src.models.functional import Functional, operation_fn, unpack_singleton
from keras.src.saving import object_registration
from keras.src.trainers.data_adapters import get_data_adapter
from keras.src.trainers.data_adapters.array_data_adapter import ArrayDataAdapter
from keras.src.trainers.data_adapters.array_slicing import convert_to_sliceable, train_validation_split
from keras.src.trainers.data_adapters.data_adapter import DataAdapter
from keras.src.trainers.data_adapters.py_dataset_adapter import PyDataset, PyDatasetAdapter
from keras.src.trainers.data_adapters.tf_dataset_adapter import TFDatasetAdapter
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


def has_value(variable: Any) -> bool:
    """Whether a variable has a value of its own, whatever scopes are open."""
    return variable._value is not None


def drop_values(variables: Sequence[Any]) -> None:
    """Free the memory of variables; each is empty until it is assigned again."""
    for variable in variables:
        variable._value = None


def stored_dtype(variable: Any) -> str:
    """The dtype of a variable's value, also where an autocast scope shows another one."""
    dtype: str = variable._dtype
    return dtype


def decays(optimizer: Any, weight: Any) -> bool:
    """Whether an optimizer with weight decay applies it to `weight`."""
    return bool(optimizer._use_weight_decay(weight))


def optimized_variables(optimizer: Any) -> list[Any]:
    """The variables that an optimizer was built for."""
    return list(optimizer._trainable_variables)


# --- models and their trainer ----------------------------------------------------------------------------------------


def all_layers(model: Any, itself: bool = True) -> list[Any]:
    """The layers of a model at all depths, with or without the model itself."""
    return list(model._flatten_layers(include_self=itself))


def compiled_parts(model: Any) -> list[Any]:
    """The losses and metrics that `compile` made, which have variables once Keras has seen a batch."""
    return [part for part in (model._compile_metrics, model._compile_loss) if part is not None]


def symbolic_build(model: Any, batch: Any) -> None:
    """Create the variables of a compiled model, its optimizer and metrics; `batch` may be None if it has its own."""
    model._symbolic_build(data_batch=batch)


def assert_compiled(model: Any, caller: str) -> None:
    """Keras' own error when `compile` was not called."""
    model._assert_compile_called(caller)


def overrides(model: Any, name: str) -> bool:
    """Whether the user wrote a method, such as `train_step`, of Keras' trainer anew."""
    return getattr(type(model), name) is not getattr(JAXTrainer, name)


def update_metrics(model: Any, values: Any, loss: Any, x: Any, y: Any, y_pred: Any, sample_weight: Any) -> Any:
    """The logs and the new values of the metrics' variables after a batch with this loss and these outputs."""
    return model._update_metrics_variables(values, loss, x, y, y_pred, sample_weight)


def start_epoch(model: Any, initial_epoch: int) -> int:
    """Where training starts: a callback such as `BackupAndRestore` may have moved it."""
    return model._initial_epoch or initial_epoch


def should_evaluate(model: Any, epoch: int, validation_freq: Any) -> bool:
    """Whether validation is due after this epoch."""
    return bool(model._should_eval(epoch, validation_freq))


def final_logs(model: Any, logs: dict[str, Any]) -> dict[str, Any]:
    """The metrics of the whole epoch, or the step's own logs where a user's step reports other keys."""
    return dict(model._get_metrics_result_or_logs(logs))


def in_order(model: Any, logs: dict[str, Any]) -> Any:
    """Logs as the list (or scalar) that `evaluate` returns."""
    return model._flatten_metrics_in_order(logs)


# --- data adapters ---------------------------------------------------------------------------------------------------


def adapted_arrays(adapter: ArrayDataAdapter) -> Any:
    """The arrays behind an adapter as the user gave them."""
    return adapter._inputs


def converted_arrays(adapter: ArrayDataAdapter) -> Any:
    """The arrays behind an adapter, converted as Keras converts each batch (float64 becomes float32, and so on)."""

    def convert(part: Any) -> Any:
        return part.convert_to_jax_compatible(part[slice(None)])

    sliceables = convert_to_sliceable(adapter._inputs, target_backend="jax")
    return keras.tree.map_structure(convert, sliceables, none_is_leaf=False)


def array_order(adapter: ArrayDataAdapter) -> tuple[int, int, bool | str]:
    """(number of samples, batch size, shuffle) of an array adapter."""
    return adapter._num_samples, adapter._batch_size, adapter._shuffle


# --- classes ---------------------------------------------------------------------------------------------------------


def model_opener() -> Any:
    """What Keras pickles in place of a model's class: the function that opens the pickle."""
    return keras.Model._unpickle_model


def take_names(new: type, cls: type) -> None:
    """Register `new` under the names that `cls` is saved by."""
    for names in (object_registration.GLOBAL_CUSTOM_NAMES, api_export.REGISTERED_OBJS_TO_NAMES):
        if cls in names:
            names[new] = names[cls]


# --- the graph of a model --------------------------------------------------------------------------------------------


def functional_of(model: Any) -> Any:
    """The Functional model that a model is, or that a Sequential one with known inputs consists of; or None."""
    return model if isinstance(model, Functional) else getattr(model, "_functional", None)


def nodes_of(functional: Any) -> list[Any]:
    """The nodes of a graph, one for each call of a layer or operation, in the order in which they run."""
    by_depth = functional._nodes_by_depth
    return [node for depth in sorted(by_depth, reverse=True) for node in by_depth[depth]]


def is_call(node: Any) -> bool:
    """Whether a node computes something: others are inputs."""
    return bool(node.operation) and not node.is_input


def call_of(node: Any) -> tuple[Any, tuple[Any, ...], dict[str, Any], list[Any]]:
    """The operation of a node, its arguments, keyword arguments and outputs."""
    return node.operation, node.arguments.args, node.arguments.kwargs, list(node.outputs)


def outputs_of(functional: Any) -> Any:
    """The symbolic outputs of a graph in the structure that the model returns."""
    return unpack_singleton(functional._outputs_struct)


def standardized(functional: Any, inputs: Any) -> list[Any]:
    """The flat inputs of a graph, converted as the model itself does (structure, dtype, last axis)."""
    return list(functional._standardize_inputs(inputs))


def run_operation(operation: Any, training: bool | None, args: Any, kwargs: Any) -> Any:
    """Call an operation as a Functional model does: it is told `training` if it takes that and was not called with."""
    return operation_fn(operation, training=training)(*args, **kwargs)


def takes_training(layer: Any) -> bool:
    """Whether `call` has an argument `training`."""
    return bool(layer._call_has_training_arg)


def shapes_built_with(model: Any) -> Any:
    """The shapes of the inputs that a model was built with, or None."""
    return next(iter((model._build_shapes_dict or {}).values()), None)


def clear_losses(layer: Any) -> None:
    """Drop the losses that a layer has added in the scope: Keras does so when it calls one again."""
    layer._clear_losses()


# --- what is going on in this thread ---------------------------------------------------------------------------------


def in_layer_call() -> bool:
    """Whether a layer is being called."""
    return global_state.get_global_attribute("current_call_ctx") is not None


def called_layer() -> Any:
    """The outermost layer that is being called, or None."""
    return getattr(global_state.get_global_attribute("current_call_ctx"), "entry_layer", None)


def in_stateless_scope() -> bool:
    """Whether a stateless scope is open, so that something is being traced."""
    return global_state.get_global_attribute("stateless_scope") is not None


def name_scopes() -> list[Any]:
    """The objects (layers, optimizers, metrics, ...) whose variables are being made, the outermost first."""
    return [scope.caller for scope in global_state.get_global_attribute("name_scope_stack") or ()]


@contextlib.contextmanager
def fresh_names() -> Iterator[None]:
    """Until the block ends, automatic names are given as if none had been given before."""
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
    """How often each automatic name has been given so far."""
    return dict(global_state.get_global_attribute("object_name_uids"))


def go_on_naming(names: dict[str, int]) -> None:
    """Give automatic names as if these had been given before."""
    global_state.set_global_attribute("object_name_uids", collections.defaultdict(int, names))


@contextlib.contextmanager
def calls_forgotten(layers: Sequence[Any]) -> Iterator[None]:
    """When the block ends, the layers no longer know of the calls that were recorded inside."""
    known = [(layer, len(layer._inbound_nodes), len(layer._outbound_nodes)) for layer in layers]
    try:
        yield
    finally:
        for layer, inbound, outbound in known:
            del layer._inbound_nodes[inbound:], layer._outbound_nodes[outbound:]
