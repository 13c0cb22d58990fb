"""How a pipeline runs: one frozen value for Keras models, functions and estimators alike.

Users set it before the stages are known; `for_stages` completes it for a run. Code that builds or runs the pipeline
asks this value about devices, tables and recomputation.
"""

from __future__ import annotations

import dataclasses
import enum
import importlib
from dataclasses import dataclass
from typing import Any

from openipu.engine.schedule.actions import Table
from openipu.engine.schedule.schedules import (
    BUILT_IN,
    Grouped,
    Interleaved,
    Schedule,
    Sequential,
    by_name,
    check_devices,
    micro_batch_multiple,
)

from .updates import Updates


class PipelineSchedule(enum.IntEnum):
    """The schedules that have a name. Any object with a `table` method can be given instead.

    >>> ipu.pipelining_ops.PipelineSchedule.OneFOneB.name
    'OneFOneB'
    """

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
    """What the backward pass recomputes instead of keeping, if `IPUConfig.allow_recompute` is on.

    >>> model.set_pipelining_options(
    ...     gradient_accumulation_steps_per_replica=4,
    ...     recomputation_mode=ipu.pipelining_ops.RecomputationMode.RecomputeThenBackpropagate,
    ... )
    """

    Auto = 1
    """Whatever suits the schedule."""
    RecomputeThenBackpropagate = 2
    """A stage is recomputed as a whole, from its inputs."""
    RecomputeAndBackpropagateInterleaved = 3
    """A stage is recomputed in parts, from its inputs and from what `recomputation_checkpoint` keeps."""


class Recompute(enum.Enum):
    """What the backward of a stage recomputes instead of reading what its forward kept."""

    NOTHING = enum.auto()
    EVERYTHING = enum.auto()
    """The whole stage, from its inputs."""
    UNMARKED = enum.auto()
    """Everything except what `recomputation_checkpoint` marks."""


@dataclass(frozen=True, slots=True)
class Pipelining:
    """How the stages of a pipeline run."""

    schedule: Schedule = dataclasses.field(default_factory=Grouped)
    device_mapping: tuple[int, ...] | None = None
    """The device of each stage, counted within a replica. None gives each stage its own; `for_stages` fills it in."""
    recomputation_mode: RecomputationMode = RecomputationMode.Auto
    accumulate_outfeed: bool = False
    """Whether an update returns the sum of its results instead of one result per micro-batch."""
    updates: Updates = dataclasses.field(default_factory=Updates)
    training: bool = True
    """Whether there are backwards and updates. `for_stages` sets this; it is not saved."""

    def __post_init__(self) -> None:
        mode = self.recomputation_mode
        if (type(self.schedule), mode) in (
            (Sequential, RecomputationMode.RecomputeThenBackpropagate),
            (Interleaved, RecomputationMode.RecomputeAndBackpropagateInterleaved),
        ):
            raise NotImplementedError(
                f"The schedule {type(self.schedule).__name__} does not work with the recomputation mode {mode.name}. "
                "Use the mode Auto."
            )

    def with_updates(self, updates: Updates) -> Pipelining:
        """The same pipeline with other updates."""
        return dataclasses.replace(self, updates=updates)

    def for_stages(self, count: int, training: bool) -> Pipelining:
        """This pipeline for a model of `count` stages, with the device of each stage filled in and checked."""
        mapping = tuple(range(count)) if self.device_mapping is None else check_devices(count, self.device_mapping)
        return dataclasses.replace(self, device_mapping=mapping, training=training)

    # --- answers for known stages

    @property
    def devices(self) -> tuple[int, ...]:
        """The device of each stage."""
        assert self.device_mapping is not None, "call `for_stages` first"
        return self.device_mapping

    @property
    def device_count(self) -> int:
        """How many devices one replica takes."""
        return 1 + max(self.devices)

    def multiple(self) -> int:
        """The number of micro-batches has to be a multiple of this."""
        return micro_batch_multiple(self.schedule, self.devices, self.training)

    def table(self, steps: int) -> Table:
        """The table of one update. Without training, a table for `steps` micro-batches, rounded up to a multiple."""
        group = self.multiple()
        count = self.updates.steps if self.training else steps + -steps % group
        return self.schedule.table(len(self.devices), count, self.devices, self.training)

    def single_table(self) -> Table:
        """The table for one micro-batch by itself."""
        return Sequential().table(len(self.devices), 1, self.devices, self.training)

    def recompute(self, allowed: bool) -> Recompute:
        """What backwards recompute. `allowed` is the value of `IPUConfig.allow_recompute`."""
        if not allowed:
            return Recompute.NOTHING
        if self.recomputation_mode is RecomputationMode.Auto:
            return Recompute.UNMARKED if isinstance(self.schedule, Sequential) else Recompute.EVERYTHING
        if self.recomputation_mode is RecomputationMode.RecomputeAndBackpropagateInterleaved:
            return Recompute.UNMARKED
        return Recompute.EVERYTHING

    # --- saving

    def to_dict(self) -> dict[str, Any]:
        """Plain values for `from_dict`."""
        return {
            "schedule": _described(self.schedule),
            "device_mapping": self.device_mapping,
            "recomputation_mode": self.recomputation_mode.name,
            "accumulate_outfeed": self.accumulate_outfeed,
            **self.updates.to_dict(),
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
            Updates.from_dict(values),
        )


def schedule_of(value: PipelineSchedule | str | Schedule) -> Schedule:
    """The schedule for a member of `PipelineSchedule`, its name, or a schedule itself."""
    if isinstance(value, PipelineSchedule):
        return by_name(value.name)
    if isinstance(value, str):
        return by_name(value)
    if callable(getattr(value, "table", None)) and not isinstance(value, type):
        return value
    hint = f" Make an instance: {value.__name__}()." if isinstance(value, type) and hasattr(value, "table") else ""
    names = ", ".join(member.name for member in PipelineSchedule)
    raise TypeError(
        f"`pipeline_schedule` is {value!r}, which is not a schedule.{hint} Give a member of `PipelineSchedule` "
        f"({names}), its name, or an object with a `table` method."
    )


def _described(schedule: Schedule) -> str | dict[str, Any]:
    """The name of a built-in schedule, or the class and fields of one that a user wrote."""
    kind = type(schedule)
    if kind in map(type, BUILT_IN):
        return kind.__name__
    path = f"{kind.__module__}:{kind.__qualname__}"
    if not dataclasses.is_dataclass(schedule) or "<locals>" in path:
        raise ValueError(
            f"The schedule {schedule!r} cannot be saved with the model: its class is not a dataclass at the top level "
            "of a module. Make it one, or set another schedule before saving."
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
            "Make its module importable under the same name, or load the model outside the strategy's scope."
        ) from error
    schedule: Schedule = found(**description["fields"])
    return schedule
