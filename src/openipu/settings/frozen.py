"""Settings: a checked, frozen configuration, as the engine sees it."""

from dataclasses import dataclass
from pathlib import Path

from . import cache_folder
from .enums import DeviceConnectionType, SelectionOrder
from .environment import Environment, environment
from .option_table import OPTIONS
from .rules import as_list, check
from .tree import OptionTree

_ALL, _DIRECTORY, _OUTPUT = "autoReport.all", "autoReport.directory", "autoReport.output"
"""Engine options that ask for a report, and where."""

Request = int | tuple[int, ...]
"""What one system asks for: a number of devices, or the devices with these indices."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What a configuration means here. Configurations that differ only in options without effect give equal settings.

    `requests` holds one entry per system: `devices.system(1)` gives the devices of the second.
    `compiler_options` are XLA options that the user sets by name. `by_platform` are options (name, value) that set an
    XLA option on some platforms only; `System.compiler_options` combines both for the platform that was found.
    """

    requests: tuple[Request, ...] = (1,)
    order: SelectionOrder = SelectionOrder.AUTO
    connection: DeviceConnectionType = DeviceConnectionType.ALWAYS
    on_cpu: bool = False
    allow_recompute: bool = False
    compiler_options: tuple[tuple[str, str], ...] = ()
    by_platform: tuple[tuple[str, str], ...] = ()
    dump_folder: Path | None = None
    executable_cache: cache_folder.Cache | None = None
    batch_norm_group: int = 1
    processes: int = 0
    """How many instances the configuration is for; 0 if it does not say."""
    process: int = 0

    @property
    def device_count(self) -> int:
        """How many devices all systems need together."""
        counts = [request for request in self.requests if isinstance(request, int)]
        indices = [index for request in self.requests if isinstance(request, tuple) for index in request]
        return max(sum(counts), 1 + max(indices, default=0))


def freeze(config: OptionTree, env: Environment | None = None) -> Settings:
    """Check `config` and return its meaning. Raise ValueError for the first rule that it breaks."""
    env = env or environment()
    check(config, env)
    connection = config.device_connection.type
    if connection is DeviceConnectionType.ALWAYS and env.use_on_demand:
        connection = DeviceConnectionType.ON_DEMAND
    folder = config.serialization_output_folder
    return Settings(
        requests=_requests(config),
        order=config.selection_order,
        connection=connection,
        on_cpu=env.use_ipu_model,
        allow_recompute=config.allow_recompute,
        compiler_options=tuple((name, _xla(value)) for name, value in _engine_options(config, env) if _is_xla(name)),
        by_platform=tuple((name, str(config._values[name])) for name in _changed(config) if OPTIONS[name].xla),
        dump_folder=Path(folder).expanduser() if folder else None,
        executable_cache=cache_folder.choose(env.executable_cache),
        batch_norm_group=config.norms.experimental.distributed_batch_norm_replica_group_size,
        processes=config.experimental.multi_replica_distribution.process_count,
        process=config.experimental.multi_replica_distribution.process_index,
    )


def without_effect(config: OptionTree, env: Environment | None = None) -> dict[str, str]:
    """What `config` and the environment set without effect on any hardware, and why."""
    env = env or environment()
    options = {name: why for name in _changed(config) if (why := OPTIONS[name].no_effect) is not None}
    poplar = {name: why for name, _ in _engine_options(config, env) if (why := _why(name)) is not None}
    return {**options, **poplar, **env.without_effect}


def report_folder(config: OptionTree, env: Environment | None = None) -> Path | None:
    """Where the engine options ask for a report; None if they ask for none."""
    options = dict(_engine_options(config, env or environment()))
    switches = [value for name, value in options.items() if name == _ALL or name.startswith(_OUTPUT)]
    asked = any(value.lower() == "true" for value in switches) if switches else _DIRECTORY in options
    return Path(options.get(_DIRECTORY) or ".").expanduser() if asked else None


def _why(option: str) -> str | None:
    """Why an engine option has no effect; None if it has one."""
    if _is_xla(option) or option in (_ALL, _DIRECTORY) or option.startswith(_OUTPUT):
        return None
    return "reports hold all that is known" if option.startswith("autoReport.") else "not an XLA option"


def _requests(config: OptionTree) -> tuple[Request, ...]:
    chosen = tuple(tuple(as_list(system)) for system in as_list(config.select_ipus))
    return chosen or tuple(as_list(config.auto_select_ipus)) or (1,)


def _changed(config: OptionTree) -> list[str]:
    return [name for name, option in OPTIONS.items() if config._values[name] != option.default]


def _engine_options(config: OptionTree, env: Environment) -> list[tuple[str, str]]:
    return sorted({**config.compilation_poplar_options, **env.engine_options}.items())


def _is_xla(name: str) -> bool:
    return name.startswith("xla_")


def _xla(value: str) -> str:
    """The value for XLA, which reads only "True" and "False"; options of the original are in lower case."""
    return value.capitalize() if value.lower() in ("true", "false") else value
