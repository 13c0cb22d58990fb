"""What a subclassed model does to symbolic inputs: its `call` is traced."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from openipu.engine.keras_compat import api as keras_api
from openipu.engine.keras_compat.patches import LAYER_CALLS, SYMBOLIC_TENSORS, tracing

import jax
import keras
import numpy as np

from .recorded_calls import LayerCall, Recording, call_of, has_graph, is_symbolic
from .stage_marks import recorded_nodes

_INPUTS = "_openipu_inputs"
_OURS = (keras.__path__[0], jax.__path__[0], str(Path(__file__).parents[1]))
"""Where code lies that users are not shown when a trace fails."""


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
    shapes = keras_api.shapes_built_with(model)
    if shapes is None:
        return None
    # Code that asks for the number of rows wants a number.
    return keras.tree.map_shape_structure(lambda shape: keras.KerasTensor((shape[0] or 1, *shape[1:])), shapes)


def _symbol_like(value: Any) -> Any:
    shape = tuple(value.shape)
    return keras.KerasTensor((shape[0] or 1, *shape[1:]), keras.backend.standardize_dtype(value.dtype))


def traced(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Recording:
    """What `call` of a subclassed model does, traced with KerasTensors in the arguments.

    Calls of layers become calls of the graph, also those on constants (position embeddings), and so do operations on
    variables (tied weights), which Keras would compute once and for all.
    """
    layers = keras_api.all_layers(model)
    unbuilt = [layer.name for layer in layers if not layer.built]
    if unbuilt:
        raise RuntimeError(
            f"Layer {unbuilt[0]!r} of model {model.name!r} has not been built, so its variables are not known. Call "
            "the model on a batch, or remove the layer if `call` does not use it."
        )
    with tracing(), keras_api.calls_forgotten(layers):
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


def _untraceable(model: Any, error: Exception) -> str:
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(_OURS)]
    where = f" at {frames[-1].filename}:{frames[-1].lineno} (`{frames[-1].line}`)" if frames else ""
    reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return (
        f"`call` of model {model.name!r} cannot be traced with symbolic tensors{where}: {reason} "
        "Use layers and `keras.ops` on tensors there, and put anything else (jax.numpy, values of tensors or "
        "variables, random numbers, `add_loss`) into the `call` of a layer."
    )


class _Untouched(keras.StatelessScope):
    """Makes sure that a trace neither reads nor writes variables: it would keep today's value as a constant."""

    def get_current_value(self, variable: Any) -> Any:
        raise TypeError(f"the value of variable {variable.path!r} is needed while tracing.")

    def add_update(self, update: Any) -> Any:
        raise TypeError(f"variable {update[0].path!r} is assigned outside of any layer.")


class _CallRecorder:
    """Records what this thread calls from `__enter__` to `__exit__`."""

    def __init__(self) -> None:
        self._nodes: list[Any] = []
        self._given: dict[int, tuple[Any, Any]] = {}
        self._constants: dict[int, tuple[Any, Any]] = {}
        self._stack = contextlib.ExitStack()

    def calls(self) -> list[LayerCall]:
        """The calls, with constants where they were given symbols."""
        found = []
        for node in self._nodes:
            call = call_of(node)
            # Keras adds the mode and masks to the arguments that it records, which are for it to find at each run.
            args, kwargs = self._given.get(id(node), (call.args, call.kwargs))
            found.append(self._with_constants(call._replace(args=args, kwargs=kwargs)))
        return found

    def __enter__(self) -> _CallRecorder:
        with contextlib.ExitStack() as stack:
            stack.enter_context(recorded_nodes(self._nodes))
            stack.enter_context(self._symbolic_variables())
            stack.enter_context(self._symbolic_layers())
            stack.enter_context(_Untouched())
            # Constants are constants even where the trace is part of a compilation.
            stack.enter_context(jax.ensure_compile_time_eval())
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def _with_constants(self, call: LayerCall) -> LayerCall:
        def constant(leaf: Any) -> Any:
            return self._constants[id(leaf)][1] if id(leaf) in self._constants else leaf

        args, kwargs = keras.tree.map_structure(constant, (call.args, call.kwargs))
        return call._replace(args=args, kwargs=kwargs)

    def _symbolic_variables(self) -> contextlib.AbstractContextManager[None]:
        """Operations on variables are recorded."""
        return SYMBOLIC_TENSORS.using(lambda value: isinstance(value, keras.Variable) and _at_top())

    def _symbolic_layers(self) -> contextlib.AbstractContextManager[None]:
        """Calls of layers on constants are recorded."""

        def call(original: Callable[..., Any], layer: Any, *args: Any, **kwargs: Any) -> Any:
            if not _at_top():
                return original(layer, *args, **kwargs)
            if not any(map(is_symbolic, keras.tree.flatten((args, kwargs)))):
                args, kwargs = keras.tree.map_structure(self._symbol, (args, kwargs))
            outputs = original(layer, *args, **kwargs)
            self._given[id(self._nodes[-1])] = args, kwargs
            return outputs

        return LAYER_CALLS.using(call)

    def _symbol(self, value: Any) -> Any:
        if not (keras.ops.is_tensor(value) or isinstance(value, keras.Variable | np.ndarray)):
            return value
        symbol = keras.KerasTensor(value.shape, keras.backend.standardize_dtype(value.dtype))
        self._constants[id(symbol)] = symbol, value
        return symbol


def _at_top() -> bool:
    """Whether no layer is being called, so that what happens is done by the traced `call` itself."""
    return not keras_api.in_layer_call()
