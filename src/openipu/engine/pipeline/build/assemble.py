"""A model in stages -> the loop that runs it, for Keras models, plain functions and estimators alike."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from openipu.engine.core.enqueued import collected
from openipu.engine.core.optimizer_chain import describe, map_gradients
from openipu.engine.core.pipelining import Pipelining
from openipu.engine.core.replicated_step import one_of_several
from openipu.engine.core.state import Outcome
from openipu.engine.core.updates import Updates
from openipu.engine.devices.placement import Placement
from openipu.engine.host_io.step_logs import StepLogs
from openipu.engine.pipeline.runtime.packing import Spec
from openipu.engine.pipeline.runtime.sharded_update import ShardedUpdate
from openipu.engine.pipeline.runtime.stage_function import Arrays, StageContext, StageFunction, StageResults
from openipu.engine.pipeline.runtime.stage_layout import StageLayout
from openipu.engine.pipeline.runtime.stage_loop import StageLoop
from openipu.engine.pipeline.runtime.stage_update import Update, make_update
from openipu.engine.pipeline.runtime.variable_store import Store, make_store, zero_filled

import keras

from .rules import one_dtype

Run = Callable[[Arrays, Arrays, StageContext], tuple[Any, StageResults]]
"""`run` of a `StageFunction`."""


@dataclass(frozen=True, slots=True, eq=False)
class StageVariables:
    """Variables of a model, and which of them each stage uses."""

    variables: Sequence[Any]
    """Keras variables, or anything else with a shape and a dtype."""
    used: Sequence[tuple[int, ...]]
    """For each stage, numbers of variables."""


@dataclass(frozen=True, slots=True, eq=False)
class ModelInStages:
    """A model as stages, with its variables and its optimizer."""

    weights: StageVariables
    state: StageVariables
    """The variables that are not trained."""
    optimizer: keras.optimizers.Optimizer | None
    """None if nothing is trained."""
    functions: Callable[[Sequence[int]], tuple[StageFunction, ...]]
    """`functions(common)` returns the stages. `common` has the numbers of the optimizer's variables that belong to no
    weight; every stage can read these variables."""


def make_loop(
    name: str,
    outcome: Outcome,
    model: ModelInStages,
    pipelining: Pipelining,
    place: Placement,
    live: StepLogs | None = None,
) -> tuple[StageLoop, StageLayout]:
    """The loop that runs a model's stages, and the layout of their state on the devices of `place`."""
    assert pipelining.training == (model.optimizer is not None)
    weights = _store(model.weights, pipelining.devices, place)
    state = _store(model.state, pipelining.devices, place)
    update = None
    if pipelining.training:
        pipelining = pipelining.with_updates(one_dtype(pipelining.updates.of_weights(model.weights.variables)))
        update = _make_update(model, weights, pipelining.updates, place)
    functions = model.functions(update.common if update is not None else ())
    layout = StageLayout(place.replicas, weights, state, update)
    return StageLoop(name, outcome, place, layout, functions, pipelining, live), layout


def _make_update(model: ModelInStages, weights: Store, updates: Updates, place: Placement) -> Update:
    average = describe(model.optimizer).replica_reduction == "mean" or place.replicas.average
    kind = ShardedUpdate if updates.shard_optimizer and place.replicas.count > 1 else None
    dtype = updates.accumulation.dtype
    assert dtype is None or isinstance(dtype, str)
    return make_update(model.optimizer, model.weights.variables, weights, average, place.replicas, kind, dtype)


def gradient_map(
    optimizer: keras.optimizers.Optimizer | None, common: Sequence[int]
) -> Callable[[Arrays, Arrays, Arrays], Arrays] | None:
    """What the wrappers around an optimizer do to one micro-batch's gradients: `StageFunction.map_gradients`."""
    if optimizer is None:
        return None

    def mapped(gradients: Arrays, weights: Arrays, known: Arrays) -> Arrays:
        return map_gradients(optimizer, gradients, weights, zero_filled(optimizer.variables, common, known))

    return mapped


def on_replica(place: Placement, run: Run, rows: Callable[[StageContext], int]) -> Run:
    """`run` for one of the replicas of `place`; `rows` counts the samples of its micro-batch.

    It also returns what the stage enqueues.
    """

    def on_one(weights: Arrays, boundary: Arrays, context: StageContext) -> tuple[Any, StageResults]:
        with collected() as enqueued, as_one_of(context):
            out, results = run(weights, boundary, context)
        return out, results._replace(enqueued=enqueued())

    def as_one_of(context: StageContext) -> AbstractContextManager[None]:
        if place.replicas.count == 1:
            return nullcontext()
        count = rows(context)
        return one_of_several(place.replicas, place.batch_norm_group, lambda: count, context.active, context.spot)

    return on_one


def _store(held: StageVariables, devices: Sequence[int], place: Placement) -> Store:
    """Each variable on the devices of the stages that use it. Variables that no stage uses are on the first device."""
    on_device: list[set[int]] = [set() for _ in range(place.replicas.each)]
    for numbers, device in zip(held.used, devices, strict=True):
        on_device[device].update(numbers)
    on_device[0].update(set(range(len(held.variables))).difference(*on_device))
    return make_store([Spec.of(v) for v in held.variables], [sorted(numbers) for numbers in on_device])
