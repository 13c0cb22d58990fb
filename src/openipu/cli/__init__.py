"""The `openipu` command. Keras and JAX are loaded inside the commands, so that `--help` is fast."""

import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from openipu.run import check, load

import typer

from . import options
from .poprun import LaunchCommand
from .terminal import mend_environment
from .train import train_cifar10, train_mnist


class _RunScript(BaseException):
    """Leads out of all functions of the command line, because a script runs faster with few of them around it."""

    def __init__(self, path: str, arguments: Sequence[str]) -> None:
        self.script = path, arguments


class _App(typer.Typer):
    """The command, in any terminal."""

    def __call__(self, *arguments: Any, **settings: Any) -> Any:
        mend_environment()
        try:
            return super().__call__(*arguments, **settings)
        except _RunScript as asked:
            script = asked.script
        return exec(*load(*script))


app = _App(
    name="openipu",
    no_args_is_help=True,
    pretty_exceptions_show_locals=False,
    epilog="Exit codes: 0 done, 1 something failed or is left to do, 2 a wrong option or file, 130 ended with Ctrl-C.",
)


def _print_version(wanted: bool) -> None:
    if wanted:
        from openipu import __version__

        typer.echo(f"openipu {__version__}")
        raise typer.Exit


@app.callback()
def common(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_print_version, help="Show the version and exit.")
    ] = False,
) -> None:
    """Keras models the IPU way: whole training loops compiled into one program."""


app.command("mnist")(train_mnist)
app.command("cifar10")(train_cifar10)


# The functions are not named like their commands, because the modules that do the work have those names.
@app.command("info")
def show_info(
    as_json: Annotated[bool, typer.Option("--json", help="As a JSON object, for other programs.")] = False,
) -> None:
    """Show versions, devices, options and folders, for example for a bug report.

    Examples:

    openipu info

    openipu info --json
    """
    from .info import run
    from .terminal import fail

    try:
        run(as_json=as_json)
    except OSError as error:  # the output cannot be written
        fail(error, 1)


@app.command("schedule")
def show_schedule(
    name: Annotated[
        str,
        typer.Argument(
            metavar="SCHEDULE", help=f"{', '.join(options.SCHEDULES)}.", autocompletion=options.complete_schedule
        ),
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
    """Show which device does what, and when: the table of a pipeline schedule, its bubble and its memory.

    Examples:

    openipu schedule

    openipu schedule OneFOneB --stages 4 --micro-batches 16 --svg schedule.svg

    openipu schedule Interleaved --stages 4 --devices 0,1,1,0
    """
    from .schedule import Options, run
    from .terminal import fail

    try:
        run(Options(name, stages, micro_batches, devices, not inference, svg))
    except (ValueError, NotImplementedError, OSError) as error:
        fail(error, 2)


@app.command(
    "run",
    no_args_is_help=True,
    context_settings={"allow_interspersed_args": False, "ignore_unknown_options": True},
)
def run_script(
    script: Annotated[str, typer.Argument(metavar="SCRIPT", help="A Python file.")],
    arguments: Annotated[list[str] | None, typer.Argument(metavar="ARGUMENT", help="Arguments of the script.")] = None,
) -> None:
    """Run a script that was written for TensorFlow 2 on the IPU, as it is.

    Needs TensorFlow: pip install "openipu[tensorflow]".

    Examples:

    openipu run train.py --epochs 3

    openipu launch --num-instances 2 openipu run train.py
    """
    from .terminal import fail, make_console

    try:
        check(script)
    except FileNotFoundError as error:
        fail(error, 2)
    try:
        with make_console(stderr=True).status("Loading TensorFlow, Keras and JAX ..."):
            import openipu.tensorflow  # noqa: F401 - so that errors of the script itself keep their traceback
    except ImportError as error:
        fail(error, 2)
    raise _RunScript(script, arguments or ())


@app.command("report")
def show_report(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="The folder of a report.")],
    other: Annotated[
        Path | None, typer.Argument(metavar="[FOLDER]", help="Another one, to compare with.", show_default=False)
    ] = None,
    in_browser: Annotated[
        bool, typer.Option("--open", help="Show the page in a browser, from a server that only this machine can reach.")
    ] = False,
) -> None:
    """Show the summary of a report, or compare two of them.

    Examples:

    openipu report out

    openipu report --open out

    openipu report before after
    """
    from . import report, serve
    from .terminal import fail

    try:
        if in_browser and other is not None:
            raise ValueError("--open shows one report, but two folders were given. Give one, or leave out --open.")
        if in_browser:
            serve.show(folder)
        elif other is None:
            report.show(folder)
        else:
            report.compare(folder, other)
    except (ValueError, OSError) as error:
        fail(error, 2)


