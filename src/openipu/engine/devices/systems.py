"""Configuration -> XLA devices.

This module decides which devices a program may use, makes virtual CPU devices, and handles reconfiguration. What
options mean is decided in `openipu.settings`; meshes and replicas are in replicas.py.

    used = system()               # the first system; system(1) is "/device:IPU:1"
    used.devices                  # (jax.Device, ...)
    used.generation               # a compiled program is valid while this number stays the same
    used.settings                 # the frozen configuration: allow_recompute, dump_folder, ...
    dict(used.compiler_options)   # for jax.jit(...).lower(...).compile(compiler_options=...)

[Note: virtual CPU devices]
XLA:CPU runs all its devices on one pool of max(cores, devices) threads, and a device that waits in a collective blocks
one of them. So no more devices are made than are used. Spare devices look useful, because their threads could keep the
cores busy while other devices wait, but each parallel operation wakes them for nothing: on 2 cores, an update of an MLP
on 2 replicas takes 495 us of processor time in a pool of 2 threads, 620 us with 3 threads and 680 us with 4.

Two kinds of programs need spare threads. A pipeline asks for them (`reserve`): while one stage works and the others
wait for it, its matrix products would have a single thread (a Sequential schedule on 2 cores takes 180 instead of
100 ms). A program that calls Python in the user's code is refused: all threads could end up waiting in such calls, with
none left to fetch the arguments (feeds take another way, see host_io/host_call.py).

The number of devices is fixed when JAX starts. If more are needed later, the CPU client is discarded and made again
(`jax.extend.backend.clear_backends`, which is public). What was made before keeps working on the old client, which
lives as long as its arrays: arrays, random keys, compiled functions, meshes, Keras models in the middle of training.
JAX moves old arrays to new devices by itself, with one exception: an array *committed* to an old device (by
`device_put` or a sharding) cannot be used together with one committed to a new device until it has been `device_put`
there. Keras does not commit its variables; the engine must `device_put` its own state when the generation changes. All
of JAX's compiled functions are dropped, but the cache on disk makes up for most of that. A second CPU client beside the
first would avoid it, but making one takes private API of jaxlib. Measured with JAX 0.10.2 and 0.11.0 on 2 cores.
"""

from __future__ import annotations

import contextlib
import os
import re
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from openipu import _validate as validate
from openipu.settings.enums import DeviceConnectionType, SelectionOrder
from openipu.settings.frozen import Settings, freeze, without_effect
from openipu.settings.option_table import OPTIONS
from openipu.settings.tree import OptionTree

import jax
import jax.extend.backend
from jax.experimental import io_callback

from . import group, program_cache
from .running import calls, changing, check_not_forked, refuse_new_devices

MAX_VIRTUAL_DEVICES: Final = 1024

_jax: Any = jax  # parts of its public API carry no annotations
_lock = changing
_settings: Settings | None = None
_systems: tuple[System, ...] | None = None
_generation = 0
_spare = 0


@dataclass(frozen=True, slots=True)
class System:
    """The devices that one strategy may use, and how programs are compiled for them."""

    devices: tuple[jax.Device, ...]
    platform: str
    generation: int
    settings: Settings
    compiler_options: tuple[tuple[str, str], ...] = ()
    ordinal: int = 0
    own_data: bool = False
    """Whether each process reads its own part of the data."""
    average: bool = False
    """Whether gradients are averaged over replicas, whatever the optimizer asks for."""

    def of_this_process(self) -> System:
        """The devices of this system that belong to this process."""
        own = tuple(device for device in self.devices if device.process_index == jax.process_index())
        return replace(self, devices=own, own_data=False)

    def of_all_processes(self, own_data: bool) -> System:
        """The devices of this system and those in the same places in all other processes."""
        if group.count() == 1:
            return replace(self, average=True)
        position = {device: i for i, device in enumerate(_of_process(jax.process_index(), self.platform))}
        places = [position[device] for device in self.devices]
        devices = [_of_process(index, self.platform)[place] for index in range(group.count()) for place in places]
        return replace(self, devices=tuple(devices), own_data=own_data, average=True)


