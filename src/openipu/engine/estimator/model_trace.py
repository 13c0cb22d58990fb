"""model_fn -> `DiscoveredModel`: which variables it makes, and model_fn as a pure function of their values.

model_fn is called (traced) once to discover its variables and results, in training once to see that all of them have a
gradient, and once per shape of batch when a program is compiled (with several replicas, once more for batches that only
some of them get); never per step. Each call makes new layers. `WholeModel.run` gives their variables the values in the
state, matched by the order in which they are made, and checks their names.
"""

from __future__ import annotations

import contextlib
import inspect
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from openipu.engine.core.enqueued import ignored
from openipu.engine.core.state import State
from openipu.engine.devices.replicas import Replicas
from openipu.engine.keras_compat.initial_values import quick_initial_values
from openipu.engine.keras_compat.patches import tracing
from openipu.engine.types import Array, Tree

import jax
import jax.numpy as jnp
import keras
import numpy as np

from .run_settings import RunSettings
from .specs import IPUEstimatorSpec, TrainOp, checked, train_op_of
from .variable_ledger import Ledger, Made, current_ledger

AnyModel = TypeVar("AnyModel", bound="DiscoveredModel")
Slot = tuple[str, int]
"""A part of the state, and a position in it."""

MODEL_FN_ARGUMENTS = ("features", "labels", "mode", "params", "config")


@dataclass(frozen=True, slots=True, eq=False)
class ModelFn:
    """A user's model_fn. It is called with those of `MODEL_FN_ARGUMENTS` that it declares."""

    function: Callable[..., Any]
    mode: str
    params: dict[str, Any]
    config: RunSettings

    def __call__(self, batch: tuple[Tree, ...]) -> IPUEstimatorSpec:
        """The spec for a batch of features, or of features and labels."""
        declared = arguments(self.function)
        features, labels = batch if len(batch) == 2 else (batch[0], None)
        if self.mode == "infer":
            labels = None
        if labels is not None and "labels" not in declared:
            raise ValueError(
                "input_fn yields labels, but model_fn has no argument `labels`. Add it, or yield only features."
            )
        # model_fn gets copies, so that it cannot change the caller's dicts.
        given = {"mode": self.mode, "params": dict(self.params), "config": self.config, "labels": labels}
        given = {name: value for name, value in given.items() if name in declared}
        return checked(self.function(jax.tree.map(lambda a: a, features), **given), self.mode)


def arguments(function: Callable[..., Any]) -> tuple[str, ...]:
    """The names of a function's arguments."""
    return tuple(inspect.signature(function).parameters)


class ModelFnTrace(Ledger):
    """One call of model_fn, and what it registers while it runs."""

    def __init__(self, bind: Callable[[Made, int], Array], global_step: Array, training: bool) -> None:
        super().__init__(bind, self.minimize, training)
        self.global_step = global_step
        self.logs: list[tuple[Any, Tree]] = []
        self._changed: set[int] = set()

    def add_update(self, update: tuple[keras.Variable, Array]) -> None:
        """Keep a variable's new value, and remember that it changed."""
        super().add_update(update)
        self._changed.add(id(update[0]))

    def changed(self, variables: Iterable[keras.Variable]) -> bool:
        """Whether any of these variables was assigned to."""
        return any(id(variable) in self._changed for variable in variables)

    def minimize(
        self,
        optimizer: keras.optimizers.Optimizer,
        loss: Array,
        global_step: object = None,
        var_list: Iterable[keras.Variable] | None = None,
    ) -> TrainOp:
        """What `optimizer.minimize(loss)` does inside model_fn: build the optimizer and return a record."""
        if global_step is not None:
            raise ValueError(
                "`minimize` was given `global_step`, which the estimator counts itself. Leave this argument out."
            )
        known = {id(m.variable) for m in self.made if m.kind == "weight"}
        variables = [m.variable for m in self.made if m.kind == "weight" and m.variable.trainable]
        if var_list is not None:
            variables = list(var_list)
        if not variables or not known.issuperset(map(id, variables)):
            raise ValueError(
                f"`minimize` has {len(variables)} variables to train, and model_fn made {len(known)} before it. Make "
                "the layers inside model_fn, and call them before `minimize`."
            )
        if not optimizer.built:
            with self.building_optimizer():
                optimizer.build(variables)
        return TrainOp(optimizer, loss, tuple(variables))


