"""A Keras model and its options -> its stages, how they run, and the loop that runs them."""

from __future__ import annotations

from dataclasses import dataclass

from openipu import _validate as validate
from openipu.engine.core.keras_steps import make_outcome
from openipu.engine.core.options import Options
from openipu.engine.core.pipelining import Pipelining
from openipu.engine.core.state import Mode
from openipu.engine.devices.placement import Placement
from openipu.engine.host_io.step_logs import StepLogs
from openipu.engine.keras_compat.build_model import is_built
from openipu.engine.pipeline.partition.assignment import stages_of_model
from openipu.engine.pipeline.partition.split import Stage
from openipu.engine.pipeline.runtime.stage_layout import StageLayout
from openipu.engine.pipeline.runtime.stage_loop import StageLoop

import keras

from .assemble import make_loop
from .keras_stages import stages_of_keras_model
from .rules import (
    check_accumulation_is_set,
    check_all_devices_used,
    check_micro_batches,
    check_model,
)


@dataclass(frozen=True, slots=True, eq=False)
class KerasPipeline:
    """A Keras model cut into stages, and how they run."""

    stages: tuple[Stage, ...]
    pipelining: Pipelining


def make_keras_pipeline(model: keras.Model, mode: Mode, options: Options) -> KerasPipeline:
    """The pipeline of a built model, after all rules have been checked."""
    check_model(model)
    if not is_built(model):
        raise RuntimeError(
            f"Model {model.name!r} is pipelined but not built, so its stages are not known. Call it on a batch first."
        )
    stages = stages_of_model(model, options.stages, training=mode == "train", opening=options.opening)
    pipelining = (options.pipelining or Pipelining()).for_stages(len(stages), mode == "train")
    check_all_devices_used(pipelining)
    if pipelining.training:
        check_accumulation_is_set(pipelining)
        check_micro_batches(pipelining, "`gradient_accumulation_steps_per_replica`")
    return KerasPipeline(stages, pipelining)


def make_keras_loop(
    model: keras.Model,
    mode: Mode,
    place: Placement,
    options: Options,
    pipeline: KerasPipeline,
    live: StepLogs | None = None,
) -> tuple[StageLoop, StageLayout]:
    """The loop of a pipelined Keras model, and the layout of its state on the devices."""
    pipelining = pipeline.pipelining
    if pipelining.accumulate_outfeed:
        validate.no_effect(
            {"accumulate_outfeed": "metrics cover all micro-batches and leave the program once per execution anyway"}
        )
    if pipelining.updates.offload_optimizer:
        validate.no_effect(
            {"offload_weight_update_variables": "a pipeline's optimizer state stays on the devices of its stages"}
        )
    outcome = make_outcome(model, mode, place.replicas, options)
    staged = stages_of_keras_model(model, mode, pipeline.stages, pipelining.devices, place)
    return make_loop(f"{model.name}_{mode}", outcome, staged, pipelining, place, live)