def system(ordinal: int = 0) -> System:
    """The system behind "/device:IPU:<ordinal>". Attaches the devices if that has not happened yet."""
    systems = attach()
    if not 0 <= ordinal < len(systems):
        there = validate.counted(len(systems), "system")
        raise ValueError(
            f'"/device:IPU:{ordinal}" does not exist: the configuration has {there}, numbered from 0. Give '
            "`auto_select_ipus` a list with one number of devices per system, e.g. [2, 4]."
        )
    return systems[ordinal]


def _of_process(index: int, platform: str) -> list[jax.Device]:
    """The devices of one process of the group, in order."""
    return [device for device in _jax.devices(platform) if device.process_index == index]


def generation() -> int:
    """A number that changes with every reconfiguration."""
    return _generation


def configured() -> Settings | None:
    """The active configuration; None if nothing was configured."""
    return _settings


def configure(settings: Settings | None) -> None:
    """Make `settings` the active configuration, or None for none. Programs compiled under another one are dropped.

    If the devices are not available, this raises, and the previous configuration stays in force.
    """
    global _settings, _systems, _generation
    check_not_forked()
    with _lock:
        if settings == _settings:
            return
        refuse_new_devices()
        _check_processes(settings)
        _finish()
        attached = None
        if settings is not None and settings.connection is DeviceConnectionType.ALWAYS:
            attached = _attach(settings, _generation + 1)
        _settings, _systems, _generation = settings, attached, _generation + 1


def _check_processes(settings: Settings | None) -> None:
    """Raise if a configuration is for other instances than there are."""
    if settings is None or not settings.processes:
        return
    wanted, found = (settings.process, settings.processes), (group.index(), group.count())
    if wanted != found:
        raise ValueError(
            f"experimental.multi_replica_distribution says that this is instance {wanted[0]} of {wanted[1]}, but it is "
            f"instance {found[0]} of {found[1]}. Start the script with `openipu launch --num-instances {wanted[1]}`, "
            "and let `popdist.tensorflow.set_ipu_config` set these options, or leave them at 0."
        )


def attach() -> tuple[System, ...]:
    """The systems of the active configuration. Finds or makes their devices if that has not happened yet."""
    global _systems
    check_not_forked()
    attached = _systems
    if attached is not None:
        return attached
    with _lock:
        if _systems is None:
            _systems = _attach(_settings or _unconfigured(), _generation)
        return _systems


def _unconfigured() -> Settings:
    validate.no_effect(without_effect(OptionTree()))  # the environment may still set options
    return freeze(OptionTree())


def settle(devices: Sequence[jax.Device]) -> None:
    """Wait for the Python calls of programs that this thread has run, and forget their errors.

    Such an error was already raised where the program ran. But JAX also keeps it in the token of each device, and would
    raise it again whenever it waits for all effects: at a new configuration and when the process ends. Running another
    program with a Python call replaces the token.
    """
    try:
        _jax.effects_barrier()
    except (RuntimeError, ExceptionGroup):
        for device in devices:
            _jax.jit(lambda x: io_callback(lambda _: None, None, x))(_jax.device_put(0, device))
        _jax.effects_barrier()


def _finish() -> None:
    """Wait for running programs."""
    settle([device for system in _systems or () for device in system.devices])
    for platform in {system.platform for system in _systems or ()}:
        for array in _jax.live_arrays(platform):
            # A program that failed has already raised where it was run.
            with contextlib.suppress(RuntimeError):
                array.block_until_ready()


def _attach(settings: Settings, generation: int) -> tuple[System, ...]:
    program_cache.enable(settings.executable_cache)
    pool = _pool(settings.device_count, settings.on_cpu)
    options = _compiler_options(settings, pool[0])
    systems: list[System] = []
    start = 0
    for ordinal, request in enumerate(settings.requests):
        if isinstance(request, int):
            chosen = pool[start : start + request]
            start += request
        else:
            chosen = [pool[index] for index in request]
        devices = tuple(chosen[position] for position in layout(len(chosen), settings.order))
        systems.append(System(devices, devices[0].platform, generation, settings, options, ordinal))
    return tuple(systems)


def layout(count: int, order: SelectionOrder) -> list[int]:
    """The order in which `count` devices, arranged in two columns, are used."""
    positions = list(range(count))
    if order is SelectionOrder.SNAKE:
        return [p for row in range(0, count, 2) for p in positions[row : row + 2][:: -1 if row % 4 else 1]]
    if order is SelectionOrder.HOOF:
        return positions[::2] + positions[1::2][::-1]
    return positions


