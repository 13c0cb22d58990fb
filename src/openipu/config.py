"""`IPUConfig`: which devices to use, and how to compile programs for them.

>>> config = ipu.config.IPUConfig()
>>> config.auto_select_ipus = 4
>>> config.configure_ipu_system()

The options, their rules and their meaning are in `openipu.settings`. This module applies a configuration to a process.
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
from openipu.settings.frozen import freeze, report_folder, without_effect
from openipu.settings.option import Option
from openipu.settings.option_table import OPTIONS
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
    """Which devices to use and how to compile for them. Nothing happens until `configure_ipu_system()` is called.

    >>> config = ipu.config.IPUConfig()
    >>> config.auto_select_ipus = 4
    >>> config.optimizations.math.fast = True
    >>> config.configure_ipu_system()

    You can change the object and use it again; configuring never changes it. `openipu.config.OPTIONS` lists all
    options, and so does `docs/config.md`.
    """

    __slots__ = ()

    def configure_ipu_system(self, device: str = "cpu") -> None:
        """Make this the configuration of the process; see `configure_ipu_system`."""
        configure_ipu_system(self, device)


_active: IPUConfig | None = None
_lock = threading.RLock()


def configure_ipu_system(config: IPUConfig, device: str = "cpu", reset_configuration: bool = True) -> None:
    """Make `config` the configuration of this process.

    Nothing changes if `config` means the same as the active configuration. Otherwise this waits for running programs,
    drops the compiled ones and logs a warning; with `reset_configuration=False` it raises an error instead. Models stay
    usable and are compiled again when they next run. `device` is the host, which is always a CPU.

    >>> config = ipu.config.IPUConfig()
    >>> config.auto_select_ipus = 4
    >>> ipu.config.configure_ipu_system(config)
    >>> ipu.utils.get_num_of_ipus_in_device()
    4
    """
    global _active
    validate.instance("config", config, IPUConfig)
    _check_host(device)
    reset = validate.flag("reset_configuration", reset_configuration)
    env = environment()
    settings = freeze(config, env)
    from openipu import reports
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
        if folder := report_folder(config, env):
            reports.start(folder)
        _active = copy.deepcopy(config)
    if previous not in (None, settings):
        logger.warning("The configuration has changed: all programs will be compiled again.")


def reset_ipu_configuration() -> None:
    """Forget the configuration: wait for running programs and drop the compiled ones. Does nothing if there is none.

    >>> ipu.config.reset_ipu_configuration()
    """
    global _active
    with _lock:
        if _active is not None:
            from openipu.engine.devices import systems

            systems.configure(None)
            _active = None


def get_ipu_config(session: None = None) -> list[IPUConfig]:
    """A copy of the active configuration for each configured system; RuntimeError if there is none.

    >>> ipu.config.get_ipu_config()[0].auto_select_ipus
    2
    """
    if session is not None:
        raise ValueError(
            f"session is {session!r}, but there are no sessions here. Call get_ipu_config() without arguments."
        )
    with _lock:
        if _active is None:
            raise RuntimeError("No IPU devices configured. Call configure_ipu_system() on an IPUConfig first.")
        from openipu.engine.devices import systems

        active = systems.configured()
        return [copy.deepcopy(_active) for _ in (active.requests if active is not None else ())]


def _check_host(device: str) -> None:
    if type(device) is not str:
        raise TypeError(f"device is {device!r}, but it names the host. Leave it at 'cpu'.")
    if "cpu" not in device.lower():
        raise ValueError(f"device is {device!r}, but it names the host, not the devices. Leave it at 'cpu'.")
