"""Configuration -> XLA devices.

Responsible for: which devices a program may use, virtual CPU devices, reconfiguration.
Not responsible for: what options mean (`openipu.config`), meshes and replicas (`plan.py`).

    system = current_system()       # or system(1) for "/device:IPU:1"
    system.devices                  # (jax.Device, ...)
    system.generation               # a compiled program is valid while this number stays the same
    system.settings                 # the frozen configuration: allow_recompute, dump_folder, ...
    dict(system.compiler_options)   # for jax.jit(...).lower(...).compile(compiler_options=...)
"""

import contextlib
import os
import re
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from openipu.config.enums import SelectionOrder
from openipu.config.settings import Settings

import jax
import jax.extend.backend

_lock = threading.RLock()
_settings: Settings | None = None
_systems: tuple["System", ...] | None = None
_generation = 0
_on_reset: list[Callable[[], None]] = []


@dataclass(frozen=True, slots=True)
class System:
    """The devices that one strategy may use, and how programs are compiled for them."""

    devices: tuple[jax.Device, ...]
    platform: str
    generation: int
    settings: Settings
    compiler_options: tuple[tuple[str, str], ...] = ()
    ordinal: int = 0


def current_system() -> System:
    """Give the first system. A process that never configured anything gets the default device."""
    return system(0)


def system(ordinal: int = 0) -> System:
    """Give the system behind "/device:IPU:<ordinal>", attaching the devices if that has not happened yet."""
    systems = attach()
    if not 0 <= ordinal < len(systems):
        raise ValueError(
            f'"/device:IPU:{ordinal}" does not exist: {len(systems)} system(s) are configured, numbered from 0. '
            "Give auto_select_ipus a list with one number of devices per system, e.g. [2, 4]."
        )
    return systems[ordinal]


def generation() -> int:
    """Give the number that changes with every reconfiguration."""
    return _generation


def on_reset(callback: Callable[[], None]) -> None:
    """Have `callback` called whenever the configuration is about to change, to finish work and drop programs."""
    _on_reset.append(callback)


def configured() -> Settings | None:
    """Give the active configuration, None when nothing was configured."""
    return _settings


def configure(settings: Settings) -> None:
    """Make `settings` the active configuration; programs compiled under another one are dropped."""
    global _settings
    with _lock:
        if settings == _settings:
            return
        _reset()
        _settings = settings


def unconfigure() -> None:
    """Forget the active configuration. Does nothing when there is none."""
    global _settings
    with _lock:
        if _settings is not None:
            _reset()
            _settings = None


def attach() -> tuple[System, ...]:
    """Find, or make, the devices of the active configuration."""
    global _systems
    with _lock:
        if _systems is None:
            _systems = _attach(_settings or Settings(), _generation)
        return _systems


def _reset() -> None:
    global _systems, _generation
    if _systems is not None:
        for array in jax.live_arrays():
            # A program that failed has said so to whoever ran it.
            with contextlib.suppress(RuntimeError):
                array.block_until_ready()
    for callback in tuple(_on_reset):
        callback()
    _systems = None
    _generation += 1


def _attach(settings: Settings, generation: int) -> tuple[System, ...]:
    pool = _pool(settings.device_count, settings.on_cpu)
    start, systems = 0, []
    for ordinal, request in enumerate(settings.requests):
        if isinstance(request, int):
            chosen = pool[start : start + request]
            start += request
        else:
            chosen = [pool[index] for index in request]
        devices = tuple(chosen[position] for position in layout(len(chosen), settings.order))
        systems.append(System(devices, devices[0].platform, generation, settings, settings.compiler_options, ordinal))
    return tuple(systems)


def layout(count: int, order: SelectionOrder) -> list[int]:
    """Give the order in which `count` devices standing in two columns are used."""
    positions = list(range(count))
    if order is SelectionOrder.SNAKE:
        return [p for row in range(0, count, 2) for p in positions[row : row + 2][:: -1 if row % 4 else 1]]
    if order is SelectionOrder.HOOF:
        return positions[::2] + positions[1::2][::-1]
    return positions


def _pool(needed: int, on_cpu: bool) -> Sequence[jax.Device]:
    """Give at least `needed` devices."""
    if needed > 1:
        with contextlib.suppress(RuntimeError):  # JAX is in use already
            jax.config.update("jax_num_cpu_devices", max(needed + _cores(), _asked_for()))
    devices = jax.local_devices(backend="cpu" if on_cpu else None)
    if len(devices) >= needed:
        return devices
    if jax.default_backend() != "cpu":
        raise ValueError(
            f"{needed} devices are asked for, but JAX has {len(devices)} of platform {devices[0].platform!r}. Ask for "
            f"{len(devices)} or fewer, or set the environment variable JAX_PLATFORMS=cpu to use virtual CPU devices."
        )
    jax.extend.backend.clear_backends()
    jax.config.update("jax_num_cpu_devices", needed + _cores())
    return jax.local_devices()


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _asked_for() -> int:
    """The number of CPU devices that the user has set already."""
    flag = re.search(r"--xla_force_host_platform_device_count=(\d+)", os.environ.get("XLA_FLAGS", ""))
    return max(int(flag[1]) if flag else 0, int(jax.config.jax_num_cpu_devices))
