"""Stages that are plain functions: each gets what the one before returned, and the first an element of the data.

How a function's Keras variables get their values is up to the `Binding`: those of `pipelining_ops.pipeline` exist
beforehand, those of an estimator are created anew in each call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

from openipu.engine.devices.placement import Placement
from openipu.engine.loop.arrays import rows_of
from openipu.engine.pipeline.runtime.stage_function import Arrays, StageContext, StageFunction, StageResults
from openipu.engine.pipeline.runtime.variable_store import zero_filled
from openipu.engine.program.program_trace import stage_of_pipeline
from openipu.engine.types import Tree

import jax
import jax.numpy as jnp
import keras

from .assemble import ModelInStages, StageVariables, gradient_map, on_replica
from .optimizer_output import OptimizerFunctionOutput

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
        """While active, the variables of a stage have these values; gives a function that returns the new state."""


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
        with stage_of_pipeline():
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

    def optimized(self, outputs: Sequence[Any]) -> Any:
        """The `OptimizerFunctionOutput` of the last stage's outputs."""
        assert self.optimizer_function is not None
        result = self.optimizer_function(*outputs)
        if not isinstance(result, OptimizerFunctionOutput):
            raise TypeError(
                f"`optimizer_function` returned a {type(result).__name__}. Return `OptimizerFunctionOutput(optimizer, "
                "loss)`."
            )
        return result


@dataclass(frozen=True, slots=True, eq=False)
class _Stage:
    """One function as a stage."""

    functions: Functions
    binding: Binding
    number: int
    optimizer: Any
    common: tuple[int, ...]
    structures: dict[int, Any] = field(repr=False)
    """How the boundary into each stage is built up; known once the stage before has been traced."""

    def run(self, weights: Arrays, boundary: Arrays, context: StageContext) -> tuple[Any, StageResults]:
        """One micro-batch, see `StageFunction`."""
        functions = self.functions
        received = jax.tree.unflatten(self.structures[self.number], boundary) if self.number else ()
        with self.binding.bound(self.number, weights, context.state) as new_state:
            outputs = functions.call(self.number, received, context.batch)
            loss, metrics, data = None, context.metrics, functions.element(context.batch)[1]
            if self.number == functions.last and functions.optimizer_function is not None:
                loss = jnp.asarray(functions.optimized(outputs).loss)
                metrics = functions.metrics(metrics, loss, data)
            state = new_state()
        if self.number < functions.last:
            flat, self.structures[self.number + 1] = jax.tree.flatten(jax.tree.map(jnp.asarray, outputs))
            return flat, StageResults(state, [], None)
        result = jax.tree.map(jnp.asarray, functions.results(outputs, loss, data))
        return self._scaled(loss, context.optimizer), StageResults(state, metrics, result)

    def _scaled(self, loss: Any, optimizer: Arrays) -> Any:
        if loss is None:
            return None
        variables = self.optimizer.variables
        mapping = zip(variables, zero_filled(variables, self.common, optimizer), strict=True)
        with keras.StatelessScope(state_mapping=list(mapping)):
            return jnp.reshape(self.optimizer.scale_loss(loss), ())


def functions_in_stages(
    functions: Functions,
    binding: Binding,
    variables: tuple[Sequence[Any], Sequence[Any]],
    optimizer: Any,
    place: Placement,
) -> ModelInStages:
    """Functions as a model in stages. `variables` are those that are trained and the others."""

    def stages(common: Sequence[int]) -> tuple[StageFunction, ...]:
        structures: dict[int, Any] = {}
        change = gradient_map(optimizer, common)
        found = []
        for number in range(len(functions.stages)):
            stage = _Stage(functions, binding, number, optimizer, tuple(common), structures)
            run = on_replica(place, stage.run, lambda context: rows_of(functions.element(context.batch)[1]))
            found.append(StageFunction(binding.weights[number], binding.state[number], run, change))
        return tuple(found)

    weights, state = variables
    return ModelInStages(
        StageVariables(weights, binding.weights), StageVariables(state, binding.state), optimizer, stages
    )
