"""A Keras optimizer around a Keras optimizer.

Who does what: the inner optimizer owns all state and all updates. A wrapper only declares what happens to gradients
before. Under a strategy the engine reads these declarations (optimizer_chain.py), does the work inside its program,
and calls the optimizer through `optimizer_chain.update`. Everywhere else (plain Keras, a user's own `train_step`) a
wrapper does its work itself, in `prepare`. `by_engine` tells the two apart.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from openipu.engine.keras_compat.patches import OPTIMIZER_APPLY

import keras

from .accumulation import Accumulation

_done: contextvars.ContextVar[bool] = contextvars.ContextVar("gradients_are_prepared", default=False)


@contextlib.contextmanager
def by_engine() -> Iterator[None]:
    """Until the block ends, gradients reach optimizers mapped, accumulated and reduced."""
    token = _done.set(True)
    try:
        yield
    finally:
        _done.reset(token)


def is_by_engine() -> bool:
    """Whether gradients reach optimizers prepared, see `by_engine`."""
    return _done.get()


def chain(optimizer: Any) -> Iterator[Any]:
    """The optimizer, the one inside it, and so on, Keras' own `LossScaleOptimizer` included."""
    while optimizer is not None:
        yield optimizer
        optimizer = vars(optimizer).get("inner_optimizer")


def loss_scale(optimizer: Any, values: Sequence[Any] | None = None) -> Any:
    """What `optimizer` multiplies losses, and so gradients, by; its variables have the given values."""
    if values is None:
        return optimizer.scale_loss(1.0)
    with keras.StatelessScope(state_mapping=list(zip(optimizer.variables, values, strict=True))):
        return optimizer.scale_loss(1.0)


@dataclass(frozen=True, slots=True)
class Declared:
    """What the wrappers around an optimizer ask of the engine; None and False where they say nothing."""

    accumulation: Accumulation | None = None
    """Micro-batches per update."""
    replica_reduction: Literal["sum", "mean"] = "sum"
    shard_state: bool = False
    """Whether each replica keeps only its share of the optimizer's state."""
    offload: bool | None = None
    """Whether the optimizer's state lives on the host between updates."""

    def __or__(self, inner: Declared) -> Declared:
        """What a wrapper and the one inside it ask for together."""
        return Declared(
            self.accumulation or inner.accumulation,
            "mean" if "mean" in (self.replica_reduction, inner.replica_reduction) else "sum",
            self.shard_state or inner.shard_state,
            inner.offload if self.offload is None else self.offload,
        )


def _forwarded(name: str) -> Any:
    def get(self: Any) -> Any:
        return getattr(self.inner_optimizer, name)

    def set_(self: Any, value: Any) -> None:
        # Keras' constructor gives every optimizer these settings. It runs before there is an inner optimizer.
        if "inner_optimizer" in vars(self):
            setattr(self.inner_optimizer, name, value)

    return property(get, set_, doc=f"`{name}` of the inner optimizer.")


