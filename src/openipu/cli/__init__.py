"""The `openipu` command. Keras and JAX are loaded inside the commands, so that `--help` is fast."""

from pathlib import Path
from typing import Annotated, Any

import typer

from .terminal import mend_environment


class _App(typer.Typer):
    """The command, in any terminal."""

    def __call__(self, *arguments: Any, **settings: Any) -> Any:
        mend_environment()
        return super().__call__(*arguments, **settings)


app = _App(
    name="openipu",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        from openipu import __version__

        typer.echo(f"openipu {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_print_version, help="Show the version and exit.")
    ] = False,
) -> None:
    """Keras models the IPU way: whole training loops compiled into one program."""


# The functions are not named like their commands, because the modules that do the work have those names.
@app.command("mnist")
def train_mnist(
    epochs: Annotated[int, typer.Option(min=1, metavar="N", help="Passes over the training images.")] = 3,
    batch_size: Annotated[int, typer.Option(min=1, metavar="N", help="Images in one micro-batch.")] = 64,
    steps_per_execution: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Steps in one launch of the compiled program.", show_default="one epoch"),
    ] = None,
    ipus: Annotated[int, typer.Option(min=1, metavar="N", help="Devices to train on, one replica on each.")] = 1,
    compare: Annotated[bool, typer.Option(help="Measure plain Keras on this machine as well.")] = True,
    samples: Annotated[
        int | None,
        typer.Option(min=1, max=60_000, metavar="N", help="Use only the first N images.", show_default="all"),
    ] = None,
) -> None:
    """Train the tutorial CNN on MNIST and compare its speed with plain Keras."""
    from .terminal import fail, make_console

    console = make_console()
    with console.status("Loading Keras and JAX ..."):
        from .mnist import Options, run
    try:
        run(Options(epochs, batch_size, steps_per_execution, ipus, compare, samples), console)
    except ValueError as error:  # a mistake of the user
        fail(error, 2)


@app.command("info")
def show_info() -> None:
    """Show versions, devices, options and folders, for example for a bug report."""
    from .info import run
    from .terminal import fail

    try:
        run()
    except OSError as error:  # the output cannot be written
        fail(error, 1)


@app.command("schedule")
def show_schedule(
    name: Annotated[
        str, typer.Argument(metavar="SCHEDULE", help="Grouped, Interleaved, Sequential, GPipe or OneFOneB.")
    ] = "Grouped",
    stages: Annotated[int, typer.Option(metavar="N", help="Stages in the pipeline.")] = 2,
    micro_batches: Annotated[int, typer.Option(metavar="N", help="Micro-batches in one update.")] = 8,
    devices: Annotated[
        str | None,
        typer.Option(metavar="LIST", help="The device of each stage: 0,1,1,0.", show_default="one per stage"),
    ] = None,
    inference: Annotated[bool, typer.Option("--inference", help="Only the forward passes.")] = False,
    svg: Annotated[
        Path | None, typer.Option(metavar="FILE", dir_okay=False, help="Write a picture to this file.")
    ] = None,
) -> None:
    """Show which device does what, and when: the table of a pipeline schedule, its bubble and its memory."""
    from .schedule import Options, run
    from .terminal import fail

    try:
        run(Options(name, stages, micro_batches, devices, not inference, svg))
    except (ValueError, NotImplementedError, OSError) as error:
        fail(error, 2)
