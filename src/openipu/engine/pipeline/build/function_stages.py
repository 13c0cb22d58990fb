"""Stages that are plain functions: the first takes an element of the data, each other what the one before returned.

A `Binding` gives the functions' Keras variables their values. With `pipelining_ops.pipeline` the variables exist
beforehand; in an estimator every call creates them again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

from openipu import _validate as validate
from openipu.engine.core.enqueued import ignored
from openipu.engine.core.gradient_dependence import refuse_without_gradient
from openipu.engine.core.state import Batch, State
from openipu.engine.devices.placement import Placement
from openipu.engine.loop.arrays import rows_of
from openipu.engine.pipeline.runtime.stage_function import Arrays, StageContext, StageFunction, StageResults
from openipu.engine.pipeline.runtime.variable_store import zero_filled
from openipu.engine.program.program_trace import stage_of_pipeline
from openipu.engine.types import Array, Tree

import jax
import jax.numpy as jnp
import keras

from .assemble import ModelInStages, StageVariables, gradient_map, on_replica
from .optimizer_output import OptimizerFunctionOutput

NewState = Callable[[], Arrays]
"""Returns the values of a stage's untrained variables after its function has run."""


class Binding(Protocol):
    """The variables of functions, numbered as in the trainable and the non-trainable part of a `State`."""

    @property
    def weights(self) -> tuple[tuple[int, ...], ...]:
        """For each stage, the weights it uses."""

    @property
    def state(self) -> tuple[tuple[int, ...], ...]:
        """For each stage, the other variables it uses."""

    def bound(self, stage: int, weights: Arrays, state: Arrays) -> AbstractContextManager[NewState]:
        """While active, the variables of a stage have these values. Yields a function that returns the new state."""


@dataclass(frozen=True, slots=True, eq=False)
class Functions:
    """The functions that make up a pipeline: the user's own, and how data goes in and results come out."""

    stages: tuple[Callable[..., Any], ...]
    optimizer_function: Callable[..., Any] | None
    """In training, takes the last stage's outputs and returns an `OptimizerFunctionOutput`."""
    results: Callable[[list[Any], Any, Tree], Tree]
    """`results(outputs, loss, data)` returns what leaves the last stage for each micro-batch."""
    element: Callable[[Tree], tuple[Sequence[Any], Tree]]
    """Splits an element of the feed into the inputs, which are the same for all micro-batches, and the data."""
    metrics: Callable[[Arrays, Any, Tree], Arrays] = lambda metrics, *_: list(metrics)
    """In training, `metrics(metrics, loss, data)` returns the metrics after one more micro-batch."""

    @property
    def last(self) -> int:
        """The number of the last stage."""
        return len(self.stages) - 1

    def call(self, stage: int, received: Sequence[Any], element: Tree) -> list[Any]:
        """A stage's outputs as a list. The first stage ignores `received`, the others ignore `element`."""
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

    def optimized(self, outputs: Sequence[Any]) -> OptimizerFunctionOutput:
        """What `optimizer_function` returns for the last stage's outputs."""
        assert self.optimizer_function is not None
        result = self.optimizer_function(*outputs)
        if not isinstance(result, OptimizerFunctionOutput):
            raise TypeError(
                f"`optimizer_function` returned {validate.a(result)}. Return `OptimizerFunctionOutput(optimizer, "
                "loss)`."
            )
        return result


@dataclass(frozen=True, slots=True, eq=False)
class _Stage:
    """One function as a stage."""

    functions: Functions
    binding: Binding
    number: int
    optimizer: keras.optimizers.Optimizer | None
    common: tuple[int, ...]
    """Numbers of the optimizer's variables that every stage has."""
    structures: dict[int, jax.tree_util.PyTreeDef] = field(repr=False)
    """The structure of the boundary into each stage, known once the stage before has been traced."""

    def run(self, weights: Arrays, boundary: Arrays, context: StageContext) -> tuple[Any, StageResults]:
        """Run one micro-batch as `StageFunction.run` does."""
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

    def _scaled(self, loss: Array | None, optimizer: Arrays) -> Array | None:
        """The loss as the optimizer scales it, without axes."""
        if loss is None:
            return None
        assert self.optimizer is not None
        variables = self.optimizer.variables
        mapping = zip(variables, zero_filled(variables, self.common, optimizer), strict=True)
        with keras.StatelessScope(state_mapping=list(mapping)):
            return jnp.reshape(self.optimizer.scale_loss(loss), ())


def gradient_check(functions: Functions, binding: Binding, names: Sequence[str]) -> Callable[[State, Batch], None]:
    """For `Outcome.check`: raises if the loss does not depend on all weights, which have these names."""

    def loss(weights: Arrays, state: State, batch: Batch) -> Array:
        outputs: list[Any] = []
        for stage in range(len(functions.stages)):
            own = [weights[n] for n in binding.weights[stage]]
            with ignored(), binding.bound(stage, own, [state.non_trainable[n] for n in binding.state[stage]]):
                outputs = functions.call(stage, outputs, batch)
                outputs = [functions.optimized(outputs).loss] if stage == functions.last else outputs
        return jnp.reshape(outputs[0], ())

    def check(state: State, batch: Batch) -> None:
        remedy = "Use them in a stage, leave them out of `variables`, or make them with `trainable=False`."
        refuse_without_gradient(lambda weights: loss(weights, state, batch), state.trainable, names, remedy)

    return check


def functions_in_stages(
    functions: Functions,
    binding: Binding,
    variables: tuple[Sequence[keras.Variable], Sequence[keras.Variable]],
    optimizer: keras.optimizers.Optimizer | None,
    place: Placement,
) -> ModelInStages:
    """Functions as a model in stages. `variables` has the variables to train, then all others."""

    def stages(common: Sequence[int]) -> tuple[StageFunction, ...]:
        structures: dict[int, jax.tree_util.PyTreeDef] = {}
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
