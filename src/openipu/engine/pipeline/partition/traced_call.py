"""Traces the `call` of a subclassed model with symbolic inputs."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from openipu.engine.keras_compat import api as keras_api
from openipu.engine.keras_compat import graph_api
from openipu.engine.keras_compat.patches import LAYER_CALLS, SYMBOLIC_TENSORS, tracing
from openipu.engine.types import Array, Tree

import jax
import keras
import numpy as np

from .recorded_calls import LayerCall, Recording, call_of, has_graph, is_symbolic
from .stage_marks import KerasNode, recorded_nodes

_INPUTS = "_openipu_inputs"
_OURS = (keras.__path__[0], jax.__path__[0], str(Path(__file__).parents[3]))
"""Folders of code that error messages do not point users to when a trace fails."""


def note_inputs(model: keras.Model, inputs: Tree) -> None:
    """Remember the shapes and dtypes of the inputs of a model's first call, for `noted_inputs`."""
    if _INPUTS not in vars(model) and not has_graph(model):
        leaves = keras.tree.flatten(inputs)
        if leaves and all(hasattr(leaf, "shape") and hasattr(leaf, "dtype") for leaf in leaves):
            vars(model)[_INPUTS] = keras.tree.map_structure(_symbol_like, inputs)


def noted_inputs(model: keras.Model) -> Tree:
    """Symbolic inputs like those with which a subclassed model was first called or built, or None."""
    if _INPUTS in vars(model):
        return vars(model)[_INPUTS]
    shapes = graph_api.shapes_built_with(model)
    if shapes is None:
        return None
    # Code that asks for the number of rows expects a number, not None.
    return keras.tree.map_shape_structure(lambda shape: keras.KerasTensor((shape[0] or 1, *shape[1:])), shapes)


def _symbol_like(value: Array | keras.KerasTensor) -> keras.KerasTensor:
    shape = tuple(value.shape)
    return keras.KerasTensor((shape[0] or 1, *shape[1:]), keras.backend.standardize_dtype(value.dtype))


def traced(model: keras.Model, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Recording:
    """The calls that a subclassed model makes in its `call`, traced with KerasTensors in the arguments.

    Calls of layers on constants (position embeddings) and operations on variables (tied weights) are recorded as well.
    Keras would compute them once and keep the result as a constant.
    """
    layers = keras_api.all_layers(model)
    unbuilt = [layer.name for layer in layers if not layer.built]
    if unbuilt:
        raise RuntimeError(
            f"Layer {unbuilt[0]!r} of model {model.name!r} has not been built, so its variables are unknown. Call "
            "the model on a batch, or remove the layer if `call` does not use it."
        )
    # In the middle of training, the values are on the devices and the variables are empty.
    with tracing(), keras_api.calls_forgotten(layers), keras_api.placeholders(model.variables):
        try:
            with _CallRecorder() as trace:
                outputs = model.call(*args, **kwargs)
            wrong = [leaf for leaf in keras.tree.flatten(outputs) if not is_symbolic(leaf)]
            if wrong:
                raise TypeError(f"`call` returned {wrong[0]!r}, which does not depend on the inputs")
        except Exception as error:
            raise ValueError(_untraceable(model, error)) from error
    inputs = [leaf for leaf in keras.tree.flatten((args, kwargs)) if is_symbolic(leaf)]
    return Recording(inputs, outputs, trace.calls())


def _untraceable(model: keras.Model, error: Exception) -> str:
    """The message for a `call` that cannot be traced, with the line of the user's code."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(_OURS)]
    where = f" at {frames[-1].filename}:{frames[-1].lineno} (`{frames[-1].line}`)" if frames else ""
    reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return (
        f"`call` of model {model.name!r} cannot be traced with symbolic tensors{where}: {reason} "
        "Use only layers and `keras.ops` on tensors there, and move anything else (jax.numpy, values of tensors or "
        "variables, random numbers, `add_loss`) into the `call` of a layer."
    )


class _Untouched(keras.StatelessScope):
    """Makes sure that a trace neither reads nor writes variables, whose current values it would keep as constants."""

    def get_current_value(self, variable: keras.Variable) -> Any:
        raise TypeError(f"the value of variable {variable.path!r} is needed while tracing.")

    def add_update(self, update: tuple[keras.Variable, Any]) -> Any:
        raise TypeError(f"variable {update[0].path!r} is assigned outside of any layer.")


class _CallRecorder:
    """Records the calls that this thread makes while it is active."""

    def __init__(self) -> None:
        self._nodes: list[KerasNode] = []
        # The arguments of each call as the user gave them, by the identity of its node.
        self._given: dict[int, tuple[tuple[Any, ...], dict[str, Any]]] = {}
        # The constant that each symbol stands for, by the identity of the symbol, which is kept alive.
        self._constants: dict[int, tuple[keras.KerasTensor, Any]] = {}
        self._stack = contextlib.ExitStack()

    def calls(self) -> list[LayerCall]:
        """The recorded calls, with constants in place of the symbols that stood for them."""
        found = []
        for node in self._nodes:
            call = call_of(node)
            # Keras adds the mode and masks to the arguments that it records, but it finds them again in each run.
            args, kwargs = self._given.get(id(node), (call.args, call.kwargs))
            found.append(self._with_constants(call._replace(args=args, kwargs=kwargs)))
        return found

    def __enter__(self) -> _CallRecorder:
        with contextlib.ExitStack() as stack:
            stack.enter_context(recorded_nodes(self._nodes))
            stack.enter_context(self._symbolic_variables())
            stack.enter_context(self._symbolic_layers())
            stack.enter_context(_Untouched())
            # Constants stay constants even if the trace is part of a compilation.
            stack.enter_context(jax.ensure_compile_time_eval())
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def _with_constants(self, call: LayerCall) -> LayerCall:
        def constant(leaf: object) -> object:
            return self._constants[id(leaf)][1] if id(leaf) in self._constants else leaf

        args, kwargs = keras.tree.map_structure(constant, (call.args, call.kwargs))
        return call._replace(args=args, kwargs=kwargs)

    def _symbolic_variables(self) -> contextlib.AbstractContextManager[None]:
        """While active, operations on variables are recorded."""
        return SYMBOLIC_TENSORS.using(lambda value: isinstance(value, keras.Variable) and _at_top())

    def _symbolic_layers(self) -> contextlib.AbstractContextManager[None]:
        """While active, calls of layers on constants are recorded."""

        def call(original: Callable[..., Any], layer: keras.Layer, *args: Any, **kwargs: Any) -> Any:
            if not _at_top():
                return original(layer, *args, **kwargs)
            if not any(map(is_symbolic, keras.tree.flatten((args, kwargs)))):
                args, kwargs = keras.tree.map_structure(self._symbol, (args, kwargs))
            outputs = original(layer, *args, **kwargs)
            self._given[id(self._nodes[-1])] = args, kwargs
            return outputs

        return LAYER_CALLS.using(call)

    def _symbol(self, value: Any) -> Any:
        """A symbol for a constant tensor; anything else as it is."""
        if not (keras.ops.is_tensor(value) or isinstance(value, keras.Variable | np.ndarray)):
            return value
        symbol = keras.KerasTensor(value.shape, keras.backend.standardize_dtype(value.dtype))
        self._constants[id(symbol)] = symbol, value
        return symbol


def _at_top() -> bool:
    """Whether no layer is being called, so that it is the traced `call` itself that runs."""
    return not keras_api.in_layer_call()
