"""Where a model runs, and how programs are compiled for it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from openipu import _validate as validate
from openipu.settings.enums import DeviceConnectionType

from . import group
from .replicas import Replicas
from .systems import System

NOT_RUN = (DeviceConnectionType.PRE_COMPILE, DeviceConnectionType.NEVER)


@dataclass(frozen=True, slots=True)
class Placement:
    """The devices of a model's replicas, and what the configuration says about programs on them.

    A program stays usable as long as the placement it was compiled for equals the current one.
    """

    replicas: Replicas
    generation: int
    recompute: bool
    compile_only: bool
    compiler_options: tuple[tuple[str, str], ...]
    dump_folder: Path | None
    batch_norm_group: int
    own_data: bool = False
    """Whether each process reads its own part of the data."""

    @property
    def fed(self) -> list[int]:
        """The replicas that the data of this process feeds: its own ones if it has data of its own, otherwise all."""
        return self.replicas.own if self.own_data else list(range(self.replicas.count))

    @property
    def speaks(self) -> bool:
        """Whether this process writes files and log lines: alone, or for all of those that run one program together."""
        return self.replicas.is_local or group.index() == 0

    def of_first(self, what: str, value: Any) -> Any:
        """The value of instance 0, if several instances run one program together. `what` says where they are."""
        return value if self.replicas.is_local else group.of_first(what, value)

    def any_of(self, what: str, value: bool) -> bool:
        """Whether it is true in any of the instances that run one program together."""
        return value if self.replicas.is_local else group.any_of(what, value)


def placement_on(system: System, each: int = 1) -> Placement:
    """Where a model runs on `system`: as many replicas as there is room for, with `each` devices per replica."""
    settings, present = system.settings, len(system.devices)
    norm_group, count = settings.batch_norm_group, present // each
    if count == 0:
        raise ValueError(
            f"The stages of the model need {each} devices, but {present} {'is' if present == 1 else 'are'} configured. "
            f"Set `auto_select_ipus` to a multiple of {each}, or put several stages on one device with "
            "`device_mapping`."
        )
    if unused := present % each:
        stay = "stays" if unused == 1 else "stay"
        validate.notice(
            f"{unused} of the {present} configured devices {stay} idle, because each replica of the model takes {each}."
        )
    own = len(system.of_this_process().devices)
    if system.own_data and own % each:
        raise ValueError(
            f"Each replica of the model takes {each} devices, but an instance has {own}, so "
            'replicas lie in several instances and cannot have data of their own. Use `PopDistStrategy(shard="auto")`.'
        )
    if count % norm_group:
        raise ValueError(
            f"norms.experimental.distributed_batch_norm_replica_group_size is {norm_group}, which does not divide the "
            f"{count} replicas. Give a number that does."
        )
    return Placement(
        Replicas(system.devices[: count * each], each, system.average),
        system.generation,
        settings.allow_recompute,
        settings.connection in NOT_RUN,
        system.compiler_options,
        settings.dump_folder,
        norm_group,
        system.own_data,
    )