def assigned_rates(trace: ModelFnTrace, optimizer: keras.optimizers.Optimizer) -> dict[int, Array | None]:
    """The values that model_fn has given to the learning rate, by its position among the optimizer's variables."""
    return {
        position: trace.get_current_value(variable)
        for position, variable in enumerate(optimizer.variables)
        if variable.name == "learning_rate" and trace.changed([variable])
    }


def rate_is_fixed(where: str) -> NotImplementedError:
    """An error for programs in which the learning rate cannot be computed in each step."""
    return NotImplementedError(
        f"model_fn computes the learning rate in each step, which is not possible {where}. Give the optimizer a "
        "number, or a schedule of `keras.optimizers.schedules`."
    )


def current_trace(what: str) -> ModelFnTrace:
    """The call of model_fn that is in progress; raises an error about `what` if there is none."""
    trace = current_ledger()
    if not isinstance(trace, ModelFnTrace):
        raise RuntimeError(f"{what} was called outside of a model_fn. Call it inside.")
    return trace


def get_global_step() -> Array:
    """The number of steps (micro-batches of one replica) trained so far. For use inside model_fn.

    >>> def model_fn(features, labels, mode):
    ...     rate = 0.1 / (1.0 + keras.ops.cast(ipu.estimator.get_global_step(), "float32"))
    ...     loss = keras.ops.mean((keras.layers.Dense(1)(features)[:, 0] - labels) ** 2) * rate
    ...     return ipu.estimator.EstimatorSpec(mode, loss=loss, train_op=keras.optimizers.SGD(1.0).minimize(loss))
    >>> _ = ipu.estimator.IPUEstimator(model_fn, "slower").train(input_fn, steps=2)
    """
    return current_trace("`get_global_step`").global_step


@dataclass(frozen=True, slots=True, eq=False)
class DiscoveredModel:
    """What a trace of model_fn found, in one mode and for one shape of batch: variables and where their values live."""

    mode: str
    made: tuple[Made, ...]
    names: tuple[str, ...]
    """The paths of `made`, with a number added to those that occur more than once."""
    slots: tuple[Slot | None, ...]
    """Where the value of each variable lives; None for those that start from their initial value in each step."""
    counters: int
    """How many values count steps, at the start of `non_trainable`: one per part of the model that runs separately."""
    spec: Any
    """For its functions and hooks only. Its tensors belong to a trace that is over."""
    optimizer: Any
    log_hooks: tuple[Any, ...]

    def in_part(self, part: str) -> list[tuple[str, Made]]:
        """The variables of a part of the state with their names, in its order."""
        found = [
            (slot[1], name, made)
            for slot, name, made in zip(self.slots, self.names, self.made, strict=True)
            if slot is not None and slot[0] == part
        ]
        return [(name, made) for _, name, made in sorted(found, key=lambda entry: entry[0])]

    def check(self, made: Made | None, number: int) -> None:
        """Raise if variable `number` is missing, or differs from the one in the previous call of model_fn."""
        before = self.made[number] if number < len(self.made) else None
        if made is None or before is None or describe(before) != describe(made):
            raise _differs(f"variable {number}", describe(before), describe(made), "when it was called before")


