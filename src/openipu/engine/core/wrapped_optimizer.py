"""A Keras optimizer around a Keras optimizer.

The inner optimizer owns all state and makes all updates. A wrapper only declares what happens to gradients before
that. Under a strategy, the engine reads these declarations (optimizer_chain.py), does the work inside its program, and
calls the optimizer through `optimizer_chain.update`. Everywhere else (plain Keras, a user's own `train_step`), a
wrapper does its work itself, in `prepare`. `by_engine` tells the two apart.

A subclass with an `apply` or `apply_gradients` of its own decides what an update is. `stateless_apply`, which is what
Keras' and the engine's programs call, then calls that method and collects what it assigns.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterable, Iterator, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self

from openipu import _validate as validate
from openipu.engine.keras_compat.api import optimized_variables
from openipu.engine.keras_compat.patches import OPTIMIZER_APPLY
from openipu.engine.types import Array

import keras

from .accumulation import Accumulation

_prepared: contextvars.ContextVar[bool] = contextvars.ContextVar("gradients_are_prepared", default=False)


@contextlib.contextmanager
def by_engine() -> Iterator[None]:
    """Until the block ends, gradients that reach optimizers are already mapped, accumulated and reduced."""
    token = _prepared.set(True)
    try:
        yield
    finally:
        _prepared.reset(token)


def is_by_engine() -> bool:
    """Whether gradients that reach optimizers are already prepared. See `by_engine`."""
    return _prepared.get()


def chain(optimizer: keras.optimizers.Optimizer | None) -> Iterator[keras.optimizers.Optimizer]:
    """The optimizer, the optimizer inside it, and so on, including Keras' own `LossScaleOptimizer`."""
    while optimizer is not None:
        yield optimizer
        optimizer = vars(optimizer).get("inner_optimizer")


def loss_scale(optimizer: keras.optimizers.Optimizer, values: Sequence[Array] | None = None) -> Any:
    """The factor by which `optimizer` scales losses and so gradients, given the values of its variables."""
    if values is None:
        return optimizer.scale_loss(1.0)
    with keras.StatelessScope(state_mapping=list(zip(optimizer.variables, values, strict=True))):
        return optimizer.scale_loss(1.0)


def applies_itself(optimizer: keras.optimizers.Optimizer) -> bool:
    """Whether a user's class, and not Keras or `IpuOptimizer`, says how an optimizer applies gradients."""
    return any(_overrides(optimizer, name) for name in ("apply", "apply_gradients", "stateless_apply"))


def _overrides(optimizer: keras.optimizers.Optimizer, name: str) -> bool:
    owner = next(cls for cls in type(optimizer).__mro__ if name in vars(cls))
    return owner is not IpuOptimizer and not owner.__module__.startswith("keras.")


def stateless_own(
    optimizer: keras.optimizers.Optimizer,
    weights: Sequence[keras.Variable],
    optimizer_variables: Sequence[Array],
    grads: list[Array],
    trainable_variables: Sequence[Array],
) -> tuple[list[Array], list[Array]]:
    """`stateless_apply` of a built optimizer for `weights`, by means of its class' own `apply` or `apply_gradients`."""
    state = list(optimizer.variables)
    given = [*zip(weights, trainable_variables, strict=True), *zip(state, optimizer_variables, strict=True)]
    with keras.StatelessScope(state_mapping=given) as scope:
        if _overrides(optimizer, "apply_gradients"):
            optimizer.apply_gradients(list(zip(grads, weights, strict=True)))
        else:
            optimizer.apply(grads, weights)
    lost = len(scope.state_mapping.keys() - {id(v) for v, _ in given})
    if lost:
        raise ValueError(
            f"{optimizer.name!r} assigns {validate.counted(lost, 'variable')} beyond trainable weights and its own, so "
            "the new values would be lost. Make variables of the optimizer in its `build`, with "
            "`self.add_variable(...)`."
        )
    new = [scope.get_current_value(v) for v, _ in given]
    return new[: len(weights)], new[len(weights) :]


def apply_scaled(
    optimizer: keras.optimizers.LossScaleOptimizer, gradients: Sequence[Array], weights: Sequence[keras.Variable]
) -> None:
    """Apply gradients of a scaled loss.

    Keras' own `apply` assigns variables inside the branches of a conditional, where JAX loses the new values.
    """
    values = [v.value for v in optimizer.variables], list(gradients), [v.value for v in weights]
    new, state = optimizer.stateless_apply(*values)
    for variable, value in (*zip(weights, new, strict=True), *zip(optimizer.variables, state, strict=True)):
        variable.assign(value)


