"""What is known about a run, as frozen values. Reports of all kinds are made from these and from nothing else.

pydantic reads and writes them as JSON, and derives the schema of report.json from them. So a change here changes that
file; `FORMAT` counts such changes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from openipu._validate import counted

from .costs import Buffers, Counted, Peak, Rewritten

FORMAT: Final = 2
COUNTED: Final = "2 per multiply-add of matrix products and direct convolutions, 1 per element of other arithmetic"
"""What is counted as an operation, in words."""


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Bytes of one device that a program needs, by kind. None is a kind that the compiler does not report."""

    arguments: int | None
    results: int | None
    reused: int | None
    """Results that take the place of arguments."""
    temporary: int | None
    program: int | None

    def known(self) -> list[tuple[str, int]]:
        """The kinds that are known, with their bytes."""
        kinds = ("arguments", "results", "reused", "temporary", "program")
        return [(kind, size) for kind in kinds if (size := getattr(self, kind)) is not None]


@dataclass(frozen=True, slots=True)
class ProgramFacts:
    """The facts about one compiled program, in numbers of one device."""

    name: str
    trace_seconds: float
    lower_seconds: float
    compile_seconds: float
    """Of XLA's compiler alone."""
    before: bool
    """Whether an earlier run compiled it."""
    own: bool
    """False if a call inside this one used it, such as a validation."""
    cached: bool
    """Whether it came from the program cache."""
    accessed: float
    """Bytes read and written, as XLA counts them: the body of each loop only once."""
    memory: MemoryUse
    hlo_bytes: int
    """The size of the compiled program as text."""
    hlo: str
    """The compiled program as text, without its middle if it is long."""
    buffers: Buffers | None
    """None if XLA does not tell."""
    counted: Counted | None
    """None if its operations have not been counted."""
    rewritten: tuple[Rewritten, ...]
    """Convolutions that are computed in another form."""

    @property
    def operations(self) -> float | None:
        """Of one step: a micro-batch and its share of an update. None if they have not been counted."""
        return None if self.counted is None else self.counted.operations

    @property
    def seconds(self) -> float:
        """The time from the start of tracing to the end of compiling."""
        return self.trace_seconds + self.lower_seconds + self.compile_seconds

    def lines(self) -> list[str]:
        """The facts as the lines of a table."""
        first = f"compiled before, in {self.seconds:.3f} s" if self.before else f"{self.seconds:.3f} s"
        counted = "not counted" if self.operations is None else f"{self.operations:.6g} ({COUNTED})"
        return [
            f"  compile time          {first}",
            f"  from the cache        {'yes' if self.cached else 'no'}",
            f"  FLOPs per step        {counted}",
            f"  bytes per step        {self.accessed:.6g} (read and written, as XLA counts them: inner loops once)",
            *(f"  memory, {kind:<13} {size} bytes" for kind, size in self.memory.known()),
        ]


@dataclass(frozen=True, slots=True)
class Timed:
    """Steps that were timed, from the end of the launch before them to the end of the last one.

    The clock stops while programs are compiled, and while another call, such as a validation, runs inside this one.
    """

    steps: int
    samples: int
    seconds: float
    after_first: bool
    """False if there was only one launch, whose own time is given then."""

    def text(self) -> str:
        """The time per step, in words."""
        which = "after the first launch" if self.after_first else "of the only launch"
        return f"{1e3 * self.seconds / max(self.steps, 1):.3f} ms (mean of {self.steps} steps {which})"


@dataclass(frozen=True, slots=True)
class TimeParts:
    """Where the time of a run went, in seconds. The parts add up to the whole.

    Whenever the devices compute, the time is theirs. The rest is told apart by what the host was doing.
    """

    device: float = 0.0
    plan: float = 0.0
    """Models were built, and what they need to run was found out."""
    trace: float = 0.0
    lower: float = 0.0
    compile: float = 0.0
    feed: float = 0.0
    """The devices waited for data: the host was building the batches of an execution."""
    callbacks: float = 0.0
    """The devices waited for callbacks or hooks."""
    state: float = 0.0
    """The devices waited while the state moved between the model's variables and the devices."""
    checkpoint: float = 0.0
    """The devices waited while the state was copied for a checkpoint."""
    reporting: float = 0.0
    """The devices waited while facts for the report were collected."""
    other: float = 0.0

    @property
    def compiling(self) -> float:
        """Trace, lower and compile together."""
        return self.trace + self.lower + self.compile


@dataclass(frozen=True, slots=True)
class Execution:
    """One launch and the execution that it started. Times are seconds since the run began."""

    start: float
    end: float
    steps: int
    """Micro-batches of one replica."""
    samples: int
    ready: int
    """Slabs that were ready when that of this launch was asked for. With 0, the launch had to wait for its data."""


@dataclass(frozen=True, slots=True)
class Event:
    """Something that took time, for the trace. Times are seconds since the run began."""

    kind: str
    track: str
    """Who did it: "host", "devices" or "checkpoints"."""
    start: float
    end: float
    name: str = ""


