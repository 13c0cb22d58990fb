"""Steps of Keras models in TensorFlow's style: `train_step(self, data)`, with a tape and with assignments.

Keras on JAX, and so `fit` of a strategy, calls `train_step(self, state, data)` and gets logs and a new state back. A
step of a script is translated into one of that kind when its class is made:

- variables have the values of the state while it runs, and what it assigns is the new state;
- `optimizer.apply_gradients` becomes `stateless_apply`, where `fit` reduces gradients over replicas, for all optimizers
  that are attributes of the model (second_optimizers.py);
- `compute_loss` and `compiled_loss` count for the metric "loss", as in Keras 2, unless the step updates it itself.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final

from openipu.engine.core.keras_steps import takes_data_alone
from openipu.engine.core.model_state import Carried, carried_by, values_of, variables_of
from openipu.engine.core.state import Mode, State, parts_of, state_of
from openipu.engine.keras_compat import api
from openipu.engine.keras_compat.patches import OWN_APPLY, OWN_APPLY_GRADIENTS
from openipu.engine.program.part import as_step
from openipu.engine.program.random_numbers import drawing_from
from openipu.engine.program.variable_scope import VariableScope
from openipu.engine.types import Array, Tree

import jax
import keras

from . import second_optimizers
from .control_flow import converted
from .replacements import Replacements
from .values import LIBRARIES

MODES: Final[tuple[Mode, ...]] = ("train", "test", "predict")

_local = threading.local()
_translated: weakref.WeakSet[Callable[..., Any]] = weakref.WeakSet()


def install(replacements: Replacements) -> None:
    """Give models what steps in TensorFlow's style use."""
    for mode in MODES:
        name = f"{mode}_step"
        owner = next(kind for kind in keras.Model.__mro__ if name in vars(kind))
        replacements.put(owner, name, _with_data_alone(mode, vars(owner)[name]))
    owner = next(kind for kind in keras.Model.__mro__ if "compute_loss" in vars(kind))
    replacements.put(owner, "compute_loss", _tracking(vars(owner)["compute_loss"]))
    owner, name = api.builder()
    replacements.put(owner, name, _without_call(vars(owner)[name]))
    replacements.put(keras.Model, "compiled_loss", _compiled_loss)
    replacements.put(keras.Model, "compiled_metrics", property(_compiled_metrics))
    replacements.put(keras.metrics.Mean, "update_state", _replacing(keras.metrics.Mean.update_state))
    base = next(kind for kind in keras.optimizers.Optimizer.__mro__ if "scale_loss" in vars(kind))
    for kind in (base, keras.optimizers.LossScaleOptimizer):
        replacements.put(kind, "scale_loss", _noticing(vars(kind)["scale_loss"]))


def translate(cls: type[keras.Model]) -> None:
    """Translate the steps of a class that take data alone."""
    for mode in MODES:
        found: Any = inspect.getattr_static(cls, f"{mode}_step")
        step = getattr(found, "python_function", found)  # of a `tf.function`
        if inspect.isfunction(step) and step not in _translated and takes_data_alone(inspect.unwrap(step)):
            setattr(cls, f"{mode}_step", _stateless(mode, step))