@dataclass(frozen=True, slots=True)
class Declared:
    """What the wrappers around an optimizer ask of the engine; None or False where they ask nothing."""

    accumulation: Accumulation | None = None
    """How many micro-batches make an update, and how they are reduced."""
    replica_reduction: Literal["sum", "mean"] = "sum"
    shard_state: bool = False
    """Whether each replica keeps only its share of the optimizer's state."""
    offload: bool | None = None
    """Whether the optimizer's state lives on the host between updates."""

    def __or__(self, inner: Declared) -> Declared:
        """What a wrapper and the wrapper inside it ask for together."""
        return Declared(
            self.accumulation or inner.accumulation,
            "mean" if "mean" in (self.replica_reduction, inner.replica_reduction) else "sum",
            self.shard_state or inner.shard_state,
            inner.offload if self.offload is None else self.offload,
        )


def _forwarded(name: str) -> property:
    def get(self: IpuOptimizer) -> Any:
        return getattr(self.inner_optimizer, name)

    def set_(self: IpuOptimizer, value: object) -> None:
        # Keras' constructor assigns these settings before there is an inner optimizer.
        if "inner_optimizer" in vars(self):
            setattr(self.inner_optimizer, name, value)

    return property(get, set_, doc=f"`{name}` of the inner optimizer.")


