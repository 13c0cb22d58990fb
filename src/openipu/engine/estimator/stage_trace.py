"""A model_fn in stages -> `StagedModel`: which variables each stage makes and uses, and each stage as a pure function.

All stages are traced once, in order, to discover their variables. Later the executor traces each stage separately. For
that, model_fn is called again, followed by this stage only. The variables that it makes are numbered and named as if
the earlier stages had run.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from openipu.engine.devices.replicas import Replicas
from openipu.engine.pipeline.build.function_stages import Functions, NewState
from openipu.engine.pipeline.runtime.stage_function import Arrays
from openipu.engine.types import Array, Tree

import jax
import jax.numpy as jnp
import keras
import numpy as np
from jax.typing import ArrayLike

from .model_trace import (
    DiscoveredModel,
    ModelFnTrace,
    assigned_rates,
    current_trace,
    discovered_fields,
    keeping_random_state,
    probed,
    rate_is_fixed,
    zeros,
)
from .run_settings import RunSettings
from .specs import TrainOp
from .stage_specs import IPUPipelineEstimatorSpec
from .variable_ledger import Made

PIPELINE_FN_ARGUMENTS = ("mode", "params", "config")
BODY = -1
"""Stands for model_fn itself where a stage number is expected."""


@dataclass(frozen=True, slots=True, eq=False)
class PipelineFn:
    """A user's model_fn for a model in stages. It is called with those of `PIPELINE_FN_ARGUMENTS` that it declares."""

    function: Callable[..., Any]
    mode: str
    params: dict[str, Any]
    config: RunSettings

    def __call__(self) -> IPUPipelineEstimatorSpec:
        """The spec that model_fn returns."""
        declared = inspect.signature(self.function).parameters
        given = {"mode": self.mode, "params": dict(self.params), "config": self.config}
        spec = self.function(**{name: value for name, value in given.items() if name in declared})
        if not isinstance(spec, IPUPipelineEstimatorSpec):
            raise TypeError(f"model_fn returned a {type(spec).__name__}. Return an `IPUPipelineEstimatorSpec`.")
        if spec.mode != self.mode:
            raise ValueError(
                f"model_fn was called for {self.mode!r} but returned a spec for {spec.mode!r}. Pass on `mode`."
            )
        return spec


@dataclass(slots=True)
class _Part:
    """What model_fn itself, or one of its stages, did while it was traced."""

    made: range = field(default_factory=lambda: range(0))
    """The numbers of the variables that were made."""
    names: dict[str, int] = field(default_factory=dict)
    """How often each automatic name had been used before."""
    used: set[int] = field(default_factory=set)
    changed: set[int] = field(default_factory=set)


class StageTrace(ModelFnTrace):
    """One call of model_fn and of some of its stages. Records who makes, uses and changes which variable."""

    def __init__(self, bind: Callable[[Made, int], Array], global_step: Array, training: bool) -> None:
        super().__init__(bind, global_step, training)
        self.spec: Any = None
        self.parts: dict[int, _Part] = {}
        self._stage: int | None = None
        self._numbers: dict[int, int] = {}

    @contextlib.contextmanager
    def inside(self, stage: int, names: dict[str, int] | None = None) -> Iterator[None]:
        """While active, everything that happens is recorded for this stage."""
        if names is not None:
            self.go_on_naming(names)
        part = self.parts[stage] = _Part(names=self.names())
        self._stage, begin = stage, len(self.made)
        try:
            yield
        finally:
            part.made, self._stage = range(begin, len(self.made)), None

    def add(self, variable: keras.Variable, initial: Callable[[], Array]) -> None:
        """Register a variable that was just made."""
        self._numbers[id(variable)] = len(self.made)
        super().add(variable, initial)
        if self._stage != BODY:
            self._note(variable, "used")

    def get_current_value(self, variable: keras.Variable) -> Array | None:
        """The value of a variable in this call, as in `Ledger`."""
        self._note(variable, "used")
        return super().get_current_value(variable)

    def add_update(self, update: tuple[keras.Variable, Array]) -> None:
        """Keep a variable's new value."""
        self._note(update[0], "changed")
        super().add_update(update)

    def _note(self, variable: keras.Variable, what: str) -> None:
        """Record that the current stage has "used" or "changed" a variable."""
        number = self._numbers.get(id(variable))
        if number is None or self._stage is None:
            return
        getattr(self.parts[self._stage], what).add(number)
        maker = next((s for s, p in self.parts.items() if s not in (BODY, self._stage) and number in p.made), None)
        if maker is not None:
            raise ValueError(
                f"Stage {self._stage} uses {variable.path!r}, which stage {maker} makes, but stages can only share "
                "what model_fn makes before them. Call the layer's `build` in model_fn itself."
            )


