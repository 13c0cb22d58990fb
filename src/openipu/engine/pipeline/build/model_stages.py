"""What is decided about a pipeline before anything compiles; every rule about its numbers is checked here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from openipu._validate import name_once
from openipu.settings.frozen import Settings
from openipu.engine.core.accumulation import Accumulation
from openipu.engine.keras_compat.build_model import is_built
from openipu.engine.core.model_state import variables_of
from openipu.engine.host_io.step_logs import StepLogs
from openipu.engine.core.options import Options
from openipu.engine.devices.placement import Placement
from openipu.engine.core.state import Mode
from openipu.engine.core.keras_steps import make_outcome

from .arguments import Arguments
from .assemble import make_loop
from openipu.engine.pipeline.partition.assignment import stages_of_model
from .keras_stages import stage_functions, used_by
from openipu.engine.pipeline.runtime.stage_loop import StageLoop
from openipu.engine.core.pipelining import Pipelining
from .rules import check_model, check_training, devices_of_stages, recomputed
from openipu.engine.schedule.schedules import Schedule
from openipu.engine.pipeline.partition.split import Stage
from openipu.engine.pipeline.runtime.stage_layout import StageLayout
from openipu.engine.pipeline.runtime.stage_function import Recompute


@dataclass(frozen=True, slots=True, eq=False)
class StagePlan:
    """A model cut into stages, and the device of each stage in every replica."""

    stages: tuple[Stage, ...]
    devices: tuple[int, ...]
    schedule: Schedule
    recompute: Recompute

    @property
    def device_count(self) -> int:
        """Devices of one replica."""
        return 1 + max(self.devices)


def make_plan(model: Any, mode: Mode, options: Options, settings: Settings) -> StagePlan:
    """The plan for a built model, after its rules have been checked."""
    check_model(model)
    pipelining = options.pipelining or Pipelining()
    if not is_built(model):
        raise RuntimeError(
            f"Model {model.name!r} is pipelined but not built, so its stages are not known. Call it on a batch first."
        )
    stages = stages_of_model(model, options.stages, training=mode == "train")
    devices = devices_of_stages(pipelining, len(stages))
    if mode == "train":
        check_training(pipelining, options.accumulation, len(stages))
    _check_state(stages, devices)
    return StagePlan(stages, devices, pipelining.schedule, recomputed(pipelining.marks_count, settings.allow_recompute))


def _check_state(stages: Sequence[Stage], devices: Sequence[int]) -> None:
    """Layers with moving statistics cannot be on two devices: each would have its own."""
    for stage in stages:
        for variable in stage.borrows:
            owner = next(other for other in stages if any(v is variable for v in other.variables))
            far = devices[owner.index] != devices[stage.index]
            if far and not variable.trainable and "float" in variable.dtype and _changes(variable, stage):
                raise ValueError(
                    f"{variable.path!r} is state that training changes, used by stages {owner.index} and "
                    f"{stage.index} on different devices. Put both on one device with `device_mapping`, or use a layer "
                    "of its own in each stage."
                )


def _changes(variable: Any, stage: Stage) -> bool:
    """Whether a variable is more than a frozen weight: then its layer is trained."""
    layers = [node.operation for node in stage.nodes if node.is_layer]
    return any(layer.trainable and any(v is variable for v in layer.variables) for layer in layers)


def make_stage_loop(
    model: Any, mode: Mode, place: Placement, options: Options, plan: StagePlan, live: StepLogs | None = None
) -> tuple[StageLoop, StageLayout]:
    """The loop of a pipelined model, and how its state lies on the devices."""
    if options.pipelining is not None and options.pipelining.accumulate_outfeed:
        name_once({"accumulate_outfeed": "metrics are those of all micro-batches and leave once per execution anyway"})
    if options.offload_optimizer:
        name_once(
            {"offload_weight_update_variables": "a pipeline's optimizer state stays on the devices of its stages"}
        )
    training = mode == "train"
    owners = variables_of(model, mode)
    asked = Arguments(
        (), options.accumulation if training else Accumulation(), plan.schedule, plan.devices, options.shard_optimizer,
        plan.recompute == "unmarked",
    )  # fmt: skip
    return make_loop(
        f"{model.name}_{mode}",
        make_outcome(model, mode, place.replicas, options),
        lambda common: stage_functions(model, mode, plan.stages, common, place),
        (used_by(plan.stages, owners.trainable), used_by(plan.stages, owners.non_trainable)),
        (owners.trainable, owners.non_trainable),
        model.optimizer if training else None,
        place,
        asked,
        live,
    )
