"""Functions of arrays that also take the symbolic tensors of Keras models."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any, Final, ParamSpec, TypeVar

from openipu.engine.types import Array, Tree

import jax
import keras
from jax.typing import ArrayLike

P = ParamSpec("P")
R = TypeVar("R")
_FOLDER: Final = "openipu.ops"


@keras.saving.register_keras_serializable("openipu")
class FunctionOperation(keras.Operation):
    """A function of `ipu.ops` as an operation of a Functional model, which is saved with it.

    Args:
        function: The module in `openipu.ops` and the name of the function: "nn_ops.gelu".
        **kwargs: Arguments of every Keras operation.
    """

    def __init__(self, function: str, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.function = function
        module, _, name = function.partition(".")
        found = importlib.import_module(f"{_FOLDER}.{module}")
        if name not in found.__all__:
            raise ValueError(f"{_FOLDER} has no function {function!r}.")
        self._call = getattr(found, name)

    def call(self, *args: Any, **kwargs: Any) -> Any:
        """Compute it."""
        return self._call(*args, **kwargs)

    def get_config(self) -> dict[str, Any]:
        """Everything needed to make an equal operation."""
        return {**super().get_config(), "function": self.function}


def operation(function: Callable[P, R]) -> Callable[P, R]:
    """Let a public function of this folder become an operation of the model if it gets symbolic tensors."""
    path = f"{function.__module__.removeprefix(f'{_FOLDER}.')}.{function.__name__}"

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if any(isinstance(leaf, keras.KerasTensor) for leaf in jax.tree.leaves((args, kwargs))):
            result: R = FunctionOperation(path)(*args, **kwargs)
            return result
        with jax.named_scope(str(kwargs.get("name") or function.__name__)):
            return function(*args, **kwargs)

    return call


def array(value: ArrayLike | keras.Variable, dtype: str | None = None) -> Array:
    """An array of anything that can become one: numbers, NumPy's arrays, variables, tensors of TensorFlow."""
    converted: Array = keras.ops.convert_to_tensor(value, dtype)
    return converted


def arrays(tree: Tree) -> Tree:
    """The tree with arrays as leaves."""
    return jax.tree.map(array, tree)
