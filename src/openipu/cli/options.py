"""The options of the commands that train a network: `openipu mnist` and `openipu cifar10`.

Limits are far above what is useful: they stop a slip of the finger at once.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

SCHEDULES = ("Grouped", "Interleaved", "Sequential", "GPipe", "OneFOneB")


def complete_schedule(incomplete: str) -> list[str]:
    """The schedules whose names begin so, for the completion of shells."""
    return [name for name in SCHEDULES if name.lower().startswith(incomplete.lower())]


Epochs = Annotated[int, typer.Option(min=1, max=100_000, metavar="N", help="Passes over the training images.")]
BatchSize = Annotated[int, typer.Option(min=1, max=60_000, metavar="N", help="Images in one micro-batch.")]
StepsPerExecution = Annotated[
    int | None,
    typer.Option(
        min=1, max=1_000_000, metavar="N", help="Steps in one launch of the compiled program.", show_default="one epoch"
    ),
]
Ipus = Annotated[
    int | None,
    typer.Option(
        min=1, max=4096, metavar="N", help="Devices: one for each stage of each replica.", show_default="one replica"
    ),
]
Stages = Annotated[int, typer.Option(min=1, max=64, metavar="N", help="Cut the network into a pipeline of N stages.")]
Schedule = Annotated[
    str | None,
    typer.Option(
        metavar="NAME", help=f"{', '.join(SCHEDULES)}.", show_default="Grouped", autocompletion=complete_schedule
    ),
]
Accumulation = Annotated[
    int | None,
    typer.Option(
        min=1,
        max=4096,
        metavar="N",
        help="Micro-batches in one update, on each replica.",
        show_default="1, or 4 for each stage",
    ),
]
Compare = Annotated[bool, typer.Option(help="Measure plain Keras on this machine as well.")]
Profile = Annotated[Path | None, typer.Option(metavar="FOLDER", file_okay=False, help="Write a report to this folder.")]


@dataclass(frozen=True, slots=True)
class Options:
    """What a command was asked for; None means that the command decides."""

    epochs: int
    batch_size: int
    steps_per_execution: int | None
    ipus: int | None
    stages: int
    schedule: str | None
    gradient_accumulation_count: int | None
    compare: bool
    samples: int | None
    profile: Path | None

    def __post_init__(self) -> None:
        if self.schedule is not None and self.stages == 1:
            raise ValueError(f"--schedule {self.schedule} is for a pipeline. Add --stages 2, or leave it out.")
        if self.devices % self.stages:
            raise ValueError(
                f"--ipus {self.devices} is not a multiple of --stages {self.stages}, and each stage of a replica has "
                f"its own device. Give {self.stages}, or {2 * self.stages} for two replicas."
            )
        if self.steps_per_execution is not None and self.steps_per_execution % self.accumulated:
            raise ValueError(
                f"--steps-per-execution {self.steps_per_execution} is not a multiple of the {self.accumulated} "
                "micro-batches of an update (--gradient-accumulation-count). "
                f"Give {-(-self.steps_per_execution // self.accumulated) * self.accumulated}."
            )

    @property
    def devices(self) -> int:
        """All devices."""
        return self.ipus or self.stages

    @property
    def replicas(self) -> int:
        """Copies of the model."""
        return self.devices // self.stages

    @property
    def accumulated(self) -> int:
        """Micro-batches that each replica processes for one update. Four for each stage suit every schedule."""
        return self.gradient_accumulation_count or (1 if self.stages == 1 else 4 * self.stages)

    def execution_steps(self, batches: int) -> int:
        """Steps in one execution: those asked for, or enough whole updates on every replica for all batches."""
        updates = -(-batches // (self.replicas * self.accumulated))
        return self.steps_per_execution or updates * self.accumulated
