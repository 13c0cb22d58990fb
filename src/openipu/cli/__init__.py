"""The `openipu` command. Keras and JAX are loaded inside the commands, so that `--help` answers at once."""

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(
    name="openipu",
    help="Keras models the IPU way: whole training loops compiled into one program.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,
)


# The functions have other names than the commands, which are the names of the modules that do the work.
@app.command("mnist")
def train_mnist(
    epochs: Annotated[int, typer.Option(min=1, metavar="N", help="Times to go through the training images.")] = 3,
    batch_size: Annotated[int, typer.Option(min=1, metavar="N", help="Images of one micro-batch.")] = 64,
    steps_per_execution: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Steps of one compiled program.", show_default="one epoch")
    ] = None,
    ipus: Annotated[int, typer.Option(min=1, metavar="N", help="Devices to train on; each holds one replica.")] = 1,
    compare: Annotated[bool, typer.Option(help="Measure plain Keras on this machine too.")] = True,
    samples: Annotated[
        int | None, typer.Option(min=1, max=60_000, metavar="N", help="Use only so many images.", show_default="all")
    ] = None,
) -> None:
    """Train the tutorial CNN on MNIST and compare its speed with plain Keras."""
    from rich.console import Console

    console = Console()
    with console.status("Loading Keras and JAX ..."):
        from .mnist import Options, run
    try:
        run(Options(epochs, batch_size, steps_per_execution, ipus, compare, samples), console)
    except ValueError as error:
        # What a user did wrong: the message has the numbers and the remedy, a traceback would hide it.
        Console(stderr=True).print(f"[bold red]Error:[/] {error}", highlight=False)
        raise typer.Exit(2) from error


@app.command("info")
def show_info() -> None:
    """Show versions, devices, options and folders: what a bug report needs."""
    from .info import run

    run()


@app.command("schedule")
def show_schedule(
    name: Annotated[
        str, typer.Argument(metavar="SCHEDULE", help="Grouped, Interleaved, Sequential, GPipe or OneFOneB.")
    ] = "Grouped",
    stages: Annotated[int, typer.Option(metavar="N", help="Stages of the pipeline.")] = 2,
    micro_batches: Annotated[int, typer.Option(metavar="N", help="Micro-batches of one update.")] = 8,
    devices: Annotated[
        str | None, typer.Option(metavar="LIST", help="Device of each stage: 0,1,1,0.", show_default="one per stage")
    ] = None,
    inference: Annotated[bool, typer.Option("--inference", help="Forwards only.")] = False,
    svg: Annotated[Path | None, typer.Option(metavar="FILE", dir_okay=False, help="Draw a picture.")] = None,
) -> None:
    """Show who does what when in a pipeline: the table of a schedule, its bubble and its memory."""
    from rich.console import Console
    from rich.markup import escape

    from .schedule import Options, run

    try:
        run(Options(name, stages, micro_batches, devices, not inference, svg))
    except (ValueError, NotImplementedError, OSError) as error:
        # Lists in square brackets are part of the message.
        Console(stderr=True).print(f"[bold red]Error:[/] {escape(str(error))}", highlight=False, soft_wrap=True)
        raise typer.Exit(2) from error