@dataclass(frozen=True, slots=True, eq=False)
class WholeModel(DiscoveredModel):
    """A model_fn that computes everything itself, from a batch."""

    model_fn: ModelFn

    def run(self, state: State, batch: Tree, inside: Callable[[IPUEstimatorSpec, ModelFnTrace], Any]) -> Any:
        """Call model_fn with the values in `state`; return what `inside` computes before they are released."""

        def bind(made: Made, number: int) -> Array:
            self.check(made, number)
            slot = self.slots[number]
            value: Array = self.made[number].initial() if slot is None else getattr(state, slot[0])[slot[1]]
            return value

        with keeping_random_state(), ModelFnTrace(bind, state.non_trainable[0], self.mode == "train") as trace:
            spec = call_model_fn(self.model_fn, batch, trace)
            if len(trace.made) < len(self.made):
                self.check(None, len(trace.made))
            return inside(spec, trace)

    def after(self, trace: ModelFnTrace, part: str, state: State) -> list[Any]:
        """A part of the state, as model_fn has left it."""
        values = list(getattr(state, part))
        for made, slot in zip(trace.made, self.slots, strict=True):
            if slot is not None and slot[0] == part:
                values[slot[1]] = trace.get_current_value(made.variable)
        return values


@contextlib.contextmanager
def keeping_random_state(seed: int | None = None) -> Iterator[None]:
    """Restore Python's random state afterwards, because making layers draws seeds. With a `seed`, start from that."""
    before = random.getstate()
    if seed is not None:
        random.seed(seed)
    try:
        yield
    finally:
        random.setstate(before)


def describe(made: Made | None) -> str:
    """A variable in words, for errors."""
    return "missing" if made is None else f"{made.path!r} {made.dtype}{list(made.shape)}"


def check_same_weights(mine: DiscoveredModel, other: DiscoveredModel) -> None:
    """Raise if model_fn makes different weights in two modes. The error names the first difference."""
    pairs = [[m for m in model.made if m.kind == "weight"] for model in (mine, other)]
    for number in range(max(map(len, pairs))):
        a, b = (describe(made[number]) if number < len(made) else "missing" for made in pairs)
        if a != b:
            raise _differs(f"weight {number}", b, a, f"for {other.mode!r}", f"for {mine.mode!r}")


class OtherVariablesError(ValueError):
    """model_fn did not make the same variables as before."""


def _differs(what: str, before: str, now: str, when: str, here: str = "now") -> OtherVariablesError:
    return OtherVariablesError(
        f"model_fn does not always make the same variables: {what} was {before} {when} and is {now} {here}. Make the "
        "same layers in the same order in every mode, for features of the same shape."
    )


def discover(
    model_fn: ModelFn, batch: Tree, replicas: Replicas, seed: int | None, counters: int = 1
) -> tuple[WholeModel, Tree]:
    """What model_fn makes for batches like this one, and the shapes of its results.

    With a `seed`, the initial values depend only on that.
    """

    def probe(batch: Tree) -> tuple[WholeModel, Tree]:
        with ModelFnTrace(zeros, jnp.int32(0), model_fn.mode == "train") as trace:
            spec = call_model_fn(model_fn, batch, trace)
            op = train_op_of(spec) if model_fn.mode == "train" else None
            metrics = [v for metric in metrics_of(spec).values() for v in metric.variables]
            facts = discovered_fields(
                trace, model_fn.mode, spec, op, metrics if model_fn.mode == "eval" else (), counters
            )
            tensors = spec.eval_metrics[1] if spec.eval_metrics else spec.host_call[1] if spec.host_call else ()
            return WholeModel(**facts, model_fn=model_fn), ([t for _, t in trace.logs], tensors, spec.predictions)

    return probed(probe, batch, replicas, seed)


