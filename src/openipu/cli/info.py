"""`openipu info`: versions, devices, options and folders."""

import os
import platform
from importlib import metadata
from typing import TYPE_CHECKING, Final

import openipu

from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from openipu.settings.cache_folder import Cache

_REQUIRED: Final = ("keras", "jax", "jaxlib", "numpy", "orbax-checkpoint")
_OPTIONAL: Final = ("grain", "tensorflow", "torch")
_PREFIXES: Final = ("OPENIPU_", "KERAS_", "JAX_", "XLA_", "TF_POPLAR_", "POPLAR_", "CUDA_VISIBLE")


def run(console: Console | None = None) -> None:
    """Print a table of everything that decides how a program runs on this machine."""
    console = console or Console()
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for section in (versions(), machine(), options(), environment()):
        for name, value in section.items():
            table.add_row(name, value)
        table.add_section()
    console.print(table)


def versions() -> dict[str, str]:
    """The installed versions. Packages are looked up, not loaded."""
    found = {"OpenIPU": openipu.__version__, "Python": platform.python_version()}
    for name in _REQUIRED + _OPTIONAL:
        found[name] = _version(name)
    return found


def _version(name: str) -> str:
    for distribution in (name, f"{name}-cpu"):
        try:
            return metadata.version(distribution)
        except metadata.PackageNotFoundError:
            continue
    return "not installed" + (" (optional)" if name in _OPTIONAL else "")


def machine() -> dict[str, str]:
    """The devices that programs can run on."""
    import jax
    import keras

    devices = jax.devices()
    kinds = ", ".join(dict.fromkeys(device.device_kind for device in devices))
    return {
        "system": f"{platform.system()} {platform.machine()}",
        "Keras backend": keras.config.backend(),
        "devices": f"{len(devices)} x {devices[0].platform} ({kinds})",
        "CPU cores": str(usable_cores()),
    }


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
    found = {
        "IPUConfig": f"{len(config.OPTIONS)} options, {effective} take effect (list: python -m openipu.settings)",
        "cache folder": _describe(choose(asked().executable_cache)),
    }
    return found | {f"{name} has no effect": why for name, why in asked().without_effect.items()}


def _describe(cache: "Cache | None") -> str:
    if cache is None:
        return "off"
    used = sum(path.stat().st_size for path in cache.folder.glob("**/*") if path.is_file())
    limit = f"at most {cache.max_bytes >> 20} MiB" if cache.max_bytes >= 0 else "unlimited"
    return f"{cache.folder} ({used >> 20} MiB, {limit})"


def environment() -> dict[str, str]:
    """The environment variables that are set and change how programs run."""
    return {name: value for name, value in sorted(os.environ.items()) if name.startswith(_PREFIXES)}