def _compiler_options(settings: Settings, device: jax.Device) -> tuple[tuple[str, str], ...]:
    """The XLA options for the platform of `device`, after checking that XLA accepts them."""
    implied = {OPTIONS[name].xla.get(device.platform): value for name, value in settings.by_platform}
    validate.no_effect({
        name: f"it has no meaning on platform {device.platform}"
        for name, _ in settings.by_platform
        if device.platform not in OPTIONS[name].xla
    })  # fmt: skip
    options = {name: value for name, value in implied.items() if name is not None} | dict(settings.compiler_options)
    if options:
        try:
            with jax.default_device(device):
                _jax.jit(lambda: 0).lower().compile(compiler_options=options)
        except jax.errors.JaxRuntimeError as error:
            raise ValueError(
                f"XLA does not accept the compiler options {options}: {str(error).splitlines()[0]}. "
                "Correct compilation_poplar_options or POPLAR_ENGINE_OPTIONS."
            ) from None
    return tuple(options.items())


def reserve() -> None:
    """Keep a spare thread per core for virtual CPU devices. What was compiled before is compiled once more.

    Nothing happens while other calls are running, whose devices would be replaced, nor in other threads than the main
    one: JAX crashes if it is restarted while any thread uses it, and a program with several threads may do that, even
    in plain Keras. A pipeline also runs without spare threads, but not as fast.
    """
    global _spare, _systems, _generation
    with _lock:
        used = sum(len(system.devices) for system in _systems or () if system.platform == "cpu")
        alone = threading.current_thread() is threading.main_thread() and len(calls()) <= 1
        if _spare or (used > 1 and not alone):
            return
        _spare = cores()
        if used > 1 and spare_threads(used) < _spare:
            _finish()
            _systems, _generation = None, _generation + 1


def cores() -> int:
    """The number of processor cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _pool(needed: int, on_cpu: bool) -> Sequence[jax.Device]:
    """At least `needed` devices; virtual ones if the platform is a CPU. See [Note: virtual CPU devices]."""
    virtual = needed + _spare if needed > 1 and cores() < needed + _spare else needed
    if 1 < needed <= MAX_VIRTUAL_DEVICES:
        with contextlib.suppress(RuntimeError):  # JAX has already started
            _jax.config.update("jax_num_cpu_devices", max(virtual, _cpu_devices_asked_for()))
    devices: Sequence[jax.Device] = _jax.local_devices(backend="cpu" if on_cpu else None)
    if len(devices) >= (virtual if devices[0].platform == "cpu" else needed):
        return devices
    if jax.default_backend() != "cpu":
        raise ValueError(
            f"{needed} devices are needed, but JAX has {len(devices)} of platform {devices[0].platform!r}, numbered "
            "from 0. Ask for fewer, or set the environment variable JAX_PLATFORMS=cpu to use virtual CPU devices."
        )
    if needed > MAX_VIRTUAL_DEVICES:
        raise ValueError(f"{needed} virtual CPU devices are needed. Ask for {MAX_VIRTUAL_DEVICES} or fewer.")
    if _jax.distributed.is_initialized():
        if len(devices) >= needed:
            return devices
        raise ValueError(
            f"{needed} devices are needed, but JAX has started with {len(devices)} and is part of a group of "
            "processes, so it cannot be restarted. Configure the devices before jax.distributed.initialize()."
        )
    return _start_again(virtual)


def _start_again(count: int) -> Sequence[jax.Device]:
    default = _jax.config.jax_default_device
    _jax.extend.backend.clear_backends()
    _jax.config.update("jax_num_cpu_devices", count)
    devices: Sequence[jax.Device] = _jax.local_devices()
    if isinstance(default, jax.Device):  # it would keep new arrays on the old client
        _jax.config.update("jax_default_device", devices[default.id])
    return devices


def spare_threads(used: int) -> int:
    """How many threads are left in the pool while `used` CPU devices run or wait."""
    return max(cores(), len(_jax.local_devices(backend="cpu"))) - used


def _cpu_devices_asked_for() -> int:
    """The number of CPU devices that the user has asked for, in any of the ways that JAX offers."""
    flag = re.search(r"--xla_force_host_platform_device_count=(\d+)", os.environ.get("XLA_FLAGS", ""))
    return max(int(flag[1]) if flag else 0, int(_jax.config.jax_num_cpu_devices))
