"""A Keras model cut into stages -> what each stage takes. Stages are traced as for a run, but nothing is compiled."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from openipu.engine.core.keras_steps import train_loss
from openipu.engine.core.model_state import variables_of
from openipu.engine.core.operation_count import operations
from openipu.engine.core.optimizer_chain import update as apply_update
from openipu.engine.core.pipelining import Recompute
from openipu.engine.core.state import State
from openipu.engine.devices.placement import Placement
from openipu.engine.devices.replicas import Replicas
from openipu.engine.keras_compat.api import overrides
from openipu.engine.keras_compat.patches import tracing
from openipu.engine.loop.arrays import rows_of
from openipu.engine.pipeline.build.assemble import ModelInStages, StageVariables
from openipu.engine.pipeline.build.keras_stages import stages_of_keras_model
from openipu.engine.pipeline.partition.assignment import stages_of_model
from openipu.engine.pipeline.partition.automatic import balanced
from openipu.engine.pipeline.partition.costs import bytes_of
from openipu.engine.pipeline.runtime.packing import Spec
from openipu.engine.pipeline.runtime.stage_function import Arrays, StageContext, StageFunction, StageResults
from openipu.engine.pipeline.runtime.stage_layout import StageLayout
from openipu.engine.pipeline.runtime.traced_stages import TracedStage, trace_stages
from openipu.engine.pipeline.runtime.variable_store import make_store, zero_filled
from openipu.engine.shapes import has_gradient, specs_of
from openipu.engine.types import Tree

import jax
import keras

from .values import Cut, StageCounts


@dataclass(frozen=True, slots=True, eq=False)
class Counter:
    """Counts what the stages of a model take, for micro-batches of one shape."""

    model: keras.Model
    batch: Tree
    """The shapes of a micro-batch: inputs, labels and sample weights."""
    place: Placement
    """Where the model would run; only its first device is used."""
    recompute: Recompute

    def cut_into(self, stages: int) -> Cut:
        """The automatic cut into so many stages. Raises a `ValueError` if there is none."""
        if overrides(self.model, "train_step"):
            raise ValueError(
                f"Model {self.model.name!r} has a `train_step` of its own, so nothing is known about its forward and "
                "backward. A plan needs a model with the `train_step` of Keras."
            )
        with tracing():
            staged = self._in_one_piece() if stages == 1 else self._in_stages(stages)
            counts = self._count(staged)
        return Cut(counts, rows_of(self.batch), bytes_of(self.batch))

    def _in_stages(self, stages: int) -> ModelInStages:
        inputs, _, _ = keras.utils.unpack_x_y_sample_weight(self.batch)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # an uneven cut shows in its bubble
            found = balanced(self.model, stages, inputs)
        names = tuple((call.operation.name, stage) for call, stage in zip(found.calls, found.stages, strict=True))
        parts = stages_of_model(self.model, names, inputs, training=True, opening=found.opening)
        one = replace(self.place, replicas=Replicas(self.place.replicas.devices[:1]))
        return stages_of_keras_model(self.model, "train", parts, range(stages), one)

    def _in_one_piece(self) -> ModelInStages:
        """The model as one stage, whose step is Keras' own."""
        model, owners = self.model, variables_of(self.model, "train")
        weights, others = (tuple(range(len(part))) for part in (owners.trainable, owners.non_trainable))

        def run(values: Arrays, _boundary: Arrays, context: StageContext) -> tuple[Any, StageResults]:
            state = State(values, context.state, zero_filled(owners.optimizer, (), ()), context.metrics)
            loss, (rest, metrics, logs) = train_loss(model, state, context.batch)
            return loss, StageResults(rest, metrics, logs)

        return ModelInStages(
            StageVariables(owners.trainable, [weights]), StageVariables(owners.non_trainable, [others]),
            model.optimizer, lambda _common: (StageFunction(weights, others, run),),
        )  # fmt: skip

    def _count(self, staged: ModelInStages) -> tuple[StageCounts, ...]:
        stores = [
            make_store([Spec.of(v) for v in held.variables], held.used) for held in (staged.weights, staged.state)
        ]
        layout = StageLayout(self.place.replicas, stores[0], stores[1], None)
        metrics = specs_of([v.value for v in self.model.metrics_variables])
        context = StageContext(self.batch, [], jax.ShapeDtypeStruct((), bool), [], metrics)
        traced, _ = trace_stages(staged.functions(()), layout, context, self.recompute)
        values, state = layout.weights.specs(), layout.state.specs()
        # A variable that several stages use is on all of their devices.
        per_weight = self._of_optimizer(bytes_of(list(values.values())))
        found = []
        for number, stage in enumerate(traced):
            weights = [values[n] for n in stage.function.weights]
            last = number == len(traced) - 1
            own = context._replace(state=[state[n] for n in stage.function.state], metrics=metrics if last else [])
            forward, backward = _operations(stage, weights, own, None if last else traced[number + 1].receives)
            size = bytes_of(weights)
            found.append(StageCounts(
                forward, backward, per_weight[0] * size, size, round(per_weight[1] * size), _bytes(stage.kept),
                _bytes(stage.receives), _bytes([spec for spec in stage.receives if has_gradient(spec)]),
            ))  # fmt: skip
        return tuple(found)

    def _of_optimizer(self, size: int) -> tuple[float, float]:
        """Operations of an update, and bytes of the optimizer's state, for each byte of the weights."""
        owners = variables_of(self.model, "train")
        state, weights = (
            [jax.ShapeDtypeStruct(v.shape, v.dtype) for v in part] for part in (owners.optimizer, owners.trainable)
        )
        program = jax.make_jaxpr(lambda *args: apply_update(self.model.optimizer, *args))(state, weights, weights)
        return operations(program) / max(size, 1), bytes_of(state) / max(size, 1)


def _operations(
    stage: TracedStage, weights: Arrays, context: StageContext, sends: Sequence[Spec] | None
) -> tuple[float, float]:
    """The operations of a forward and of a backward. `sends` is None for the last stage, which has the loss."""
    derivative = stage.derivative
    assert derivative is not None
    boundary = _shapes(stage.receives)
    forward = jax.make_jaxpr(derivative.forward)(weights, boundary, context)
    gradients: Any = jax.ShapeDtypeStruct((), "float32")
    if sends is not None:
        gradients = _shapes([spec for spec in sends if has_gradient(spec)])
    read = StageContext(context.batch, context.optimizer, None, [], [])
    backward = jax.make_jaxpr(derivative.backward)(weights, boundary, read, _shapes(stage.kept), gradients)
    return operations(forward), operations(backward)


def _shapes(specs: Sequence[Spec]) -> Arrays:
    return [jax.ShapeDtypeStruct(spec.shape, spec.dtype) for spec in specs]


def _bytes(specs: Sequence[Spec]) -> int:
    return sum(spec.bytes for spec in specs)