class IpuOptimizer(keras.optimizers.Optimizer):
    """Updates weights exactly as `opt` does. The base of the optimizers in `openipu.optimizers`.

    A wrapper that has something to ask of the engine overrides `declared`, or `mapped` where it maps gradients.

    Args:
        opt: Any Keras optimizer: an instance, a name, or a config.
        name: The name of this wrapper.
    """

    clipnorm = _forwarded("clipnorm")
    clipvalue = _forwarded("clipvalue")
    global_clipnorm = _forwarded("global_clipnorm")
    weight_decay = _forwarded("weight_decay")
    ema_momentum = _forwarded("ema_momentum")
    ema_overwrite_frequency = _forwarded("ema_overwrite_frequency")
    loss_scale_factor = _forwarded("loss_scale_factor")

    def __init__(self, opt: Any, name: str | None = None) -> None:
        inner = keras.optimizers.get(dict(opt) if isinstance(opt, dict) else opt)
        if inner is None:
            raise ValueError("`opt` is None. Give a Keras optimizer to wrap, its name or its config.")
        super().__init__(learning_rate=0.0, name=name)
        self.inner_optimizer = inner

    def __getattr__(self, name: str) -> Any:
        """Whatever a wrapper does not have, its inner optimizer may."""
        inner = vars(self).get("inner_optimizer")
        if inner is None:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(inner, name)

    # --- gradients

    @property
    def declared(self) -> Declared:
        """What this wrapper asks of the engine; those around and inside it speak for themselves."""
        return Declared()

    maps_gradients = False
    """Whether `mapped` does anything."""

    def mapped(
        self, gradients: Sequence[Any], weights: Sequence[Any], scale: Any = 1.0, *, keep_overflow: bool = False
    ) -> list[Any]:
        """The gradients of one micro-batch as this wrapper maps them, `scale` times too large before and after.

        With `keep_overflow`, inf and nan stay.
        """
        del weights, scale, keep_overflow
        return list(gradients)

    def prepare(self, gradients: Sequence[Any], weights: Sequence[Any], scale: Any) -> list[Any]:
        """What this wrapper does to gradients that the engine has not prepared.

        `weights` are values. `scale` is how many times too large the gradients are because of a scaled loss.
        """
        del weights, scale
        return list(gradients)

    def apply(self, grads: Any, trainable_variables: Any = None) -> None:
        """Update the variables."""
        OPTIMIZER_APPLY.chain(type(self)._apply)(self, grads, trainable_variables)

    def _apply(self, grads: Any, trainable_variables: Any = None) -> None:
        if trainable_variables is not None:
            trainable_variables = list(trainable_variables)
            if not self.built:
                self.build(trainable_variables)
        if not _done.get() and self.built:
            known = self._known if trainable_variables is None else trainable_variables
            grads = self.prepare(grads, [v.value for v in known], loss_scale(self))
        self.inner_optimizer.apply(grads, trainable_variables)

    def apply_gradients(self, grads_and_vars: Any) -> Any:
        """Update the variables; gives the number of updates so far."""
        gradients, weights = zip(*grads_and_vars, strict=True)
        self.apply(gradients, weights)
        return self.iterations

    def stateless_apply(self, optimizer_variables: Any, grads: Any, trainable_variables: Any) -> Any:
        """The values of the weights and of the optimizer's variables after an update."""
        if not _done.get() and self.built:
            grads = self.prepare(grads, trainable_variables, loss_scale(self, optimizer_variables))
        return self.inner_optimizer.stateless_apply(optimizer_variables, grads, trainable_variables)

    # --- state: all of it is the inner optimizer's

    def build(self, variables: Any) -> None:
        """Create the inner optimizer's variables."""
        self.inner_optimizer.build(variables)
        super().build(variables)
        self._known = list(variables)

    @property
    def variables(self) -> Any:
        """The inner optimizer's variables."""
        return self.inner_optimizer.variables

    @property
    def iterations(self) -> Any:
        """The number of updates so far."""
        return self.inner_optimizer.iterations

    @property
    def learning_rate(self) -> Any:
        """The inner optimizer's learning rate."""
        return self.inner_optimizer.learning_rate

    @learning_rate.setter
    def learning_rate(self, value: Any) -> None:
        self.inner_optimizer.learning_rate = value

    def scale_loss(self, loss: Any) -> Any:
        """The loss as the inner optimizer wants it to be differentiated."""
        return self.inner_optimizer.scale_loss(loss)

    def finalize_variable_values(self, var_list: Any) -> None:
        """What the inner optimizer does to the weights when training ends."""
        self.inner_optimizer.finalize_variable_values(var_list)

    def exclude_from_weight_decay(self, var_list: Any = None, var_names: Any = None) -> None:
        """Weights that do not decay."""
        self.inner_optimizer.exclude_from_weight_decay(var_list, var_names)

    def set_weights(self, weights: Any) -> None:
        """Set the inner optimizer's variables."""
        self.inner_optimizer.set_weights(weights)

    # --- saving

    def save_own_variables(self, store: Any) -> None:
        """Nothing: Keras saves the inner optimizer as a part of this one."""

    def load_own_variables(self, store: Any) -> None:
        """Nothing, as in `save_own_variables`."""

    def get_config(self) -> dict[str, Any]:
        """Everything that makes an equal optimizer."""
        return {"opt": keras.optimizers.serialize(self.inner_optimizer), "name": self.name}