def current_spec() -> IPUPipelineEstimatorSpec:
    """The spec that the current call of model_fn returned."""
    trace = current_trace("A stage")
    assert isinstance(trace, StageTrace)
    spec: IPUPipelineEstimatorSpec = trace.spec
    return spec


@dataclass(frozen=True, slots=True, eq=False)
class StagedModel(DiscoveredModel):
    """A model_fn in stages. It is also the executor's `Binding`."""

    model_fn: PipelineFn
    parts: tuple[_Part, ...]
    body: int
    """How many variables model_fn makes before its stages."""
    weights: tuple[tuple[int, ...], ...]
    """The numbers of the weights that each stage uses."""
    state: tuple[tuple[int, ...], ...]
    """The numbers of the other variables that each stage uses. The first is its counter of steps."""

    @contextlib.contextmanager
    def bound(self, stage: int, weights: Arrays, state: Arrays) -> Iterator[NewState]:
        """While active, a new call of model_fn is in progress, in which the variables of a stage have these values."""
        numbers = self._made("trainable", self.weights[stage]), self._made("non_trainable", self.state[stage][1:])
        values: dict[int, Array] = dict(zip((n for part in numbers for n in part), (*weights, *state[1:]), strict=True))
        part = self.parts[stage]

        def bind(made: Made, number: int) -> Array:
            number += 0 if number < self.body else part.made.start - self.body
            self.check(made if number < self.body or number in part.made else None, number)
            if number in values:
                return values[number]
            return zeros(made, number) if self.slots[number] is not None else self.made[number].initial()

        def new_state() -> Arrays:
            if len(trace.made) < self.body + len(part.made):
                self.check(None, len(trace.made) - self.body + part.made.start)
            count = state[0] + (self.mode == "train")
            return [count, *(trace.get_current_value(trace.made[local(n)].variable) for n in numbers[1])]

        def local(number: int) -> int:
            return number if number < self.body else number - part.made.start + self.body

        with keeping_random_state(), StageTrace(bind, state[0], self.mode == "train") as trace:
            trace.spec = self.model_fn()
            with trace.inside(stage, part.names):
                yield new_state
            self._check_used(trace, stage)

    def _made(self, part: str, numbers: Sequence[int]) -> list[int]:
        """The numbers of the variables at these positions of a part of the state."""
        where = {slot: number for number, slot in enumerate(self.slots) if slot is not None}
        return [where[part, number] for number in numbers]

    def _check_used(self, trace: StageTrace, stage: int) -> None:
        """Raise if a stage uses a variable that it did not use in the first trace."""
        for number in trace.parts[stage].used:
            shared = number < self.body and self.slots[number] is not None and self.made[number].kind != "optimizer"
            if shared and number not in self.parts[stage].used:
                raise ValueError(
                    f"Stage {stage} uses {self.made[number].path!r}, but did not in an earlier call. Let it do the "
                    "same in every call."
                )


