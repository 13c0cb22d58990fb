"""What is to be started, and where."""

import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from openipu.settings.instances import TIMEOUT_SECONDS, Instance, check_division

_HERE: Final = Path(__file__).parent
_TRAVELS: Final = ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH")
_TRAVEL: Final = ("OPENIPU_", "KERAS_", "JAX_", "XLA_", "TF_POPLAR_", "POPLAR_", "CUDA_VISIBLE", "NCCL_")
"""Variables that go to other hosts, by name and by prefix. Not all do, because command lines can be read by others."""

# Without questions, because nobody could answer them. A host that does not answer for a minute is lost.
_SSH: Final = ("ssh", "-T", "-o", "BatchMode=yes", "-o", "ServerAliveInterval=20")


@dataclass(frozen=True, slots=True)
class Job:
    """A command, and the instances of it that run together."""

    command: tuple[str, ...]
    instances: int
    replicas: int
    devices_per_replica: int = 1
    hosts: tuple[str, ...] = ()
    """Empty for this machine, without ssh."""
    environment: Mapping[str, str] | None = None
    """More variables for all instances."""
    timeout: int = TIMEOUT_SECONDS
    max_restarts: int = 0
    only_output_from: int | None = None

    def __post_init__(self) -> None:
        check_division(self.instances, self.replicas, self.devices_per_replica)
        if len(self.hosts) > self.instances:
            raise ValueError(
                f"There are {len(self.hosts)} hosts for {self.instances} instances. Use {len(self.hosts)} instances or "
                "more, or fewer hosts."
            )
        odd = next((host for host in self.hosts if not host or host.startswith("-") or host.split() != [host]), None)
        if odd is not None:
            raise ValueError(f"{odd!r} is not the name of a host. Separate names with commas: --host a,b")
        if self.only_output_from is not None and not 0 <= self.only_output_from < self.instances:
            raise ValueError(
                f"There is no instance {self.only_output_from} to show the output of. The instances are 0 to "
                f"{self.instances - 1}."
            )

    def instance(self, index: int, coordinator: str, restarts: int) -> Instance:
        """What one of the processes is told."""
        local = index - next(i for i in range(index + 1) if self.host(i) == self.host(index))
        shape = self.instances, self.replicas, self.devices_per_replica
        return Instance(index, *shape, coordinator, self.timeout, restarts, local)

    def host(self, index: int) -> str | None:
        """Where an instance runs. Each host has a contiguous block of instances, and blocks differ by one at most."""
        return self.hosts[index * len(self.hosts) // self.instances] if self.hosts else None


def name(job: Job, index: int) -> str:
    """An instance in messages."""
    host = job.host(index)
    return f"instance {index}" if host is None else f"instance {index} on host {host}"


def command_line(words: Sequence[str]) -> tuple[str, ...]:
    """What to run for the words that a user gives: a script, `-m` and a module, or any other command."""
    if words[0] == "-m" or words[0].endswith(".py"):
        return (sys.executable, *words)
    return tuple(words)


def environment(job: Job, instance: Instance) -> dict[str, str]:
    """The variables that an instance gets in addition to those of the launcher.

    Sets are to have the same order in all instances, because all of them have to trace the same program.
    """
    order = os.environ.get("PYTHONHASHSEED", "0")
    own = {"PYTHONUNBUFFERED": "1", "PYTHONHASHSEED": order, **(job.environment or {})}
    return own | instance.to_environment()


def kept(job: Job, instance: Instance) -> tuple[list[str], dict[str, str]]:
    """The command line and the environment that start an instance with its keeper, here or through ssh."""
    more = environment(job, instance)
    words = [*_script("keeper.py"), *job.command]
    host = job.host(instance.index)
    if host is None:
        return words, {**os.environ, **more}
    travels = {key: value for key, value in os.environ.items() if key in _TRAVELS or key.startswith(_TRAVEL)}
    return on_host(host, words, {**travels, **more}), dict(os.environ)


def port_holder(host: str) -> list[str]:
    """The command line that holds a port of another host."""
    return on_host(host, _script("ports.py"), {})


def on_host(host: str, words: Sequence[str], variables: Mapping[str, str]) -> list[str]:
    """The command line that runs words in this folder of another host."""
    settings = [f"{key}={value}" for key, value in variables.items()]
    return [*_SSH, host, f"cd {shlex.quote(str(Path.cwd()))} && exec {shlex.join(['env', *settings, *words])}"]


def address(host: str | None, port: int) -> str:
    """A port of a host, as other hosts reach it."""
    if host is None:
        return f"127.0.0.1:{port}"
    name = host.rpartition("@")[2]
    return f"[{name}]:{port}" if ":" in name else f"{name}:{port}"


def _script(file: str) -> list[str]:
    # Isolated and without site-packages: these scripts start in 20 ms, and the user's PYTHONPATH is not for them.
    return [sys.executable, "-I", "-S", str(_HERE / file)]
