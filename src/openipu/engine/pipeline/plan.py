"""What is decided about a pipeline before anything compiles; every rule about its numbers is checked here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from openipu.engine import model as keras_model
from openipu.engine.accumulate import Accumulation
from openipu.engine.options import Options
from openipu.engine.place import Place
from openipu.engine.state import Mode

from .keras_stages import stage_functions
from .loop import StageLoop, Staging
from .packing import Spec
from .schedules import Schedule
from .split import Stage
from .spread import StageSpread
from .store import Store, make_store
from .update import make_update


@dataclass(frozen=True, slots=True, eq=False)
class StagePlan:
    """A model cut into stages, and the device of each stage in every replica."""

    stages: tuple[Stage, ...]
    devices: tuple[int, ...]
    schedule: Schedule
    recompute: bool

    @property
    def device_count(self) -> int:
        """Devices of one replica."""
        return 1 + max(self.devices)


def make_stage_loop(
    model: Any, mode: Mode, place: Place, options: Options, plan: StagePlan
) -> tuple[StageLoop, StageSpread]:
    """The loop of a pipelined model, and how its state lies on the devices."""
    owners = keras_model.variables(model, mode)
    weights = _store(owners.trainable, plan)
    state = _store(owners.non_trainable, plan)
    update = None
    accumulation = Accumulation()
    if mode == "train":
        accumulation = options.accumulation
        update = make_update(
            model.optimizer, owners.trainable, weights, options.average_replicas, place.replicas,
            keras_model.decays, keras_model.forget,
        )  # fmt: skip
    spread = StageSpread(place.replicas, weights, state, update)
    common = update.common if update is not None else ()
    functions = stage_functions(model, mode, plan.stages, common, place)
    count = accumulation.steps if mode == "train" else None
    staging = Staging(functions, plan.schedule, plan.devices, count, plan.recompute)
    step = keras_model.make_staged_step(model, mode, place.replicas, options)
    return StageLoop(f"{model.name}_{mode}", step, place, accumulation, spread, staging), spread


def _store(variables: Sequence[Any], plan: StagePlan) -> Store:
    """Each variable on the devices of the stages that use it; what no stage uses is on the first."""
    number = {id(v): i for i, v in enumerate(variables)}
    held: list[set[int]] = [set() for _ in range(plan.device_count)]
    for stage, device in zip(plan.stages, plan.devices, strict=True):
        held[device].update(number[id(v)] for v in (*stage.variables, *stage.borrows) if id(v) in number)
    held[0].update(set(range(len(variables))).difference(*held))
    return make_store([Spec.of(v) for v in variables], [sorted(numbers) for numbers in held])
