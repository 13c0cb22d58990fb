"""How a pipelined model runs: one frozen value, part of the model's options."""

from __future__ import annotations

import dataclasses
import enum
import importlib
from dataclasses import dataclass
from typing import Any

from openipu.engine.schedule.schedules import BUILT_IN, Grouped, Interleaved, Schedule, Sequential, by_name

from .accumulation import Accumulation


class PipelineSchedule(enum.IntEnum):
    """The schedules that have a name. Instead of one, any value with a method `table` can be given."""

    Grouped = 0
    """A micro-batch enters in every tick. The default."""
    Interleaved = 1
    """Forwards and backwards take turns: half the memory of Grouped, in more time."""
    Sequential = 2
    """One stage works at a time: the least memory."""
    GPipe = 3
    """All forwards, then all backwards."""
    OneFOneB = 4
    """A few forwards, then one backward and one forward in turn."""


class RecomputationMode(enum.Enum):
    """What the backward pass computes again instead of keeping it, where `IPUConfig.allow_recompute` is on."""

    Auto = 1
    """What suits the schedule."""
    RecomputeThenBackpropagate = 2
    """A stage is computed again as a whole, from its inputs."""
    RecomputeAndBackpropagateInterleaved = 3
    """A stage is computed again in parts, from its inputs and from what `recomputation_checkpoint` keeps."""


@dataclass(frozen=True, slots=True)
class Pipelining:
    """Options of a pipelined model."""

    schedule: Schedule = dataclasses.field(default_factory=Grouped)
    device_mapping: tuple[int, ...] | None = None
    """The device of each stage; None gives each stage its own."""
    recomputation_mode: RecomputationMode = RecomputationMode.Auto
    accumulate_outfeed: bool = False
    """Whether one sum of the results of an update is given out instead of one result per micro-batch."""
    accumulation: Accumulation = dataclasses.field(default_factory=Accumulation)
    shard_optimizer: bool = False
    """Each replica keeps and updates its share of the optimizer's state."""
    offload_optimizer: bool | None = None
    """Whether the optimizer's state is to live in host memory."""

    def __post_init__(self) -> None:
        mode = self.recomputation_mode
        if (type(self.schedule), mode) in (
            (Sequential, RecomputationMode.RecomputeThenBackpropagate),
            (Interleaved, RecomputationMode.RecomputeAndBackpropagateInterleaved),
        ):
            raise NotImplementedError(
                f"The schedule {type(self.schedule).__name__} does not go with the recomputation mode {mode.name}. "
                "Use the mode Auto."
            )

    @property
    def marks_count(self) -> bool:
        """Whether values marked by `recomputation_checkpoint` are kept where stages are computed again."""
        if self.recomputation_mode is RecomputationMode.Auto:
            return isinstance(self.schedule, Sequential)
        return self.recomputation_mode is RecomputationMode.RecomputeAndBackpropagateInterleaved

    def to_dict(self) -> dict[str, Any]:
        """Plain values that `from_dict` reads."""
        return {
            "schedule": _described(self.schedule),
            "device_mapping": self.device_mapping,
            "recomputation_mode": self.recomputation_mode.name,
            "accumulate_outfeed": self.accumulate_outfeed,
            "accumulation": self.accumulation.to_dict(),
            "shard_optimizer": self.shard_optimizer,
            "offload_optimizer": self.offload_optimizer,
        }

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Pipelining:
        """The inverse of `to_dict`."""
        mapping = values["device_mapping"]
        return cls(
            _made(values["schedule"]),
            None if mapping is None else tuple(mapping),
            RecomputationMode[values["recomputation_mode"]],
            values["accumulate_outfeed"],
            Accumulation.from_dict(values["accumulation"]),
            values["shard_optimizer"],
            values["offload_optimizer"],
        )


def schedule_of(value: Any) -> Schedule:
    """The schedule that a member of `PipelineSchedule`, a name, or a schedule itself stands for."""
    if isinstance(value, PipelineSchedule):
        return by_name(value.name)
    if isinstance(value, str):
        return by_name(value)
    if callable(getattr(value, "table", None)) and not isinstance(value, type):
        schedule: Schedule = value
        return schedule
    hint = f" Make one: {value.__name__}()." if isinstance(value, type) and hasattr(value, "table") else ""
    names = ", ".join(member.name for member in PipelineSchedule)
    raise TypeError(
        f"`pipeline_schedule` is {value!r}, which is no schedule.{hint} Give a member of `PipelineSchedule` ({names}), "
        "its name, or a value with a method `table`."
    )


def _described(schedule: Schedule) -> str | dict[str, Any]:
    """A name, or the class and the fields of a schedule that a user wrote."""
    kind = type(schedule)
    if kind in map(type, BUILT_IN):
        return kind.__name__
    path = f"{kind.__module__}:{kind.__qualname__}"
    if not dataclasses.is_dataclass(schedule) or "<locals>" in path:
        raise ValueError(
            f"The schedule {schedule!r} cannot be saved with the model: only a dataclass at the top of a module can. "
            "Move its class there, or set another schedule before saving."
        )
    return {"class": path, "fields": dataclasses.asdict(schedule)}


def _made(description: str | dict[str, Any]) -> Schedule:
    if isinstance(description, str):
        return by_name(description)
    module, _, name = description["class"].partition(":")
    try:
        found: Any = importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        raise ValueError(
            f"The model was saved with the schedule {description['class']}, which cannot be found here ({error}). "
            "Import the module that has it from where it was, or load the model outside of the strategy's scope."
        ) from error
    schedule: Schedule = found(**description["fields"])
    return schedule