def probed(
    probe: Callable[[Tree], tuple[AnyModel, Tree]], batch: Tree, replicas: Replicas, seed: int | None
) -> tuple[AnyModel, Tree]:
    """The model that `probe` returns for a traced batch, and the shapes of the tensors it returns with it."""
    found: list[AnyModel] = []

    def shapes(batch: Tree) -> Tree:
        model, tensors = probe(batch)
        found.append(model)
        return tensors

    with tracing(), ignored(), contextlib.nullcontext() if seed is None else keeping_random_state(seed):
        tensors = jax.eval_shape(replicas.program(shapes, (None,), None), batch)
    for made in found[-1].made:
        if made.kind == "optimizer" and made.shape == ():
            made.variable.assign(made.initial())  # making an optimizer's twin reads its learning rate
    return found[-1], tensors


def zeros(made: Made, _: int) -> Array:
    """A placeholder for a value that does not matter."""
    return jnp.zeros(made.shape, made.dtype)


def discovered_fields(
    trace: ModelFnTrace,
    mode: str,
    spec: object,
    op: TrainOp | None,
    metrics: Sequence[keras.Variable] = (),
    counters: int = 1,
) -> dict[str, Any]:
    """The fields of `DiscoveredModel`, from a trace of model_fn."""
    trained = op.variables if op else [m.variable for m in trace.made if m.kind == "weight" and m.variable.trainable]
    rest = [m.variable for m in trace.made if m.kind in ("weight", "seed") and not _is_in(m.variable, trained)]
    parts: dict[str, Sequence[Any]] = {
        "trainable": trained,
        "non_trainable": [*[None] * counters, *rest],
        "optimizer": op.optimizer.variables if op else (),
        "metrics": metrics,
    }
    where = {id(v): (part, i) for part, variables in parts.items() for i, v in enumerate(variables)}
    return {
        "mode": mode,
        "made": tuple(trace.made),
        "names": _unique([m.path for m in trace.made]),
        "slots": tuple(where.get(id(m.variable)) for m in trace.made),
        "counters": counters,
        "spec": spec,
        "optimizer": op.optimizer if op else None,
        "log_hooks": tuple(hook for hook, _ in trace.logs),
    }


def metrics_of(spec: IPUEstimatorSpec) -> dict[str, Any]:
    """The Keras metrics of an evaluation, by the names under which they are reported."""
    pairs = ((name, m[0] if isinstance(m, tuple) else m) for name, m in (spec.eval_metric_ops or {}).items())
    return {name: metric for name, metric in pairs if hasattr(metric, "update_state")}


def call_model_fn(model_fn: ModelFn, batch: Tree, trace: ModelFnTrace) -> IPUEstimatorSpec:
    """What model_fn returns for a batch. In an evaluation, its metrics are updated too.

    Afterwards all variables exist: some metrics make theirs in their first update.
    """
    spec = model_fn(batch)
    if model_fn.mode == "eval":
        _update_metrics(spec, trace)
    return spec


def _update_metrics(spec: IPUEstimatorSpec, trace: ModelFnTrace) -> None:
    """Update the metrics that come as tuples with their arguments. model_fn must have updated the others."""
    for name, entry in (spec.eval_metric_ops or {}).items():
        if isinstance(entry, tuple):
            entry[0].update_state(*entry[1:])
        elif hasattr(entry, "update_state") and not trace.changed(entry.variables):
            raise ValueError(
                f"model_fn did not update the metric {name!r}. Call its `update_state(y_true, y_pred)`, or give "
                "`(metric, y_true, y_pred)` instead."
            )


def _is_in(variable: keras.Variable, variables: Iterable[keras.Variable]) -> bool:
    return any(variable is v for v in variables)


def _unique(paths: list[str]) -> tuple[str, ...]:
    seen: dict[str, int] = {}
    names = []
    for path in paths:
        seen[path] = seen.get(path, 0) + 1
        names.append(path if seen[path] == 1 else f"{path}#{seen[path]}")
    return tuple(names)


def initial_values(model: DiscoveredModel, part: str) -> dict[str, np.ndarray]:
    """The initial values of the variables in a part of the state, by name."""
    with quick_initial_values():
        return {name: np.asarray(made.initial()) for name, made in model.in_part(part)}