def _stateless(mode: Mode, step: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(step)
    def stateless(self: keras.Model, *args: Any) -> Any:
        if len(args) == 1:  # the step of a subclass calls this one
            return step(self, *args)
        values, data = args
        given, variables = state_of(mode, values), variables_of(self, mode)
        carried = carried_by(self) if mode == "train" else Carried()
        if len(given.optimizer) < len(variables.optimizer):  # Keras' own loop, which knows one optimizer
            variables = variables._replace(optimizer=variables.optimizer[: len(given.optimizer)])
            carried = Carried()
        parts = zip(variables, given, strict=True)
        known = {id(v): (v, value) for part, new in parts for v, value in zip(part, new, strict=True)}

        def run() -> Any:
            with _running_as(_LossCount(self)), drawing_from(carried.seeds):
                return converted(step)(self, data)

        optimizers = (self.optimizer, *carried.optimizers) if mode == "train" else ()
        with VariableScope(values=known.values()) as scope, contextlib.ExitStack() as updating:
            for optimizer in optimizers:
                updating.enter_context(_updates(self, optimizer))
            result = as_step(run)
        _check_assigned(self, mode, [v for key, v in scope.assigned.items() if key not in known])
        state = State(*([scope.state_mapping[id(v)] for v in part] for part in variables))
        return (result, state.non_trainable) if mode == "predict" else (_flat(result), parts_of(mode, state))

    _translated.add(stateless)
    vars(stateless)["prepare"] = second_optimizers.prepare  # called when the model is built
    return stateless


def _check_assigned(model: keras.Model, mode: Mode, lost: Sequence[keras.Variable]) -> None:
    if lost:
        raise ValueError(
            f"The `{mode}_step` of model {model.name!r} assigns variables that `fit` does not carry from step "
            f"to step: {', '.join(v.path for v in lost[:3])}. Make them, or the optimizer that they belong to, "
            "attributes of the model, make the model in the scope of a strategy, and train it with `fit`. Or write the "
            "step as a function for `strategy.run`."
        )


def _flat(logs: dict[str, Any]) -> dict[str, Any]:
    """Logs without the groups in which Keras 3 keeps the metrics of `compile`."""
    nested = [value if isinstance(value, dict) else {name: value} for name, value in logs.items()]
    return {name: value for group in nested for name, value in group.items()}


def _with_data_alone(mode: Mode, original: Callable[..., Any]) -> Callable[..., Any]:
    """Keras' own step, which a step in TensorFlow's style may call with the data."""

    @functools.wraps(original)
    def step(self: keras.Model, *args: Any) -> Any:
        if len(args) == 2:
            return original(self, *args)
        variables = variables_of(self, mode)
        if mode == "train":  # this step knows one optimizer
            variables = variables._replace(optimizer=list(self.optimizer.variables))
        with _running_as(None):
            result, new = original(self, parts_of(mode, values_of(variables)), *args)
        state = State([], new, [], []) if mode == "predict" else state_of(mode, new)
        for part, values in zip(variables, state, strict=True):
            _assign(part, values)
        return result

    return step


def _assign(variables: Iterable[keras.Variable], values: Iterable[Array]) -> None:
    for variable, value in zip(variables, values, strict=False):  # a mode does not change all parts
        if value is not variable.value:
            variable.assign(value)


def built_without_call(model: keras.Model) -> None:
    """A model that has steps but no `call`, such as a GAN, is built when its parts are."""
    owner = next(kind for kind in type(model).__mro__ if "call" in vars(kind)).__module__.partition(".")[0]
    parts = api.all_layers(model, itself=False)
    if not model.built and owner in LIBRARIES and parts and all(part.built for part in parts):
        model.built = getattr(type(model), "train_step", None) in _translated


def _without_call(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def build(self: keras.Model, *args: Any, **kwargs: Any) -> None:
        built_without_call(self)
        original(self, *args, **kwargs)

    return build


# --- updates ---------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _updates(model: keras.Model, optimizer: keras.optimizers.Optimizer) -> Iterator[None]:
    """Until the block ends, updates of an optimizer of the model are made by `stateless_apply`."""

    def apply(
        original: Callable[..., Any],
        grads: Iterable[Array],
        trainable_variables: Iterable[keras.Variable] | None = None,
    ) -> None:
        running = _running()
        if running is None:  # `stateless_apply` itself
            original(grads, trainable_variables)
            return
        weights = api.optimized_variables(optimizer)
        given = weights if trainable_variables is None else list(trainable_variables)
        known = {id(v): g for v, g in zip(given, grads, strict=True)}
        others = [v.path for v in given if id(v) not in {id(w) for w in weights}]
        if others:
            raise ValueError(
                f"The `train_step` of model {model.name!r} updates {', '.join(others[:3])}, which the optimizer "
                f"{optimizer.name!r} was not built for. Make the layers that own these variables attributes of the "
                "model, and let each of its optimizers update the same variables in every step."
            )
        gradients = [known.get(id(v)) for v in weights]
        with _running_as(None):
            factor = 1.0 if id(optimizer) in running.scaled else optimizer.scale_loss(1.0)
            if not isinstance(factor, float) or factor != 1.0:  # by which the optimizer will divide
                gradients = [None if g is None else g * factor for g in gradients]
            values = [v.value for v in optimizer.variables], gradients, [v.value for v in weights]
            new, state = optimizer.stateless_apply(*values)
        _assign([*weights, *optimizer.variables], [*new, *state])

    def apply_gradients(original: Callable[..., Any], grads_and_vars: Iterable[Any], *args: Any, **kwargs: Any) -> Any:
        if _running() is None:
            return original(grads_and_vars, *args, **kwargs)
        pairs = list(grads_and_vars)
        apply(original, [g for g, _ in pairs], [v for _, v in pairs])
        return optimizer.iterations

    with OWN_APPLY.using(apply, on=optimizer), OWN_APPLY_GRADIENTS.using(apply_gradients, on=optimizer):
        yield


# --- losses and metrics ----------------------------------------------------------------------------------------------


class _LossCount:
    """The metric "loss" in one run of a step: the losses that it computes, unless it updates the metric itself."""

    def __init__(self, model: keras.Model) -> None:
        self.tracker = api.loss_tracker(model)
        self._before: list[Array] | None = None
        self.scaled: set[int] = set()
        """The optimizers, by identity, for which the step has scaled its loss."""

    def track(self, loss: Array, outputs: Tree) -> None:
        """Count a loss of the step."""
        if self.tracker is None:
            return
        tracker, self.tracker = self.tracker, None
        before = [v.value for v in tracker.variables]
        tracker.update_state(loss, sample_weight=jax.tree.leaves(outputs)[0].shape[0])
        self.tracker, self._before = tracker, self._before or before

    def forget(self) -> None:
        """The step counts its losses itself."""
        if self.tracker is not None and self._before is not None:
            _assign(self.tracker.variables, self._before)
        self.tracker = None


def _running() -> _LossCount | None:
    """The losses of the step that runs in this thread; None outside of steps, and where Keras does the work."""
    return getattr(_local, "running", None)


@contextlib.contextmanager
def _running_as(count: _LossCount | None) -> Iterator[None]:
    before, _local.running = _running(), count
    try:
        yield
    finally:
        _local.running = before


def _tracking(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def compute_loss(
        self: keras.Model, x: Tree = None, y: Tree = None, y_pred: Tree = None, *args: Any, **kwargs: Any
    ) -> Any:
        loss = original(self, x, y, y_pred, *args, **kwargs)
        if (running := _running()) is not None:
            running.track(loss, y_pred)
        return loss

    return compute_loss


def _replacing(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def update_state(self: keras.metrics.Mean, *args: Any, **kwargs: Any) -> Any:
        running = _running()
        if running is not None and running.tracker is self:
            running.forget()
        return original(self, *args, **kwargs)

    return update_state


def _noticing(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def scale_loss(self: keras.optimizers.Optimizer, loss: Array) -> Any:
        if (running := _running()) is not None:
            running.scaled.add(id(self))
        return original(self, loss)

    return scale_loss


def _compiled_loss(
    self: keras.Model, y: Tree, y_pred: Tree, sample_weight: Tree = None, regularization_losses: Sequence[Array] = ()
) -> Any:
    """The loss that was given to `compile`, plus these."""
    own = api.compiled_loss(self)
    if own is None:
        raise ValueError(f"Model {self.name!r} has no loss. Give one to `compile`.")
    total = own(y, y_pred, sample_weight)
    for extra in regularization_losses or ():
        total = total + extra
    if (running := _running()) is not None:
        running.track(total, y_pred)
    return total


class _NoMetrics:
    """The metrics of a model that was compiled without any."""

    metrics: tuple[keras.metrics.Metric, ...] = ()

    def update_state(self, y_true: Tree, y_pred: Tree, sample_weight: Tree = None) -> None:
        """Do nothing."""


def _compiled_metrics(self: keras.Model) -> Any:
    """The metrics that were given to `compile`, as one."""
    return api.compiled_metrics(self) or _NoMetrics()
