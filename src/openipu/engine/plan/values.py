"""What a plan is made of, as frozen values: a machine, what was counted in a model, and what follows from both."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Machine:
    """The devices to plan for. All of them are equal."""

    devices: int
    speed: float
    """Operations that a device computes in a second, in this model."""
    memory: int | None = None
    """Bytes of one device; None for no limit."""
    link: float | None = None
    """Bytes that a device sends in a second; None if transfers are to take no time."""

    def transfer(self, size: float) -> float:
        """How many seconds it takes to send so many bytes."""
        return 0.0 if self.link is None else size / self.link


@dataclass(frozen=True, slots=True)
class StageCounts:
    """What was counted in one stage, for one micro-batch."""

    forward: float
    """Operations."""
    backward: float
    update: float
    """Operations of an update of its weights."""
    weights: int
    """Bytes."""
    slots: int
    """Bytes of the optimizer's state for its weights."""
    kept: int
    """Bytes that are kept from the forward to the backward, besides what it has received."""
    received: int = 0
    """Bytes that come from the stage before."""
    returned: int = 0
    """Bytes of gradients that go back to it."""


@dataclass(frozen=True, slots=True)
class Cut:
    """A model cut into stages, or in one piece."""

    stages: tuple[StageCounts, ...]
    batch_size: int
    """Samples in a micro-batch."""
    batch_bytes: int
    """Bytes of a micro-batch."""

    @property
    def boundary(self) -> int:
        """The most bytes that pass between two stages at once. Transfers are padded to it."""
        return max(max(stage.received, stage.returned) for stage in self.stages)

    def most(self, kind: str) -> int:
        """The most bytes of a kind that any stage has: all devices reserve as much as the largest one needs."""
        return max(int(getattr(stage, kind)) for stage in self.stages)


@dataclass(frozen=True, slots=True)
class Split:
    """How a model is divided: replicas of stages, and micro-batches in an update."""

    replicas: int
    stages: int
    accumulation: int
    schedule: str
    """The name of the schedule; empty without stages."""

    @property
    def devices(self) -> int:
        """How many devices it takes."""
        return self.replicas * self.stages

    def __str__(self) -> str:
        with_schedule = f", {self.schedule}" if self.schedule else ""
        return f"{self.replicas} x {self.stages} x {self.accumulation}{with_schedule}"


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes of one device, by what they are for. Data that waits on the device is not included."""

    weights: int
    optimizer: int
    gradients: int
    activations: int

    @property
    def total(self) -> int:
        """All of it."""
        return self.weights + self.optimizer + self.gradients + self.activations


@dataclass(frozen=True, slots=True)
class TimePlan:
    """The seconds of one update, by what they are spent on, on the mean device."""

    work: float
    """Forwards and backwards."""
    bubble: float
    """Waiting for other stages."""
    exchange: float
    """Transfers between stages."""
    reduce: float
    """Adding up gradients over replicas."""
    update: float
    """Changing the weights."""

    @property
    def total(self) -> float:
        """All of it."""
        return self.work + self.bubble + self.exchange + self.reduce + self.update


@dataclass(frozen=True, slots=True)
class Prediction:
    """What is to be expected of a split."""

    split: Split
    time: TimePlan
    memory: MemoryPlan
    samples: int
    """Samples of one update: the effective batch."""
    bubble: float
    """The share of the devices' time in the pipeline in which they wait for each other."""
    stage_bytes: int
    """Bytes that pass over the busiest link between two stages in one update, there and back."""
    replica_bytes: int
    """Bytes that each device sends to other replicas in one update."""

    @property
    def throughput(self) -> float:
        """Samples per second."""
        return self.samples / self.time.total