@dataclass(frozen=True, slots=True)
class Logged:
    """Losses and metrics after a step, as callbacks see them. None is a number that JSON lacks: NaN or infinity."""

    step: int
    """Micro-batches of one replica since the run began."""
    values: dict[str, float | None]


@dataclass(frozen=True, slots=True)
class CheckpointFacts:
    """A checkpoint that was written in the background."""

    step: int
    start: float
    seconds: float
    bytes: int


@dataclass(frozen=True, slots=True)
class StageFacts:
    """One stage of a pipeline."""

    device: int
    layers: tuple[str, ...]
    """The names of its layers, if it is made of layers."""
    weights: int
    """How many numbers its layers' weights have; 0 if they are not known."""


@dataclass(frozen=True, slots=True)
class MeasuredStages:
    """How long the actions of a pipeline take, each timed alone on its device after the run. Times are in seconds."""

    forward: tuple[float, ...]
    """Of one forward, by stage."""
    backward: tuple[float, ...]
    """Of one backward, by stage; empty without training."""
    exchange: float
    """Of the exchange after a tick."""
    update: float
    """Of the update of the weights, on all devices; 0 without training."""
    kept: tuple[int, ...]
    """Per stage, the bytes that one micro-batch takes between its forward and its backward."""
    bubble: float
    """The share of all devices' time in which they wait, if actions take these times."""
    seconds: float
    """One update by these times: its ticks, their exchanges, and the update of the weights."""


@dataclass(frozen=True, slots=True)
class PipelineFacts:
    """The plan of a pipeline: its stages, and the table of one update."""

    schedule: str
    stages: tuple[StageFacts, ...]
    micro_batches: int
    ticks: int
    bubble: float
    """The share of all devices' time in which they wait, if a backward takes twice as long as a forward."""
    live: tuple[int, ...]
    """Per device, the most micro-batches that it holds between their forward and their backward."""
    training: bool
    table: tuple[str, ...]
    """What each device does, tick by tick: "F0:0 F0:1 B0:0,F0:2 -". Empty if it is too long to show."""
    measured: MeasuredStages | None = None
    """None if the stages have not been timed."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a run took place, and on how much data each update depends."""

    platform: str
    device: str
    """What the platform calls its devices."""
    replicas: int
    devices: int
    """Devices of one replica."""
    memory: int | None
    """Bytes of one device; None if it does not tell."""
    batch_size: int
    accumulation: int
    """Micro-batches of one replica in an update."""

    @property
    def effective_batch(self) -> int:
        """The samples of one update."""
        return self.batch_size * self.accumulation * self.replicas


@dataclass(frozen=True, slots=True)
class RunFacts:
    """The facts about one call: `fit`, `evaluate`, `predict`, `strategy.run`, `train` of an estimator, and so on."""

    name: str
    """The call."""
    model: str
    place: Place | None
    """None if nothing has been launched."""
    programs: tuple[ProgramFacts, ...]
    pipeline: PipelineFacts | None
    launches: int
    steps: int
    """Micro-batches of one replica."""
    samples: int
    began: float
    """Seconds since 1970."""
    seconds: float
    parts: TimeParts
    feed_seconds: float
    """Time that the host spent on building the batches of executions, whether or not the devices waited for it."""
    device_seconds: float
    """Time in which the devices computed, for this call and for calls inside it."""
    first_step_seconds: float | None
    """From the start of the call to the end of its first execution."""
    timed: Timed
    executions: tuple[Execution, ...]
    """All of them, or a sample."""
    logged: tuple[Logged, ...]
    """After every execution, or a sample."""
    checkpoints: tuple[CheckpointFacts, ...]
    events: tuple[Event, ...]
    """The first and the last ones."""
    warnings: tuple[str, ...]
    """What the log has warned of."""
    ended: bool
    failure: str | None
    peak: Peak | None
    """None if it was not measured: nobody asked for a page, or there was nothing to compare it with."""

    def text(self) -> str:
        """The facts as a table."""
        place = self.place
        where = (
            ""
            if place is None
            else f"{counted(place.replicas, 'replica')} of {counted(place.devices, 'device')}, {place.platform}"
        )
        seconds = self.seconds - self.parts.compiling
        lines = [
            f"{self.name}: {where}",
            f"  launches              {self.launches}",
            f"  steps                 {self.steps}",
            f"  time                  {seconds:.3f} s (from first to last, without compilation)",
            f"  time per step         {self.timed.text()}",
            f"  building batches      {self.feed_seconds:.3f} s",
        ]
        for number, program in enumerate(self.programs):
            lines += [f"program {number}, numbers of one device", *program.lines()]
        return "\n".join(lines) + "\n"


@dataclass(frozen=True, slots=True)
class Versions:
    """The software of a run."""

    openipu: str
    jax: str
    keras: str
    python: str


@dataclass(frozen=True, slots=True)
class Report:
    """Everything in report.json: the runs that were recorded, in order."""

    format: int
    title: str
    versions: Versions
    written: float
    """Seconds since 1970."""
    ended: bool
    """False if it was written while the recording went on: it then holds what was known by that time."""
    failure: str | None
    """What ended the recording, if it was not its end."""
    runs: tuple[RunFacts, ...]
