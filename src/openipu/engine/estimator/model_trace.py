"""model_fn -> `DiscoveredModel`: which variables it makes, and model_fn as a pure function of their values.

model_fn is called (traced) once to learn its variables and results, and once per shape of batch when a program is
compiled (with several replicas, once more for batches that only some of them have); never per step. Each call makes its
layers anew, and `WholePlan.run` gives their variables the values of the state by the order in which they are made, with
their names checked.
"""

from __future__ import annotations

import contextlib
import inspect
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from openipu.engine.core.state import State
from openipu.engine.devices.replicas import Replicas
from openipu.engine.keras_compat.patches import tracing
from openipu.engine.types import Tree

import jax
import jax.numpy as jnp
import numpy as np

from .specs import IPUEstimatorSpec, TrainOp, checked, train_op_of
from .variable_ledger import Ledger, Made, current_ledger

AnyModel = TypeVar("AnyModel", bound="DiscoveredModel")
Slot = tuple[str, int]
"""Part of the state and position in it."""

MODEL_FN_ARGUMENTS = ("features", "labels", "mode", "params", "config")


@dataclass(frozen=True, slots=True, eq=False)
class ModelFn:
    """A user's function, called with those of its arguments that it declares."""

    function: Callable[..., Any]
    mode: str
    params: dict[str, Any]
    config: Any

    def __call__(self, batch: tuple[Any, ...]) -> IPUEstimatorSpec:
        """Its spec for a batch of features, or of features and labels."""
        declared = arguments(self.function)
        features, labels = batch if len(batch) == 2 else (batch[0], None)
        if self.mode == "infer":
            labels = None
        if labels is not None and "labels" not in declared:
            raise ValueError(
                "input_fn gives labels, but model_fn has no argument `labels`. Add it, or give features only."
            )
        # The caller's dicts stay as they are, whatever model_fn does to its own.
        given = {"mode": self.mode, "params": dict(self.params), "config": self.config, "labels": labels}
        given = {name: value for name, value in given.items() if name in declared}
        return checked(self.function(jax.tree.map(lambda a: a, features), **given), self.mode)


def arguments(function: Callable[..., Any]) -> tuple[str, ...]:
    """The names of a function's arguments."""
    return tuple(inspect.signature(function).parameters)


class ModelFnTrace(Ledger):
    """One call of model_fn, and what it registered on the way."""

    def __init__(self, bind: Callable[[Made, int], Any], global_step: Any, training: bool) -> None:
        super().__init__(bind, self.minimize, training)
        self.global_step = global_step
        self.logs: list[tuple[Any, Tree]] = []
        self._changed: set[int] = set()

    def add_update(self, update: tuple[Any, Any]) -> None:
        """Keep a variable's new value, and that it has one."""
        super().add_update(update)
        self._changed.add(id(update[0]))

    def changed(self, variables: Iterable[Any]) -> bool:
        """Whether any of these variables was assigned to."""
        return any(id(variable) in self._changed for variable in variables)

    def minimize(
        self, optimizer: Any, loss: Any, global_step: Any = None, var_list: Iterable[Any] | None = None
    ) -> TrainOp:
        """What `optimizer.minimize(loss)` does inside model_fn: build the optimizer and note what to do."""
        if global_step is not None:
            raise ValueError(
                "`minimize` was given `global_step`, which the estimator counts by itself. Leave the argument out."
            )
        known = {id(m.variable) for m in self.made if m.kind == "weight"}
        variables = [m.variable for m in self.made if m.kind == "weight" and m.variable.trainable]
        if var_list is not None:
            variables = list(var_list)
        if not variables or not known.issuperset(map(id, variables)):
            raise ValueError(
                f"`minimize` has {len(variables)} variables to train, of {len(known)} that model_fn made before. Make "
                "the layers inside model_fn, and call them before `minimize`."
            )
        if not optimizer.built:
            optimizer.build(variables)
        return TrainOp(optimizer, loss, tuple(variables))


