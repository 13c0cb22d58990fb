"""`IPUConfig` and what belongs to it: which devices to use, and how programs are compiled for them.

>>> config = IPUConfig()
>>> config.auto_select_ipus = 4
>>> config.configure_ipu_system()

The options, their rules and what they mean are in `openipu.settings`. Here a configuration becomes that of the process.
"""

import copy
import threading

from openipu import _validate as validate
from openipu._validate import logger
from openipu.settings.enums import (
    DeviceConnectionType,
    ExecutionProfileType,
    MergeRemoteBuffersBehaviour,
    SchedulingAlgorithm,
    SelectionOrder,
    StochasticRoundingBehaviour,
)
from openipu.settings.environment import environment, running_on_ipu_model
from openipu.settings.frozen import freeze, without_effect
from openipu.settings.option import Option
from openipu.settings.options import OPTIONS
from openipu.settings.tree import AttributeMetadata, OptionTree

__all__ = [
    "OPTIONS",
    "AttributeMetadata",
    "DeviceConnectionType",
    "ExecutionProfileType",
    "IPUConfig",
    "MergeRemoteBuffersBehaviour",
    "Option",
    "SchedulingAlgorithm",
    "SelectionOrder",
    "StochasticRoundingBehaviour",
    "configure_ipu_system",
    "get_ipu_config",
    "reset_ipu_configuration",
    "running_on_ipu_model",
]


class IPUConfig(OptionTree):
    """Which devices to use and how to compile for them; nothing happens before `configure_ipu_system()`.

    >>> config = IPUConfig()
    >>> config.auto_select_ipus = 4
    >>> config.optimizations.math.fast = True
    >>> config.configure_ipu_system()

    The object can be changed and used again; configuring never changes it. `openipu.config.OPTIONS` is the table of
    all options, and `docs/config.md` shows it.
    """

    __slots__ = ()

    def configure_ipu_system(self, device: str = "cpu") -> None:
        """Make this the configuration of the process; see `configure_ipu_system`."""
        configure_ipu_system(self, device)


_active: IPUConfig | None = None
_lock = threading.RLock()


def configure_ipu_system(config: IPUConfig, device: str = "cpu", reset_configuration: bool = True) -> None:
    """Make `config` the configuration of this process.

    A configuration with the same meaning as the active one changes nothing. Any other waits for running programs, drops
    the compiled ones and takes over, with a warning; with `reset_configuration=False` it is refused instead. Models
    stay usable and compile again when they next run. `config` is not changed. `device` is the host, always a CPU.
    """
    global _active
    validate.instance("config", config, IPUConfig)
    _check_host(device)
    reset = validate.flag("reset_configuration", reset_configuration)
    env = environment()
    settings = freeze(config, env)
    from openipu.engine.devices import systems

    with _lock:
        previous = systems.configured()
        if not reset and previous not in (None, settings):
            raise ValueError(
                "Another configuration is active and reset_configuration is False. "
                "Call reset_ipu_configuration() first or leave reset_configuration at True."
            )
        validate.no_effect(without_effect(config, env))
        systems.configure(settings)
        _active = copy.deepcopy(config)
    if previous not in (None, settings):
        logger.warning("The configuration has changed: programs compiled so far are dropped and compiled again.")


def reset_ipu_configuration() -> None:
    """Forget the configuration: wait for running programs and drop the compiled ones. No-op when there is none."""
    global _active
    with _lock:
        if _active is not None:
            from openipu.engine.devices import systems

            systems.configure(None)
            _active = None


def get_ipu_config(session: None = None) -> list[IPUConfig]:
    """Give a copy of the active configuration for each configured system; RuntimeError when there is none."""
    if session is not None:
        raise ValueError(f"session is {session!r}, but there are no sessions here. Call get_ipu_config() without it.")
    with _lock:
        if _active is None:
            raise RuntimeError("No IPU devices configured. Call configure_ipu_system() on an IPUConfig first.")
        from openipu.engine.devices import systems

        active = systems.configured()
        return [copy.deepcopy(_active) for _ in (active.requests if active is not None else ())]


def _check_host(device: str) -> None:
    if type(device) is not str:
        raise TypeError(f"device is {device!r} of type {type(device).__name__}. It names the host: 'cpu'.")
    if "cpu" not in device.lower():
        raise ValueError(f"device is {device!r}, but it names the host, not what programs run on. Leave it at 'cpu'.")
