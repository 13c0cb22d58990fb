"""Stages -> the loop that runs them, the same for Keras models, plain functions and estimators."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from openipu.engine.host_io.step_logs import StepLogs
from openipu.engine.core.replicated_step import one_of_several
from openipu.engine.devices.placement import Placement
from openipu.engine.core.state import Outcome
from openipu.engine.core.optimizer_chain import describe, map_gradients

from .arguments import Arguments
from openipu.engine.pipeline.runtime.stage_loop import StageLoop, Staging
from openipu.engine.pipeline.runtime.packing import Spec
from .rules import one_dtype, recomputed
from openipu.engine.pipeline.runtime.sharded_update import ShardedUpdate
from openipu.engine.pipeline.runtime.stage_layout import StageLayout
from openipu.engine.pipeline.runtime.stage_function import Around, Arrays, StageFunction
from openipu.engine.pipeline.runtime.variable_store import Store, filled, make_store
from openipu.engine.pipeline.runtime.stage_update import make_update

Run = Callable[[Arrays, Arrays, Around], Any]


def make_loop(
    name: str,
    outcome: Outcome,
    make_stages: Callable[[Sequence[int]], tuple[StageFunction, ...]],
    used: tuple[Sequence[Sequence[int]], Sequence[Sequence[int]]],
    variables: tuple[Sequence[Any], Sequence[Any]],
    optimizer: Any,
    place: Placement,
    asked: Arguments,
    live: StepLogs | None = None,
) -> tuple[StageLoop, StageLayout]:
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
        update = make_update(optimizer, trained, weights, average, place.replicas, kind)
    stages = make_stages(update.common if update is not None else ())
    spread = StageLayout(place.replicas, weights, state, update)
    count = accumulation.steps if update is not None else None
    staging = Staging(stages, asked.schedule, asked.devices, count, recomputed(asked.marks_count, place.recompute))
    return StageLoop(name, outcome, place, accumulation, spread, staging, live), spread


def mapped(optimizer: Any, common: Sequence[int], gradients: Arrays, weights: Arrays, known: Arrays) -> Arrays:
    """The gradients of one micro-batch as the wrappers around the optimizer map them; `known` is what is common."""
    return map_gradients(optimizer, gradients, weights, filled(optimizer.variables, common, known))


def on_replica(place: Placement, run: Run, rows: Callable[[Around], int]) -> Run:
    """`run` as one of the replicas of `place`; `rows` tells the samples of its micro-batch."""
    if place.replicas.count == 1:
        return run

    def on_one(weights: Arrays, boundary: Arrays, around: Around) -> Any:
        count = rows(around)
        with one_of_several(place.replicas, place.batch_norm_group, lambda: count, around.active):
            return run(weights, boundary, around)

    return on_one


def _store(variables: Sequence[Any], used: Sequence[Sequence[int]], devices: Sequence[int], each: int) -> Store:
    """Each variable on the devices of the stages that use it; what no stage uses is on the first."""
    held: list[set[int]] = [set() for _ in range(each)]
    for numbers, device in zip(used, devices, strict=True):
        held[device].update(numbers)
    held[0].update(set(range(len(variables))).difference(*held))
    return make_store([Spec.of(v) for v in variables], [sorted(numbers) for numbers in held])
