"""`openipu info`: versions, devices, options and folders.

It is what people run when something is wrong, so it must not fail for the reason that it is to report. Whatever cannot
be found out is a row that says why. Keras and JAX are asked in a process of their own: XLA ends a process whose
XLA_FLAGS it does not know.
"""

import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Final

import openipu

from rich.console import Console
from rich.table import Table
from rich.text import Text

from .terminal import make_console

if TYPE_CHECKING:
    from openipu.settings.cache_folder import Cache

_REQUIRED: Final = ("keras", "jax", "jaxlib", "numpy", "orbax-checkpoint")
_OPTIONAL: Final = ("grain", "libcst", "tensorflow", "torch")
_PREFIXES: Final = ("OPENIPU_", "KERAS_", "JAX_", "XLA_", "TF_POPLAR_", "POPLAR_", "CUDA_VISIBLE")
_PROBE_SECONDS: Final = 120
_PROBE: Final = """
import json
import openipu

def backend():
    import keras
    return keras.config.backend()

def devices():
    import jax
    found = jax.devices()
    kinds = ", ".join(dict.fromkeys(device.device_kind for device in found))
    return f"{len(found)} x {found[0].platform}" + (f" ({kinds})" if kinds != found[0].platform else "")

def answer(ask):
    try:
        return ask()
    except Exception as error:
        return f"problem: {type(error).__name__}: {error}"

print(json.dumps({"Keras backend": answer(backend), "devices": answer(devices)}))
"""
"""What the other process runs. The last line that it prints is a JSON object."""


def run(console: Console | None = None, as_json: bool = False) -> None:
    """Print everything that decides how a program runs on this machine: as a table, or as one JSON object."""
    console = console or make_console()
    rows = versions() | machine() | options() | environment()
    if as_json:
        console.print(Text(json.dumps(rows, indent=2)), soft_wrap=True)
        return
    longest = max(map(len, rows))
    if not console.is_terminal:
        for name, value in rows.items():
            console.print(Text(f"{name:<{longest}}  {value}".rstrip()), soft_wrap=True)
        return
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows.items():
        table.add_row(Text(name), Text(value))  # values may have square brackets
    console.print(table)


def versions() -> dict[str, str]:
    """The installed versions. Packages are looked up, not loaded."""
    found = {"OpenIPU": openipu.__version__, "Python": platform.python_version()}
    for name in _REQUIRED + _OPTIONAL:
        found[name] = _or_problem(partial(_version, name))
    return found


def _version(name: str) -> str:
    for distribution in (name, f"{name}-cpu"):
        try:
            return metadata.version(distribution)
        except metadata.PackageNotFoundError:
            continue
    return "not installed" + (" (optional)" if name in _OPTIONAL else "")


def _or_problem(ask: Callable[[], str]) -> str:
    """The answer to a question, or why there is none."""
    try:
        return ask()
    except Exception as error:
        return _problem(f"{type(error).__name__}: {error}")


def _problem(why: str) -> str:
    return f"problem: {' '.join(why.split())}"


def machine() -> dict[str, str]:
    """The devices that programs can run on."""
    return {
        "system": f"{platform.system()} {platform.machine()}",
        **_probe(),
        "CPU cores": _or_problem(lambda: str(usable_cores())),
    }


def _probe() -> dict[str, str]:
    """What Keras and JAX say in a process of their own."""
    try:
        result = subprocess.run(
            [sys.executable, "-c", _PROBE], stdin=subprocess.DEVNULL, capture_output=True, text=True,
            errors="replace", timeout=_PROBE_SECONDS, check=False,
        )  # fmt: skip
        if result.returncode == 0:
            answers: dict[str, str] = json.loads(result.stdout.splitlines()[-1])
            return answers
        lines = [line for line in result.stderr.splitlines() if line.strip()]
        # XLA's last words begin with the time and the place in its source.
        why = lines[-1].rpartition("] ")[2] if lines else f"the process ended with code {result.returncode}"
    except (OSError, ValueError, IndexError, subprocess.SubprocessError) as error:
        why = f"{type(error).__name__}: {error}"
    return {"Keras and JAX": _problem(why)}


def usable_cores() -> int:
    """The cores that this process may use, which can be fewer than the machine has."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def options() -> dict[str, str]:
    """The default configuration of a process, and where compiled programs are kept."""
    from openipu import config
    from openipu.settings.cache_folder import choose
    from openipu.settings.environment import environment as asked

    effective = sum(option.no_effect is None for option in config.OPTIONS.values())
    problems: dict[str, str] = {}
    try:
        env = asked()
        given, no_effect = env.executable_cache, env.without_effect
    except ValueError as error:
        given, no_effect = None, {}
        problems = {"environment": _problem(str(error))}
    return {
        "IPUConfig": f"{len(config.OPTIONS)} options, {effective} take effect (list: python -m openipu.settings)",
        "cache folder": _or_problem(lambda: _describe(choose(given))),
        **problems,
        **{f"{name} has no effect": why for name, why in no_effect.items()},
    }


def _describe(cache: "Cache | None") -> str:
    if cache is None:
        return "off"
    used = sum(path.stat().st_size for path in cache.folder.glob("*-cache"))
    limit = f"at most {cache.max_bytes >> 20} MiB" if cache.max_bytes >= 0 else "unlimited"
    unusable = _unusable(cache.folder)
    return f"{cache.folder} ({used >> 20} MiB, {limit})" + (f" {_problem(unusable)}" if unusable else "")


def _unusable(folder: Path) -> str | None:
    """Why nothing can be kept in a folder, which need not exist yet; None if it can."""
    from openipu.engine.devices.program_cache import is_private

    there = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    if not there.is_dir():
        return f"{there} is not a folder"
    if not os.access(there, os.W_OK | os.X_OK):
        return f"{there} cannot be written to"
    if there == folder.absolute() and not is_private(folder):
        return "others can write to it, so it is not used"
    return None


def environment() -> dict[str, str]:
    """The environment variables that are set and change how programs run."""
    return {name: value for name, value in sorted(os.environ.items()) if value and name.startswith(_PREFIXES)}