class IpuOptimizer(keras.optimizers.Optimizer):
    """Updates weights exactly as `opt` does. The base of the optimizers in `openipu.optimizers`.

    A wrapper that asks something of the engine overrides `declared`. One that maps gradients overrides `mapped`. One
    that changes what an update is overrides `apply` (or `apply_gradients`) and calls `super().apply`, or assigns the
    weights itself. In `fit`, it gets the gradients of a whole update: accumulated, and reduced over replicas. Variables
    of its own are made in `build`, with `self.add_variable` or `self.add_variable_from_reference`.

    >>> class Halved(ipu.optimizers.IpuOptimizer):
    ...     def apply(self, grads, trainable_variables=None):
    ...         return super().apply([gradient / 2 for gradient in grads], trainable_variables)
    >>> model.compile(Halved("sgd"), "mse", steps_per_execution=2)

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

    def __init__(self, opt: keras.optimizers.Optimizer | str | dict[str, Any], name: str | None = None) -> None:
        inner = keras.optimizers.get(dict(opt) if isinstance(opt, dict) else opt)
        if inner is None:
            raise ValueError("`opt` is None. Give the Keras optimizer to wrap, its name or its config.")
        super().__init__(learning_rate=0.0, name=name)
        self.inner_optimizer = inner

    def __getattr__(self, name: str) -> Any:
        """Look up on the inner optimizer what the wrapper does not have."""
        inner = vars(self).get("inner_optimizer")
        if inner is None:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(inner, name)

    # --- gradients

    @property
    def declared(self) -> Declared:
        """What this wrapper asks of the engine. Wrappers around and inside it declare their own."""
        return Declared()

    maps_gradients = False
    """Whether `mapped` does anything."""

    def mapped(
        self,
        gradients: Sequence[Array],
        weights: Sequence[Array],
        scale: Array | float = 1.0,
        *,
        keep_overflow: bool = False,
    ) -> list[Array]:
        """The gradients of one micro-batch as this wrapper maps them, scaled by `scale` before and after.

        With `keep_overflow`, inf and nan stay.
        """
        del weights, scale, keep_overflow
        return list(gradients)

    def prepare(self, gradients: Sequence[Array], weights: Sequence[Array], scale: Array | float) -> list[Array]:
        """Gradients that the engine has not prepared, as this wrapper changes them.

        `weights` are values. `scale` is the factor by which a scaled loss has made the gradients too large.
        """
        del weights, scale
        return list(gradients)

    def apply(self, grads: Sequence[Array], trainable_variables: Iterable[keras.Variable] | None = None) -> None:
        """Update the variables."""
        OPTIMIZER_APPLY.chain(type(self)._apply)(self, grads, trainable_variables)

    def _apply(self, grads: Sequence[Array], trainable_variables: Iterable[keras.Variable] | None = None) -> None:
        if trainable_variables is not None:
            trainable_variables = list(trainable_variables)
            if not self.built:
                self.build(trainable_variables)
        if not _prepared.get() and self.built:
            known = self._known if trainable_variables is None else trainable_variables
            grads = self.prepare(grads, [v.value for v in known], loss_scale(self))
        inner = self.inner_optimizer
        if isinstance(inner, IpuOptimizer) and _overrides(inner, "apply_gradients"):
            inner.apply_gradients(list(zip(grads, trainable_variables or self._known, strict=True)))
        elif isinstance(inner, keras.optimizers.LossScaleOptimizer):
            apply_scaled(inner, grads, trainable_variables or optimized_variables(inner))
        else:
            inner.apply(grads, trainable_variables)

    def apply_gradients(
        self,
        grads_and_vars: Iterable[tuple[Array, keras.Variable]],
        global_step: None = None,
        name: str | None = None,  # noqa: ARG002 - operations have no names here
    ) -> keras.Variable:
        """Update the variables, and return the number of updates so far.

        Args:
            grads_and_vars: Pairs of a gradient and the variable that it belongs to.
            global_step: None: the optimizer itself counts updates, in `iterations`.
            name: A name for the operation, for scripts that give one.
        """
        if global_step is not None:
            raise ValueError("`global_step` is given, but optimizers count updates in `iterations`. Leave it out.")
        gradients, weights = zip(*grads_and_vars, strict=True)
        self.apply(gradients, weights)
        return self.iterations

    def stateless_apply(
        self, optimizer_variables: Sequence[Array], grads: Sequence[Array], trainable_variables: Sequence[Array]
    ) -> Any:
        """The values of the weights and of the optimizer's variables after an update."""
        if applies_itself(self):
            if not self.built:
                raise ValueError(f"{self.name!r} has no variables yet. Call `build(model.trainable_variables)` first.")
            return stateless_own(self, self._known, optimizer_variables, list(grads), trainable_variables)
        if not _prepared.get() and self.built:
            grads = self.prepare(grads, trainable_variables, loss_scale(self, optimizer_variables))
        return self.inner_optimizer.stateless_apply(optimizer_variables, grads, trainable_variables)

    # --- state: all of it belongs to the inner optimizer

    @property
    def _opt(self) -> keras.optimizers.Optimizer:
        """The inner optimizer, by the name that subclasses in older scripts use."""
        return self.inner_optimizer

    def build(self, variables: Iterable[keras.Variable]) -> None:
        """Create the inner optimizer's variables."""
        self.inner_optimizer.build(variables)
        super().build(variables)
        self._known = list(variables)

    def around(self, inner: keras.optimizers.Optimizer) -> Self:
        """The same wrapper around another optimizer that is not built yet."""
        new = object.__new__(type(self))
        # Keras keeps track of variables in `_tracker`, and settings are assigned to the inner optimizer.
        new.__dict__.update({k: v for k, v in vars(self).items() if k not in ("_tracker", "inner_optimizer")})
        IpuOptimizer.__init__(new, inner, self.name)
        return new

    def add_variable(self, *args: Any, **kwargs: Any) -> keras.Variable:
        """Add a variable to the state of the innermost optimizer, which owns all of it."""
        return list(chain(self))[-1].add_variable(*args, **kwargs)

    @property
    def variables(self) -> Any:
        """The inner optimizer's variables."""
        return self.inner_optimizer.variables

    @property
    def iterations(self) -> keras.Variable:
        """The number of updates so far."""
        return self.inner_optimizer.iterations

    @property
    def learning_rate(self) -> Any:
        """The inner optimizer's learning rate."""
        return self.inner_optimizer.learning_rate

    @learning_rate.setter
    def learning_rate(self, value: float | keras.optimizers.schedules.LearningRateSchedule) -> None:
        self.inner_optimizer.learning_rate = value

    def scale_loss(self, loss: Array | float) -> Any:
        """The loss that is differentiated, scaled as the inner optimizer wants it."""
        return self.inner_optimizer.scale_loss(loss)

    def finalize_variable_values(self, var_list: Iterable[keras.Variable]) -> None:
        """Let the inner optimizer change the weights when training ends."""
        self.inner_optimizer.finalize_variable_values(var_list)

    def exclude_from_weight_decay(
        self, var_list: Iterable[keras.Variable] | None = None, var_names: Iterable[str] | None = None
    ) -> None:
        """Name weights that do not decay."""
        self.inner_optimizer.exclude_from_weight_decay(var_list, var_names)

    def set_weights(self, weights: Sequence[Array]) -> None:
        """Set the inner optimizer's variables."""
        self.inner_optimizer.set_weights(weights)

    # --- saving

    def save_own_variables(self, store: MutableMapping[str, Any]) -> None:
        """Save nothing: Keras saves the inner optimizer as a part of this one."""

    def load_own_variables(self, store: MutableMapping[str, Any]) -> None:
        """Load nothing, as `save_own_variables` saves nothing."""

    def get_config(self) -> dict[str, Any]:
        """Everything needed to make an equal optimizer."""
        return {"opt": keras.optimizers.serialize(self.inner_optimizer), "name": self.name}
