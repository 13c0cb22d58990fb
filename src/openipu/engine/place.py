"""Where a model runs, and how programs are compiled for it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from openipu.config.enums import DeviceConnectionType

from .devices import System

NOT_RUN = (DeviceConnectionType.PRE_COMPILE, DeviceConnectionType.NEVER)


@dataclass(frozen=True, slots=True)
class Place:
    """A device, and what the configuration says about programs on it.

    A program stays usable as long as the place it was compiled for is equal to the current one.
    """

    device: Any
    generation: int
    recompute: bool
    compile_only: bool
    compiler_options: tuple[tuple[str, str], ...]
    dump_folder: Path | None


def place(system: System) -> Place:
    """Where an unpipelined model runs on `system`."""
    if len(system.devices) > 1:
        raise ValueError(
            f"{len(system.devices)} devices are configured, but a model runs on 1 device in this version. "
            "Set `cfg.auto_select_ipus = 1` and call `cfg.configure_ipu_system()` again."
        )
    settings = system.settings
    return Place(
        system.devices[0],
        system.generation,
        settings.allow_recompute,
        settings.connection in NOT_RUN,
        system.compiler_options,
        settings.dump_folder,
    )