def current_trace(what: str) -> ModelFnTrace:
    """The call of model_fn that is going on, or an error about `what`."""
    trace = current_ledger()
    if not isinstance(trace, ModelFnTrace):
        raise RuntimeError(f"{what} belongs into a model_fn, but none is being called here.")
    return trace


def get_global_step() -> Any:
    """The number of steps (micro-batches of one replica) trained so far. For use inside model_fn."""
    return current_trace("`get_global_step`").global_step


@dataclass(frozen=True, slots=True, eq=False)
class DiscoveredModel:
    """What is known of a model_fn in one mode for one shape of batch: its variables and where their values live."""

    mode: str
    made: tuple[Made, ...]
    names: tuple[str, ...]
    """The paths of `made`; where one is used twice, a number is added."""
    slots: tuple[Slot | None, ...]
    """Where the value of each variable lives; None for those that begin anew in each step."""
    counters: int
    """How many of the first `non_trainable` values count steps: one for each part of the model that runs by itself."""
    spec: Any
    """With dead tensors: for its functions and hooks."""
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
        """Raise if variable `number` is another one than when model_fn was called before, or not there."""
        before = self.made[number] if number < len(self.made) else None
        if made is None or before is None or describe(before) != describe(made):
            raise _differs(f"variable {number}", describe(before), describe(made), "when it was called before")


@dataclass(frozen=True, slots=True, eq=False)
class WholeModel(DiscoveredModel):
    """The plan for a model_fn that computes everything itself, from a batch."""

    model_fn: ModelFn

    def run(self, state: State, batch: Tree, inside: Callable[[IPUEstimatorSpec, ModelFnTrace], Any]) -> Any:
        """Call model_fn with the values in `state`, then `inside` while its variables have them still."""

        def bind(made: Made, number: int) -> Any:
            self.check(made, number)
            slot = self.slots[number]
            return self.made[number].initial() if slot is None else getattr(state, slot[0])[slot[1]]

        with unseeded(), ModelFnTrace(bind, state.non_trainable[0], self.mode == "train") as trace:
            spec = called(self.model_fn, batch, trace)
            if len(trace.made) < len(self.made):
                self.check(None, len(trace.made))
            return inside(spec, trace)

    def after(self, trace: ModelFnTrace, part: str, state: State) -> list[Any]:
        """The values of a part of the state after model_fn."""
        values = list(getattr(state, part))
        for made, slot in zip(trace.made, self.slots, strict=True):
            if slot is not None and slot[0] == part:
                values[slot[1]] = trace.get_current_value(made.variable)
        return values


@contextlib.contextmanager
def unseeded(seed: int | None = None) -> Iterator[None]:
    """Making layers draws seeds, which nobody uses in a later call; with a `seed`, they depend on nothing else."""
    before = random.getstate()
    if seed is not None:
        random.seed(seed)
    try:
        yield
    finally:
        random.setstate(before)


def describe(made: Made | None) -> str:
    """A variable in words."""
    return "missing" if made is None else f"{made.path!r} {made.dtype}{list(made.shape)}"


def check_same_weights(mine: DiscoveredModel, other: DiscoveredModel) -> None:
    """An error that names the first weight in which model_fn differs between two modes."""
    pairs = [[m for m in plan.made if m.kind == "weight"] for plan in (mine, other)]
    for number in range(max(map(len, pairs))):
        a, b = (describe(made[number]) if number < len(made) else "missing" for made in pairs)
        if a != b:
            raise _differs(f"weight {number}", b, a, f"for {other.mode!r}", f"for {mine.mode!r}")


class OtherVariablesError(ValueError):
    """model_fn made other variables than before."""


def _differs(what: str, before: str, now: str, when: str, here: str = "now") -> OtherVariablesError:
    return OtherVariablesError(
        f"model_fn makes other variables each time: {what} was {before} {when} and is {now} {here}. Make the same "
        "layers in the same order in every mode, for features of the same shape."
    )


