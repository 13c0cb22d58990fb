"""Options that commands share. Limits are far above what is useful: they stop a slip of the finger at once."""

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
        min=1, max=4096, metavar="N", help="Devices to train on: the stages, times the replicas.",
        show_default="one per stage",
    ),
]  # fmt: skip
Stages = Annotated[
    int,
    typer.Option(min=1, max=64, metavar="N", help="Pipeline stages that the model is cut into, each on its device."),
]
Schedule = Annotated[
    str | None,
    typer.Option(
        metavar="NAME", help=f"Schedule of the pipeline: {', '.join(SCHEDULES)}.", show_default="Grouped",
        autocompletion=complete_schedule,
    ),
]  # fmt: skip
Accumulate = Annotated[
    int | None,
    typer.Option(
        min=1, max=10_000, metavar="N", help="Micro-batches of a replica in one update.",
        show_default="1, or four per stage",
    ),
]  # fmt: skip
Compare = Annotated[bool, typer.Option(help="Measure plain Keras on this machine as well.")]
Profile = Annotated[Path | None, typer.Option(metavar="FOLDER", file_okay=False, help="Write a report to this folder.")]


def samples(most: int) -> typer.models.OptionInfo:
    """An option to use fewer images than there are."""
    option: typer.models.OptionInfo = typer.Option(
        min=1, max=most, metavar="N", help="Use only the first N images.", show_default="all"
    )
    return option
