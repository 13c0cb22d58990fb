"""The stages of a Keras model as functions that the executor runs.

All stages but the last only run their part of the graph. The last one is Keras' own step (loss, metrics, loss scaling),
in which the model's outputs come from its part of the graph. Losses that layers add (regularizers, `add_loss`) travel
with the boundary as one number, so that the last stage's loss is the model's, and gradients find their way back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from openipu.engine import model as keras_model
from openipu.engine.execution import rows_of
from openipu.engine.place import Place
from openipu.engine.state import Mode, State
from openipu.optimizers.plan import map_gradients

import jax
import keras

from .split import Stage, run_stage
from .stages import After, Around, Arrays, StageFunction
from .store import filled


@dataclass(frozen=True, slots=True, eq=False)
class _KerasStage:
    """One stage in one mode."""

    model: Any
    mode: Mode
    stage: Stage
    weights: tuple[int, ...]
    state: tuple[int, ...]
    common: tuple[int, ...]
    """Numbers of the optimizer's variables that every stage has."""
    structures: dict[int, Any] = field(repr=False)
    """How the boundary into each stage is built up; known once the stage before has been traced."""

    def run(self, weights: Arrays, boundary: Arrays, around: Around) -> tuple[Any, After]:
        """One micro-batch, see `StageFunction`."""
        received = ((), None)
        if self.stage.index:
            received = jax.tree.unflatten(self.structures[self.stage.index], boundary)
        if self.stage.last:
            return self._last(weights, received, around)
        x, _, _ = keras.utils.unpack_x_y_sample_weight(around.batch)
        sent, extra, state = self._call(weights, around.state, received, x)
        flat, self.structures[self.stage.index + 1] = jax.tree.flatten((sent, extra))
        return flat, After(state, [], None)

    def _call(self, weights: Arrays, state: Arrays, received: Any, x: Any) -> tuple[Any, Any, Arrays]:
        """The stage's part of the graph: its outputs, the sum of added losses so far, and its new state."""
        pairs, extra = received
        trainable = [self.model.trainable_variables[n] for n in self.weights]
        others = [self.model.non_trainable_variables[n] for n in self.state]
        mapping = [*zip(trainable, weights, strict=True), *zip(others, state, strict=True)]
        training = self.mode == "train"
        with keras.StatelessScope(state_mapping=mapping, collect_losses=True) as scope:
            outputs = run_stage(self.stage, pairs, x, training)
            if self.mode != "predict":
                extra = _total([extra, *scope.losses, *_penalties(self.stage.variables)])
        return outputs, extra, [scope.get_current_value(v) for v in others]

    def _last(self, weights: Arrays, received: Any, around: Around) -> tuple[Any, After]:
        model = self.model
        whole = self._whole_state(weights, around)

        def call(trainable: Any, non_trainable: Any, x: Any, return_losses: bool = False, **_: Any) -> Any:
            own = [trainable[n] for n in self.weights], [non_trainable[n] for n in self.state]
            outputs, extra, state = self._call(*own, received, x)
            new = list(non_trainable)
            for number, value in zip(self.state, state, strict=True):
                new[number] = value
            if not return_losses:
                return outputs, new
            return outputs, new, [] if extra is None else [extra]

        with keras_model.called_by(model, call):
            if self.mode == "train":
                loss, (state, metrics, result) = keras_model.train_loss(model, whole, around.batch)
            else:
                micro = keras_model.test_micro if self.mode == "test" else keras_model.predict_micro
                new, _, result = micro(model, whole, around.batch)
                loss, state, metrics = None, new.non_trainable, new.metrics
        return loss, After([state[n] for n in self.state], list(metrics), result)

    def _whole_state(self, weights: Arrays, around: Around) -> State:
        """The state that Keras asks for, with zeros for what other stages have; nothing here reads those."""
        owners = keras_model.variables(self.model, self.mode)
        return State(
            filled(owners.trainable, self.weights, weights),
            filled(owners.non_trainable, self.state, around.state),
            filled(owners.optimizer, self.common, around.optimizer) if self.mode == "train" else [],
            around.metrics,
        )

    def mapped(self, gradients: Arrays, weights: Arrays, optimizer: Arrays) -> Arrays:
        """The gradients of one micro-batch as the wrappers around the optimizer map them."""
        state = filled(self.model.optimizer.variables, self.common, optimizer)
        return map_gradients(self.model.optimizer, gradients, weights, state)


def _total(losses: Sequence[Any]) -> Any:
    """The sum of those that are there, or None."""
    present = [keras.ops.sum(loss) for loss in losses if loss is not None]
    return sum(present[1:], present[0]).astype("float32") if present else None


def _penalties(variables: Sequence[Any]) -> list[Any]:
    """What the regularizers of a stage's own weights add to the loss."""
    return [v.regularizer(v) for v in variables if v.trainable and getattr(v, "regularizer", None) is not None]


def stage_functions(
    model: Any, mode: Mode, stages: Sequence[Stage], common: Sequence[int], place: Place
) -> tuple[StageFunction, ...]:
    """The stages of `model` for `mode`."""
    weights = {id(v): i for i, v in enumerate(model.trainable_variables)}
    others = {id(v): i for i, v in enumerate(model.non_trainable_variables)}
    structures: dict[int, Any] = {}
    functions = []
    for stage in stages:
        used = [*stage.variables, *stage.borrows]
        own = _KerasStage(
            model, mode, stage, _numbers(used, weights), _numbers(used, others), tuple(common), structures
        )
        run = own.run
        if place.replicas.count > 1:
            run = partial(_on_one_replica, place, own.run)
        functions.append(StageFunction(own.weights, own.state, run, own.mapped))
    return tuple(functions)


def _numbers(variables: Sequence[Any], known: dict[int, int]) -> tuple[int, ...]:
    return tuple(sorted({known[id(v)] for v in variables if id(v) in known}))


def _on_one_replica(place: Place, run: Any, weights: Arrays, boundary: Arrays, around: Around) -> Any:
    rows = rows_of(around.batch)
    with keras_model.one_of_several(place.replicas, place.batch_norm_group, lambda: rows, around.active):
        return run(weights, boundary, around)
