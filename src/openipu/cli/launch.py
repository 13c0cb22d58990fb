"""`openipu launch`: from the options to a job, and from its ending to the exit code."""

import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from openipu._validate import no_effect
from openipu.launcher.job import Job, command_line
from openipu.launcher.run import Ending
from openipu.launcher.run import run as run_job
from openipu.settings.environment import with_executable_cache

import typer

from .terminal import fail


@dataclass(frozen=True, slots=True)
class Options:
    """The options of the command; None where there was none."""

    command: tuple[str, ...]
    num_instances: int | None
    num_replicas: int | None
    ipus_per_replica: int
    host: str | None
    only_output_from_instance: int | None
    executable_cache_path: str | None
    max_restarts: int
    timeout: int


def run(options: Options, without_effect: Mapping[str, str]) -> None:
    """Run the instances, and end as they end."""
    job = make_job(options)
    no_effect(without_effect)
    ending = run_job(job)
    if ending.why is not None:
        report(ending)


def make_job(options: Options) -> Job:
    """The job that the options describe, or an error that says why there is none."""
    hosts = () if options.host is None else tuple(host.strip() for host in options.host.split(","))
    instances = options.num_instances or max(1, len(hosts))
    check_command(options.command, here=not hosts)
    environment = {}
    if options.executable_cache_path is not None:
        flags = os.environ.get("TF_POPLAR_FLAGS", "")
        environment["TF_POPLAR_FLAGS"] = with_executable_cache(flags, options.executable_cache_path)
    return Job(
        command_line(options.command),
        instances,
        options.num_replicas or instances,
        options.ipus_per_replica,
        hosts,
        environment,
        options.timeout,
        options.max_restarts,
        options.only_output_from_instance,
    )


def check_command(words: tuple[str, ...], here: bool) -> None:
    """Raise if there is nothing to run. What other hosts have is found out when they are asked."""
    if words == ("-m",):
        raise ValueError("-m is not followed by the name of a module. Write for example -m package.train")
    if words[0].endswith(".py"):
        if here and not Path(words[0]).is_file():
            raise ValueError(f"There is no file {words[0]}. Give the script before its own options.")
    elif here and words[0] != "-m" and shutil.which(words[0]) is None:
        raise ValueError(f"{words[0]} is neither a .py file nor a command that can be run.")


def report(ending: Ending) -> None:
    """Show last what went wrong first, and end with its exit code."""
    if not ending.failed:
        typer.echo(ending.why, err=True)
        raise typer.Exit(ending.code)
    typer.echo(ending.last, err=True, nl=False)
    fail(RuntimeError(ending.why), ending.code)
