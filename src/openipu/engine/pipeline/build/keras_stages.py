"""The stages of a Keras model as functions that the executor runs.

All stages but the last only run their part of the graph. The last stage is Keras' own step (loss, metrics, loss
scaling), except that the model's outputs come from the last part of the graph. Losses that layers add (regularizers,
`add_loss`) travel with the boundary, so the last stage computes the whole loss and gradients find their way back. They
travel as one number, unless the user's own `compute_loss` may look at each of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from openipu.engine.core.enqueued import ignored
from openipu.engine.core.keras_steps import called_by, predict_micro, test_micro, train_loss
from openipu.engine.core.model_state import variables_of
from openipu.engine.core.state import Mode, State
from openipu.engine.devices.placement import Placement
from openipu.engine.keras_compat.api import overrides
from openipu.engine.loop.arrays import rows_of
from openipu.engine.pipeline.partition.split import Boundary, Stage, run_stage
from openipu.engine.pipeline.runtime.stage_function import Arrays, StageContext, StageFunction, StageResults
from openipu.engine.pipeline.runtime.variable_store import zero_filled
from openipu.engine.types import Tree

import jax
import keras

from .assemble import ModelInStages, StageVariables, gradient_map, on_replica

Losses = tuple[Arrays, Arrays]
"""What layers have added to the loss so far: in their calls, and as penalties for their weights."""
Received = tuple[Boundary, Losses]
"""What a stage gets from the one before."""


@dataclass(frozen=True, slots=True, eq=False)
class _KerasStage:
    """One stage in one mode."""

    model: keras.Model
    mode: Mode
    stage: Stage
    weights: tuple[int, ...]
    state: tuple[int, ...]
    common: tuple[int, ...]
    """Numbers of the optimizer's variables that every stage has."""
    apart: tuple[keras.Variable, ...]
    """State of the stage that stages on other devices use, too."""
    structures: dict[int, jax.tree_util.PyTreeDef] = field(repr=False)
    """The structure of the boundary into each stage, known once the stage before has been traced."""
    checked: list[bool] = field(default_factory=list, repr=False)
    """Not empty once it is known that loss and metrics read no variables of other stages."""

    def run(self, weights: Arrays, boundary: Arrays, context: StageContext) -> tuple[Any, StageResults]:
        """Run one micro-batch as `StageFunction.run` does."""
        received: Received = ((), ([], []))
        if self.stage.index:
            received = jax.tree.unflatten(self.structures[self.stage.index], boundary)
        if self.stage.last:
            return self._last(weights, received, context)
        x, _, _ = keras.utils.unpack_x_y_sample_weight(context.batch)
        sent, losses, state = self._call(weights, context.state, received, x)
        flat, self.structures[self.stage.index + 1] = jax.tree.flatten((sent, losses))
        return flat, StageResults(state, [], None)

    def _call(self, weights: Arrays, state: Arrays, received: Received, x: Tree) -> tuple[Tree, Losses, Arrays]:
        """Run the stage's part of the graph: its outputs, the losses so far, and its new state."""
        pairs, losses = received
        trainable = [self.model.trainable_variables[n] for n in self.weights]
        others = [self.model.non_trainable_variables[n] for n in self.state]
        mapping = [*zip(trainable, weights, strict=True), *zip(others, state, strict=True)]
        training = self.mode == "train"
        with keras.StatelessScope(state_mapping=mapping, collect_losses=True) as scope:
            outputs = run_stage(self.stage, pairs, x, training, self.apart)
            if self.mode != "predict":
                losses = [*losses[0], *scope.losses], [*losses[1], *_penalties(self.stage.variables)]
                if not overrides(self.model, "compute_loss"):
                    losses = _total([*losses[0], *losses[1]]), []
        return outputs, losses, [scope.get_current_value(v) for v in others]

    def _last(self, weights: Arrays, received: Received, context: StageContext) -> tuple[Any, StageResults]:
        """Run Keras' own step. What other stages hold is zero here, after a check that nothing reads it."""
        owners = variables_of(self.model, self.mode)
        whole = self._whole_state(owners, weights, context)
        if self.mode != "predict" and not self.checked:
            self._check_reads(owners, whole, received, context)
            self.checked.append(True)
        return self._keras_step(whole, received, context)

    def _check_reads(self, owners: State, whole: State, received: Received, context: StageContext) -> None:
        """Reject a loss or metric that reads a variable of another stage, which is not on this device."""

        def step(trainable: Arrays, non_trainable: Arrays) -> Any:
            state = whole._replace(trainable=trainable, non_trainable=non_trainable)
            with ignored():
                return self._keras_step(state, received, context)

        jaxpr = jax.make_jaxpr(step)(whole.trainable, whole.non_trainable).jaxpr
        read = {id(v) for equation in jaxpr.eqns for v in equation.invars} | set(map(id, jaxpr.outvars))
        here = {id(owners.trainable[n]) for n in self.weights} | {id(owners.non_trainable[n]) for n in self.state}
        pairs = zip((*owners.trainable, *owners.non_trainable), jaxpr.invars, strict=True)
        names = [variable.path for variable, v in pairs if id(v) in read and id(variable) not in here]
        if names:
            raise ValueError(
                f"Loss or metrics of model {self.model.name!r} read {', '.join(names)}, which earlier stages hold. "
                "Both run in the last stage: put the layer there, or give the loss a layer of its own."
            )

    def _keras_step(self, whole: State, received: Received, context: StageContext) -> tuple[Any, StageResults]:
        """Keras' own step, in which this stage's part of the graph stands in for the whole model."""
        model = self.model

        def call(trainable: Arrays, non_trainable: Arrays, x: Tree, return_losses: bool = False, **_: Any) -> Any:
            own = [trainable[n] for n in self.weights], [non_trainable[n] for n in self.state]
            outputs, (added, penalties), state = self._call(*own, received, x)
            new = list(non_trainable)
            for number, value in zip(self.state, state, strict=True):
                new[number] = value
            if not return_losses:
                return outputs, new
            return outputs, new, [*added, *penalties]

        with called_by(model, call):
            if self.mode == "train":
                loss, (state, metrics, result) = train_loss(model, whole, context.batch)
            else:
                micro = test_micro if self.mode == "test" else predict_micro
                new, _, result = micro(model, whole, context.batch)
                loss, state, metrics = None, new.non_trainable, new.metrics
        return loss, StageResults([state[n] for n in self.state], list(metrics), result)

    def _whole_state(self, owners: State, weights: Arrays, context: StageContext) -> State:
        """The state that Keras asks for, with zeros for what other stages hold."""
        return State(
            zero_filled(owners.trainable, self.weights, weights),
            zero_filled(owners.non_trainable, self.state, context.state),
            zero_filled(owners.optimizer, self.common, context.optimizer) if self.mode == "train" else [],
            context.metrics,
        )


