"""What Keras 2 understood and Keras 3 does not, with the meaning that it had.

- `SGD(lr=0.1, decay=1e-4)`: the learning rate, and its decay with the number of updates.
- `optimizer.lr`: the learning rate, to read and to set.
- `Input(shape=(80))`: a number in place of a tuple.
- `layer.add_weight("kernel", shape=...)`: the name as the first argument.
- `variable.name` in a script's own code: "dense/kernel:0".
- `Embedding(input_length=80)`: the shape of the input, if it is the first layer.
- `model.compile(experimental_steps_per_execution=8)`.
- `model.fit_generator` and its relatives.
- an optimizer whose class has an `apply_gradients` of its own, which `fit` calls, and the name of such an operation.
"""

from __future__ import annotations

import functools
import sys
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from openipu.engine.core.wrapped_optimizer import stateless_own
from openipu.engine.keras_compat.api import optimized_variables
from openipu.engine.types import Array

import keras

from .replacements import Replacements
from .values import LIBRARIES


def install(replacements: Replacements) -> None:
    """Make Keras understand the idioms."""
    base = _owner(keras.optimizers.Optimizer, "apply_gradients")
    replacements.put(base, "__init__", _with_rates(base.__init__))
    replacements.put(base, "lr", property(_get_rate, _set_rate))
    replacements.put(keras.layers.InputLayer, "__init__", _with_any_shape(keras.layers.InputLayer.__init__))
    replacements.put(keras.layers.Layer, "add_weight", _with_name_first(keras.layers.Layer.add_weight))
    variable = _owner(keras.Variable, "name")
    replacements.put(variable, "name", _names_by_reader(vars(variable)["name"]))
    replacements.put(base, "apply_gradients", _with_name(base.apply_gradients))
    replacements.put(base, "stateless_apply", _with_own_updates(base.stateless_apply))
    owner = _owner(keras.Model, "compile")
    replacements.put(owner, "compile", _with_experimental_name(owner.compile))
    embedding = keras.layers.Embedding
    replacements.put(embedding, "__init__", _with_length(embedding.__init__))
    for kind in ("fit", "evaluate", "predict"):
        replacements.put(keras.Model, f"{kind}_generator", _of_generator(kind))


def _owner(cls: type, attribute: str) -> Any:
    """The class in which an attribute is defined."""
    return next(kind for kind in cls.__mro__ if attribute in vars(kind))


def _with_rates(original: Callable[..., None]) -> Callable[..., None]:
    def init(self: keras.optimizers.Optimizer, learning_rate: Any, *args: Any, **kwargs: Any) -> None:
        rate, decay = kwargs.pop("lr", learning_rate), kwargs.pop("decay", None)
        if isinstance(rate, int):
            rate = float(rate)
        if decay:
            if not isinstance(rate, float):
                raise ValueError(
                    f"{type(self).__name__} was given decay={decay} and a learning rate of type "
                    f"{type(rate).__name__}. Give one of them: a number that decays, or a schedule."
                )
            # Keras 2 divides by 1 + decay * (updates so far).
            rate = keras.optimizers.schedules.InverseTimeDecay(rate, decay_steps=1, decay_rate=float(decay))
        original(self, rate, *args, **kwargs)

    return init


def _get_rate(optimizer: keras.optimizers.Optimizer) -> Any:
    return optimizer.learning_rate


def _set_rate(optimizer: keras.optimizers.Optimizer, rate: Any) -> None:
    optimizer.learning_rate = rate


def _with_name(original: Callable[..., Any]) -> Callable[..., Any]:
    def apply_gradients(
        self: keras.optimizers.Optimizer,
        grads_and_vars: Iterable[tuple[Array, keras.Variable]],
        name: str | None = None,  # noqa: ARG001 - operations have no names here
    ) -> Any:
        return original(self, grads_and_vars)

    return apply_gradients


def _with_own_updates(original: Callable[..., Any]) -> Callable[..., Any]:
    """Keras 3 calls `apply`, whatever a class does in `apply_gradients`."""

    def stateless_apply(
        self: keras.optimizers.Optimizer,
        optimizer_variables: Sequence[Array],
        grads: Sequence[Array],
        trainable_variables: Sequence[Array],
    ) -> Any:
        owner = _owner(type(self), "apply_gradients").__module__.partition(".")[0]
        if owner in LIBRARIES or not self.built:
            return original(self, optimizer_variables, grads, trainable_variables)
        weights = optimized_variables(self)
        return stateless_own(self, weights, optimizer_variables, list(grads), trainable_variables)

    return stateless_apply


def _with_experimental_name(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def compile(self: keras.Model, *args: Any, **kwargs: Any) -> None:
        if "experimental_steps_per_execution" in kwargs:
            kwargs["steps_per_execution"] = kwargs.pop("experimental_steps_per_execution")
        original(self, *args, **kwargs)

    return compile


def _with_any_shape(original: Callable[..., None]) -> Callable[..., None]:
    # The arguments are spelled out as far as needed, because Keras inspects them.
    def init(self: keras.layers.InputLayer, shape: Any = None, *args: Any, **kwargs: Any) -> None:
        original(self, (shape,) if isinstance(shape, int) else shape, *args, **kwargs)

    return init


def _with_name_first(original: Callable[..., Any]) -> Callable[..., Any]:
    names = ("name", "shape", "dtype", "initializer", "regularizer", "trainable", "constraint")  # the order of Keras 2

    def add_weight(self: keras.layers.Layer, *args: Any, **kwargs: Any) -> Any:
        if args and isinstance(args[0], str):
            args, kwargs = (), dict(zip(names, args, strict=False)) | kwargs
        return original(self, *args, **kwargs)

    return add_weight


def _names_by_reader(original: property) -> property:
    def name(variable: keras.Variable) -> str:
        reader = sys._getframe(1).f_globals.get("__name__", "")
        if reader.partition(".")[0] in LIBRARIES:
            plain: str = original.__get__(variable)
            return plain
        return f"{variable.path}:0"

    return property(name)


def _with_length(original: Callable[..., None]) -> Callable[..., None]:
    def init(self: keras.layers.Embedding, *args: Any, input_length: int | None = None, **kwargs: Any) -> None:
        if input_length is None:
            original(self, *args, **kwargs)
            return
        with warnings.catch_warnings():  # Keras would rather have an `Input`
            warnings.filterwarnings("ignore", message="Do not pass an `input_shape`")
            original(self, *args, input_shape=(input_length,), **kwargs)

    return init


def _of_generator(kind: str) -> Callable[..., Any]:
    def method(self: keras.Model, generator: Any, *args: Any, **kwargs: Any) -> Any:
        if args:
            raise TypeError(f"`{kind}_generator` takes one positional argument here. Name the others: `epochs=...`.")
        return getattr(self, kind)(generator, **kwargs)

    method.__doc__ = f"The old name of `{kind}` for generators."
    return method