def discover(
    model_fn: ModelFn, batch: Tree, replicas: Replicas, seed: int | None, counters: int = 1
) -> tuple[WholeModel, Tree]:
    """Learn what model_fn makes for batches like this one; also gives the shapes of its results.

    With a `seed`, the initial values depend on nothing else.
    """

    def probe(batch: Tree) -> tuple[WholeModel, Tree]:
        with ModelFnTrace(zeros, jnp.int32(0), model_fn.mode == "train") as trace:
            spec = called(model_fn, batch, trace)
            op = train_op_of(spec) if model_fn.mode == "train" else None
            metrics = [v for metric in metrics_of(spec).values() for v in metric.variables]
            facts = learned(trace, model_fn.mode, spec, op, metrics if model_fn.mode == "eval" else (), counters)
            tensors = spec.eval_metrics[1] if spec.eval_metrics else spec.host_call[1] if spec.host_call else ()
            return WholeModel(**facts, model_fn=model_fn), ([t for _, t in trace.logs], tensors, spec.predictions)

    return probed(probe, batch, replicas, seed)


def probed(
    probe: Callable[[Tree], tuple[AnyModel, Tree]], batch: Tree, replicas: Replicas, seed: int | None
) -> tuple[AnyModel, Tree]:
    """The plan that `probe` gives for a traced batch, and the shapes of the tensors that it gives besides."""
    found: list[AnyModel] = []

    def shapes(batch: Tree) -> Tree:
        plan, tensors = probe(batch)
        found.append(plan)
        return tensors

    with tracing(), contextlib.nullcontext() if seed is None else unseeded(seed):
        tensors = jax.eval_shape(replicas.program(shapes, (None,), None), batch)
    for made in found[-1].made:
        if made.kind == "optimizer" and made.shape == ():
            made.variable.assign(made.initial())  # an optimizer is asked for its learning rate when a twin is made
    return found[-1], tensors


def zeros(made: Made, _: int) -> Any:
    """In place of a value that nobody needs."""
    return jnp.zeros(made.shape, made.dtype)


def learned(
    trace: ModelFnTrace, mode: str, spec: Any, op: TrainOp | None, metrics: Sequence[Any] = (), counters: int = 1
) -> dict[str, Any]:
    """The fields of the `DiscoveredModel` of a traced model_fn."""
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
    """The Keras metrics of an evaluation, by the name they are reported under."""
    pairs = ((name, m[0] if isinstance(m, tuple) else m) for name, m in (spec.eval_metric_ops or {}).items())
    return {name: metric for name, metric in pairs if hasattr(metric, "update_state")}


def called(model_fn: ModelFn, batch: Tree, trace: ModelFnTrace) -> IPUEstimatorSpec:
    """What model_fn gives for a batch, with all variables made: some metrics make theirs when they see the first one.

    Only an evaluation counts metrics.
    """
    spec = model_fn(batch)
    if model_fn.mode == "eval":
        _update_metrics(spec, trace)
    return spec


def _update_metrics(spec: IPUEstimatorSpec, trace: ModelFnTrace) -> None:
    """Show the batch to those metrics that are given with their arguments; the others have seen it in model_fn."""
    for name, entry in (spec.eval_metric_ops or {}).items():
        if isinstance(entry, tuple):
            entry[0].update_state(*entry[1:])
        elif hasattr(entry, "update_state") and not trace.changed(entry.variables):
            raise ValueError(
                f"model_fn did not update the metric {name!r}. Call its `update_state(y_true, y_pred)`, or give "
                "`(metric, y_true, y_pred)` in its place."
            )


def _is_in(variable: Any, variables: Iterable[Any]) -> bool:
    return any(variable is v for v in variables)


def _unique(paths: list[str]) -> tuple[str, ...]:
    seen: dict[str, int] = {}
    names = []
    for path in paths:
        seen[path] = seen.get(path, 0) + 1
        names.append(path if seen[path] == 1 else f"{path}#{seen[path]}")
    return tuple(names)


def initial_values(plan: DiscoveredModel, part: str) -> dict[str, np.ndarray]:
    """The values that the variables of a part begin with, by name."""
    return {name: np.asarray(made.initial()) for name, made in plan.in_part(part)}