def _total(losses: Arrays) -> Arrays:
    """The sum of the losses, as a list of one; empty if there are none."""
    sums = [keras.ops.sum(loss) for loss in losses]
    return [sum(sums[1:], sums[0]).astype("float32")] if sums else []


def _penalties(variables: Sequence[keras.Variable]) -> Arrays:
    """What the regularizers of a stage's own weights add to the loss."""
    return [v.regularizer(v) for v in variables if v.trainable and getattr(v, "regularizer", None) is not None]


def stages_of_keras_model(
    model: keras.Model, mode: Mode, stages: Sequence[Stage], devices: Sequence[int], place: Placement
) -> ModelInStages:
    """A Keras model as the executor runs it in `mode`. `devices` has the device of each stage."""
    owners, optimizer = variables_of(model, mode), model.optimizer if mode == "train" else None
    weights = StageVariables(owners.trainable, _used(stages, owners.trainable))
    state = StageVariables(owners.non_trainable, _used(stages, owners.non_trainable))

    def functions(common: Sequence[int]) -> tuple[StageFunction, ...]:
        structures: dict[int, jax.tree_util.PyTreeDef] = {}
        change = gradient_map(optimizer, common)
        found = []
        for stage, here, trained, others in zip(stages, devices, weights.used, state.used, strict=True):
            elsewhere = {n for used, device in zip(state.used, devices, strict=True) for n in used if device != here}
            apart = tuple(owners.non_trainable[n] for n in others if n in elsewhere)
            own = _KerasStage(model, mode, stage, trained, others, tuple(common), apart, structures)
            run = on_replica(place, own.run, lambda context: rows_of(context.batch))
            layers = tuple(layer.name for layer in stage.layers)
            found.append(StageFunction(trained, others, run, change, layers))
        return tuple(found)

    return ModelInStages(weights, state, optimizer, functions)


def _used(stages: Sequence[Stage], variables: Sequence[keras.Variable]) -> tuple[tuple[int, ...], ...]:
    """For each stage, the numbers of the variables that it uses."""
    number = {id(v): i for i, v in enumerate(variables)}
    return tuple(
        tuple(sorted({number[id(v)] for v in (*stage.variables, *stage.borrows) if id(v) in number}))
        for stage in stages
    )
