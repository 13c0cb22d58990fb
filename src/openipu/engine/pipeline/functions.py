"""Stages that are plain functions: each gets what the one before returned, and the first an element of the data.

How a function's Keras variables get their values is up to the `Binding`: those of `pipelining_ops.pipeline` exist
before, those of an estimator are made anew in each call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

from openipu.engine import model as keras_model
from openipu.engine.execution import rows_of
from openipu.engine.place import Place
from openipu.engine.state import Step
from openipu.optimizers.plan import describe, map_gradients

import jax
import jax.numpy as jnp
import keras

from .arguments import Arguments
from .loop import StageLoop, Staging
from .packing import Spec
from .rules import one_dtype, recomputed
from .sharded import ShardedUpdate
from .spread import StageSpread
from .stages import After, Around, Arrays, StageFunction
from .store import Store, filled, make_store
from .update import make_update

Tree = Any
NewState = Callable[[], Arrays]


class Binding(Protocol):
    """The variables of functions, by number in a state's trainable and non-trainable part."""

    @property
    def weights(self) -> tuple[tuple[int, ...], ...]:
        """For each stage, the weights it uses."""

    @property
    def state(self) -> tuple[tuple[int, ...], ...]:
        """For each stage, the other variables it uses."""

    def bound(self, stage: int, weights: Arrays, state: Arrays) -> AbstractContextManager[NewState]:
        """While active, the variables of a stage have these values; gives a function that tells the new state."""


@dataclass(frozen=True, slots=True, eq=False)
class Functions:
    """What a user wrote."""

    stages: tuple[Callable[..., Any], ...]
    optimizer_function: Callable[..., Any] | None
    """In training, gives an `OptimizerFunctionOutput` from the last stage's outputs."""
    results: Callable[[list[Any], Any, Tree], Tree]
    """`results(outputs, loss, data)`: what leaves the last stage for each micro-batch."""
    element: Callable[[Tree], tuple[Sequence[Any], Tree]]
    """An element of the feed as the inputs of the whole run and the data."""
    metrics: Callable[[Arrays, Any, Tree], Arrays] = lambda metrics, *_: list(metrics)
    """`metrics(metrics, loss, data)`: the metrics after one more micro-batch, in training."""

    @property
    def last(self) -> int:
        """The number of the last stage."""
        return len(self.stages) - 1

    def call(self, stage: int, received: Any, element: Tree) -> list[Any]:
        """A stage's outputs as a list."""
        if stage:
            outputs = self.stages[stage](*received)
        else:
            inputs, data = self.element(element)
            named = data if isinstance(data, dict) else {}
            positional = () if named else data if isinstance(data, tuple | list) else (data,)
            outputs = self.stages[0](*inputs, *positional, **named)
        if outputs is None:
            return []
        return list(outputs) if isinstance(outputs, tuple | list) else [outputs]


@dataclass(frozen=True, slots=True, eq=False)
class _Stage:
    functions: Functions
    binding: Binding
    number: int
    optimizer: Any
    common: tuple[int, ...]
    structures: dict[int, Any] = field(repr=False)

    def run(self, weights: Arrays, boundary: Arrays, around: Around) -> tuple[Any, After]:
        """One micro-batch, see `StageFunction`."""
        functions = self.functions
        received = jax.tree.unflatten(self.structures[self.number], boundary) if self.number else ()
        with self.binding.bound(self.number, weights, around.state) as new_state:
            outputs = functions.call(self.number, received, around.batch)
            loss, metrics, data = None, around.metrics, functions.element(around.batch)[1]
            if self.number == functions.last and functions.optimizer_function is not None:
                loss = jnp.asarray(functions.optimizer_function(*outputs).loss)
                metrics = functions.metrics(metrics, loss, data)
            state = new_state()
        if self.number < functions.last:
            flat, self.structures[self.number + 1] = jax.tree.flatten(jax.tree.map(jnp.asarray, outputs))
            return flat, After(state, [], None)
        result = jax.tree.map(jnp.asarray, functions.results(outputs, loss, data))
        return self._scaled(loss, around.optimizer), After(state, metrics, result)

    def _scaled(self, loss: Any, optimizer: Arrays) -> Any:
        if loss is None:
            return None
        variables = self.optimizer.variables
        mapping = zip(variables, filled(variables, self.common, optimizer), strict=True)
        with keras.StatelessScope(state_mapping=list(mapping)):
            return jnp.reshape(self.optimizer.scale_loss(loss), ())