def discover_stages(
    model_fn: PipelineFn, batch: Tree, replicas: Replicas, seed: int | None
) -> tuple[StagedModel, Tree]:
    """What model_fn and its stages make for batches like this one, and the shapes of logged tensors."""

    def probe(batch: Tree) -> tuple[StagedModel, Tree]:
        with StageTrace(zeros, jnp.int32(0), model_fn.mode == "train") as trace:
            with trace.inside(BODY):
                trace.spec = spec = model_fn()
            functions = functions_of(spec)
            outputs: Any = ()
            op = None
            for stage in range(len(spec.stages)):
                with trace.inside(stage):
                    outputs = jax.tree.map(jnp.asarray, functions.call(stage, outputs, batch))
                    if trace.logs and stage < functions.last:
                        raise ValueError(
                            f"Stage {stage} logs tensors, but only the last stage can. Pass them on and log them "
                            "there, or in `optimizer_function`."
                        )
                    if functions.optimizer_function is not None and stage == functions.last:
                        output = functions.optimized(outputs)
                        _check_loss(output.loss)
            if functions.optimizer_function is not None:
                op = trace.minimize(output.opt, output.loss, var_list=output.variables)
                if assigned_rates(trace, op.optimizer):
                    raise rate_is_fixed("in a pipeline")
            return _staged_model(model_fn, trace, spec, op), [tensors for _, tensors in trace.logs]

    return probed(probe, batch, replicas, seed)


def functions_of(spec: IPUPipelineEstimatorSpec, **results: Any) -> Functions:
    """The stages of the current call of model_fn, in the form that the executor uses."""

    def call(number: int, *received: Any, **named: Any) -> Any:
        return current_spec().stages[number](*received, **named)

    def optimizer_function(*outputs: Any) -> Any:
        function = current_spec().optimizer_function
        assert function is not None
        return function(*outputs)

    stages = tuple(partial(call, number) for number in range(len(spec.stages)))
    trained = optimizer_function if spec.mode == "train" else None
    return Functions(stages, trained, **{"results": lambda *_: (), "element": _element, **results})


def _element(batch: tuple[Tree, ...]) -> tuple[tuple[()], Tree]:
    """No inputs of the whole run, and a batch as the arguments of the first stage."""
    return (), batch[0] if len(batch) == 1 else batch


def _check_loss(loss: ArrayLike) -> None:
    if np.shape(loss) not in ((), (1,)):
        raise ValueError(
            f"`loss` has shape {np.shape(loss)} instead of one number per micro-batch. Take its `keras.ops.mean`."
        )


def _staged_model(
    model_fn: PipelineFn, trace: StageTrace, spec: IPUPipelineEstimatorSpec, op: TrainOp | None
) -> StagedModel:
    stages = len(spec.stages)
    facts = discovered_fields(trace, model_fn.mode, spec, op, counters=stages)
    body = trace.parts.pop(BODY)
    parts = tuple(trace.parts[stage] for stage in range(stages))
    for part in parts:
        # What model_fn computes from variables outside of its stages may be used in any of them.
        part.used |= body.used
    used: list[dict[str, list[int]]] = []
    for part in parts:
        slots = sorted({slot for n in part.used if (slot := facts["slots"][n]) is not None})
        used.append({name: [i for where, i in slots if where == name] for name in ("trainable", "non_trainable")})
    model = StagedModel(
        **facts,
        model_fn=model_fn,
        parts=parts,
        body=len(body.made),
        weights=tuple(tuple(part["trainable"]) for part in used),
        state=tuple((stage, *part["non_trainable"]) for stage, part in enumerate(used)),
    )
    _check_changes(model, body, spec.pipelining.devices)
    return model


def _check_changes(model: StagedModel, body: _Part, devices: Sequence[int]) -> None:
    """Raise if a change of a variable would be lost, or would differ between devices."""
    for number in body.changed:
        raise ValueError(
            f"model_fn changes {model.made[number].path!r} outside of its stages, but only they are part of the "
            "program. Change it in a stage."
        )
    for stage, part in enumerate(model.parts):
        for number in part.changed:
            slot, path = model.slots[number], model.made[number].path
            if slot is not None and slot[0] == "trainable":
                raise ValueError(
                    f"Stage {stage} assigns to {path!r}, which is trained, so only the optimizer may change it. Make "
                    "it with `trainable=False`."
                )
            others = [s for s, other in enumerate(model.parts) if number in other.used and devices[s] != devices[stage]]
            if slot is not None and others:
                raise ValueError(
                    f"{path!r} is state that stage {stage} changes and stage {others[0]} uses, on another device. Put "
                    "both on one device with `device_mapping`, or use a separate layer in each stage."
                )
