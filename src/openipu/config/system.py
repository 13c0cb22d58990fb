"""Making a configuration the one of the process, and taking it back."""

import copy
import threading

from openipu.config.environment import environment
from openipu.config.notices import logger, name_once
from openipu.config.settings import freeze, without_effect
from openipu.config.tree import IPUConfig

_active: IPUConfig | None = None
_lock = threading.RLock()


def configure_ipu_system(config: IPUConfig, device: str = "cpu", reset_configuration: bool = True) -> None:
    """Make `config` the configuration of this process.

    A configuration with the same meaning as the active one changes nothing. Any other waits for running programs, drops
    the compiled ones and takes over, with a warning; with `reset_configuration=False` it is refused instead. Models
    stay usable and compile again when they next run. `config` is not changed. `device` is the host, always a CPU.
    """
    global _active
    if not isinstance(config, IPUConfig):
        raise TypeError(f"configure_ipu_system takes an IPUConfig, not a value of type {type(config).__name__}.")
    _check_host(device)
    env = environment()
    settings = freeze(config, env)
    from openipu.engine import devices

    with _lock:
        previous = devices.configured()
        if not reset_configuration and previous not in (None, settings):
            raise ValueError(
                "Another configuration is active and reset_configuration is False. "
                "Call reset_ipu_configuration() first or leave reset_configuration at True."
            )
        name_once(without_effect(config, env))
        devices.configure(settings)
        _active = copy.deepcopy(config)
    if previous not in (None, settings):
        logger.warning("The configuration has changed: programs compiled so far are dropped and compiled again.")


def reset_ipu_configuration() -> None:
    """Forget the configuration: wait for running programs and drop the compiled ones. No-op when there is none."""
    global _active
    with _lock:
        if _active is not None:
            from openipu.engine import devices

            devices.configure(None)
            _active = None


def get_ipu_config(session: None = None) -> list[IPUConfig]:
    """Give a copy of the active configuration for each configured system; RuntimeError when there is none."""
    if session is not None:
        raise ValueError(f"session is {session!r}, but there are no sessions here. Call get_ipu_config() without it.")
    with _lock:
        if _active is None:
            raise RuntimeError("No IPU devices configured. Call configure_ipu_system() on an IPUConfig first.")
        from openipu.engine import devices

        active = devices.configured()
        return [copy.deepcopy(_active) for _ in (active.requests if active is not None else ())]


def _check_host(device: str) -> None:
    if type(device) is not str:
        raise TypeError(f"device is {device!r} of type {type(device).__name__}. It names the host: 'cpu'.")
    if "cpu" not in device.lower():
        raise ValueError(f"device is {device!r}, but it names the host, not what programs run on. Leave it at 'cpu'.")