@app.command("plan", no_args_is_help=True)
def plan_splits(
    script: Annotated[Path, typer.Argument(metavar="SCRIPT", exists=True, dir_okay=False, help="A Python file.")],
    devices: Annotated[int, typer.Option(min=1, max=4096, metavar="N", help="Devices to plan for.")],
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="[-- ARGUMENT...]", help="Arguments of the script.")
    ] = None,
    memory: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Memory of one device: 80GiB.", show_default="no limit")
    ] = None,
    link: Annotated[
        str | None,
        typer.Option(metavar="RATE", help="What a device can send: 50GB/s.", show_default="transfers take no time"),
    ] = None,
    speed: Annotated[
        str | None,
        typer.Option(metavar="RATE", help="Speed of one device: 300TFLOP/s.", show_default="measured here"),
    ] = None,
    stages: Annotated[int | None, typer.Option(min=1, metavar="N", help="Stages.", show_default="any")] = None,
    schedule: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Grouped, OneFOneB, GPipe, ...",
            show_default="the best",
            autocompletion=options.complete_schedule,
        ),
    ] = None,
    effective_batch: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Samples in an update.", show_default="as in the script")
    ] = None,
    output: Annotated[
        Path | None, typer.Option(metavar="FILE", dir_okay=False, help="Draw the plan: a page (.html) or .svg.")
    ] = None,
) -> None:
    """Find the best replicas x stages x accumulation for a script on devices that need not be there.

    The script runs up to its first `fit`. Nothing is trained.

    Example:

    openipu plan train.py --devices 64 --memory 80GiB --link 50GB/s --speed 300TFLOP/s
    """
    from .terminal import fail, make_console

    console = make_console()
    with console.status("Loading Keras and JAX ..."):
        from .plan import Options, ScriptError, run
    wanted = Options(
        script, tuple(arguments or ()), devices, memory, link, speed, stages, schedule, effective_batch, output
    )
    try:
        run(wanted, console)
    except ScriptError as error:  # Python's own words for it, as without this command
        traceback.print_exception(error.__cause__)
        raise typer.Exit(1) from error
    except (ValueError, OSError) as error:
        fail(error, 2)


@app.command("migrate", no_args_is_help=True)
def migrate_scripts(
    paths: Annotated[list[Path], typer.Argument(metavar="PATH", exists=True, help="Scripts, or folders with scripts.")],
    write: Annotated[bool, typer.Option("--write", help="Make the edits, and keep each original as NAME.bak.")] = False,
) -> None:
    """Turn TensorFlow 2 scripts for the IPU into native OpenIPU scripts.

    Without --write, the edits are printed as a diff and nothing is changed.
    What needs a person is listed with its line and the reason.

    Exit codes: 0 if nothing is left to do by hand, 1 if something is,
    2 if a script cannot be read or written.

    Examples:

    openipu migrate train.py

    openipu migrate --write train.py models/
    """
    from .migrate import run
    from .terminal import fail

    try:
        code = run(paths, write)
    except (ValueError, OSError) as error:
        fail(error, 2)
    raise typer.Exit(code)


@app.command("launch", cls=LaunchCommand, no_args_is_help=True)
def launch_instances(
    context: typer.Context,
    command: Annotated[
        list[str],
        typer.Argument(
            metavar="COMMAND", help="A script (train.py), -m and a module, or any other command; then its arguments."
        ),
    ],
    num_instances: Annotated[
        int | None,
        typer.Option(min=1, max=4096, metavar="N", help="Processes to start.", show_default="one, or one per host"),
    ] = None,
    num_replicas: Annotated[
        int | None,
        typer.Option(
            min=1, max=65_536, metavar="N", help="Replicas of all instances together.", show_default="one per instance"
        ),
    ] = None,
    ipus_per_replica: Annotated[int, typer.Option(min=1, max=4096, metavar="N", help="Devices of each replica.")] = 1,
    host: Annotated[
        str | None,
        typer.Option("--host", "--hosts", metavar="A,B", help="Start the processes on these hosts, through ssh."),
    ] = None,
    only_output_from_instance: Annotated[
        int | None, typer.Option(min=0, metavar="I", help="Show the output of this instance only, as it is.")
    ] = None,
    executable_cache_path: Annotated[
        str | None, typer.Option(metavar="FOLDER", help="Where the instances keep compiled programs.")
    ] = None,
    max_restarts: Annotated[
        int, typer.Option(min=0, metavar="N", help="How often to start all again if one fails.")
    ] = 0,
    timeout: Annotated[
        int, typer.Option(min=1, metavar="SECONDS", help="How long instances wait for each other at the start.")
    ] = 300,
) -> None:
    """Start several processes (instances) of one script, which train together, as poprun does.

    If one fails, the others are stopped, and its last lines of output are shown at the end.
    The exit code is that of the first failure.
    Ctrl-C ends all of them, and a second Ctrl-C kills them at once.

    With --host, the script, the folder and Python have the same paths on all hosts.
    Each host knows the first one by its name, and ssh needs no password.
    PATH, PYTHONPATH, LD_LIBRARY_PATH and all that begins with OPENIPU_,
    KERAS_, JAX_, XLA_, TF_POPLAR_, POPLAR_, CUDA_VISIBLE or NCCL_ go along.

    Options of poprun for IPUs and MPI are accepted, and named once as having no effect.

    Examples:

    openipu launch --num-instances 2 --num-replicas 4 train.py --epochs 3

    openipu launch --host a,b --num-instances 4 --max-restarts 3 -m package.train
    """
    from .launch import Options, run
    from .terminal import fail

    wanted = Options(
        tuple(command), num_instances, num_replicas, ipus_per_replica, host, only_output_from_instance,
        executable_cache_path, max_restarts, timeout,
    )  # fmt: skip
    try:
        run(wanted, context.obj)
    except (ValueError, OSError) as error:
        fail(error, 2)