def mapped(optimizer: Any, common: Sequence[int], gradients: Arrays, weights: Arrays, known: Arrays) -> Arrays:
    """The gradients of one micro-batch as the wrappers around the optimizer map them; `known` is what is common."""
    return map_gradients(optimizer, gradients, weights, filled(optimizer.variables, common, known))


def stage_functions(
    functions: Functions, binding: Binding, optimizer: Any, common: Sequence[int], place: Place
) -> tuple[StageFunction, ...]:
    """The functions as stages that the executor runs. `optimizer` is None where nothing is trained."""
    structures: dict[int, Any] = {}
    found = []
    for number in range(len(functions.stages)):
        stage = _Stage(functions, binding, number, optimizer, tuple(common), structures)
        change = partial(mapped, optimizer, common) if optimizer is not None else None
        run = _on_replica(place, functions, stage.run)
        found.append(StageFunction(binding.weights[number], binding.state[number], run, change))
    return tuple(found)


def _on_replica(place: Place, functions: Functions, run: Callable[..., Any]) -> Callable[..., Any]:
    if place.replicas.count == 1:
        return run

    def on_one(weights: Arrays, boundary: Arrays, around: Around) -> Any:
        rows = rows_of(functions.element(around.batch)[1])
        with keras_model.one_of_several(place.replicas, place.batch_norm_group, lambda: rows, around.active):
            return run(weights, boundary, around)

    return on_one


def make_function_loop(
    name: str,
    step: Step,
    functions: Functions,
    binding: Binding,
    variables: tuple[Sequence[Any], Sequence[Any]],
    optimizer: Any,
    place: Place,
    asked: Arguments,
) -> tuple[StageLoop, StageSpread]:
    """The loop of functions as stages, and how their state lies on the devices of `place`; see `make_loop`."""

    def stages(common: Sequence[int]) -> tuple[StageFunction, ...]:
        return stage_functions(functions, binding, optimizer, common, place)

    return make_loop(name, step, stages, (binding.weights, binding.state), variables, optimizer, place, asked)


def make_loop(
    name: str,
    step: Step,
    make_stages: Callable[[Sequence[int]], tuple[StageFunction, ...]],
    used: tuple[Sequence[Sequence[int]], Sequence[Sequence[int]]],
    variables: tuple[Sequence[Any], Sequence[Any]],
    optimizer: Any,
    place: Place,
    asked: Arguments,
) -> tuple[StageLoop, StageSpread]:
    """The loop of stages, and how their state lies on the devices of `place`.

    `variables` are those that are trained and the others, with shapes and dtypes, `used` the numbers of those that each
    stage uses. `optimizer` is None where nothing is trained; `make_stages` is told which of its variables are common.
    """
    trained, others = variables
    weights = _store(trained, used[0], asked.devices, place.replicas.each)
    state = _store(others, used[1], asked.devices, place.replicas.each)
    update, accumulation = None, asked.accumulation
    if optimizer is not None:
        accumulation = one_dtype(accumulation.of_weights(trained))
        average = describe(optimizer).replica_reduction == "mean"
        kind = ShardedUpdate if asked.shard and place.replicas.count > 1 else None
        update = make_update(
            optimizer, trained, weights, average, place.replicas, keras_model.decays, keras_model.forget, kind
        )
    stages = make_stages(update.common if update is not None else ())
    spread = StageSpread(place.replicas, weights, state, update)
    count = accumulation.steps if update is not None else None
    staging = Staging(stages, asked.schedule, asked.devices, count, recomputed(asked.marks_count, place.recompute))
    return StageLoop(name, step, place, accumulation, spread, staging), spread


def _store(variables: Sequence[Any], used: Sequence[Sequence[int]], devices: Sequence[int], each: int) -> Store:
    """Each variable on the devices of the stages that use it; what no stage uses is on the first."""
    held: list[set[int]] = [set() for _ in range(each)]
    for numbers, device in zip(used, devices, strict=True):
        held[device].update(numbers)
    held[0].update(set(range(len(variables))).difference(*held))
    return make_store([Spec.of(v) for v in variables], [sorted(numbers) for numbers in held])
