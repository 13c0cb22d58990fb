"""The rules that a configuration must follow, checked when it is applied."""

from pathlib import Path
from typing import Final

from . import cache_folder
from .enums import DeviceConnectionType
from .environment import Environment
from .option_table import OPTIONS
from .tree import OptionTree

_VERSIONS: Final = ("ipu1", "ipu2", "ipu21")

Selection = int | list[int] | tuple[int, ...]


def check(config: OptionTree, environment: Environment) -> None:
    """Raise ValueError for the first broken rule, with the numbers and the remedy."""
    _check_values(config)
    _check_selection(config, environment)
    _check_connection(config, environment)
    _check_distribution(config, environment)
    _check_io_tiles(config)
    _check_simulator(config, environment)
    _check_folder(config)


def _check_values(config: OptionTree) -> None:
    for name, option in OPTIONS.items():
        value = config._values[name]
        option.check_type(value)  # again, because a list or dict may have been changed in place
        if option.minimum is not None and value < option.minimum:
            raise ValueError(
                f"{name} is {value}, but it must be at least {option.minimum}. The default is {option.default}."
            )


def _check_selection(config: OptionTree, environment: Environment) -> None:
    counts, systems = as_list(config.auto_select_ipus), as_list(config.select_ipus)
    if counts and systems:
        raise ValueError(
            f"auto_select_ipus is {config.auto_select_ipus} and select_ipus is {config.select_ipus}, but only one of "
            "them can be set. Set auto_select_ipus to the number of devices, or select_ipus to their indices."
        )
    for count in counts:
        if count < 1:
            raise ValueError(f"`auto_select_ipus` asks for {count} devices. Ask for at least 1 per system.")
    indices = [index for system in systems for index in as_list(system)]
    if len(set(indices)) < len(indices):
        raise ValueError(
            f"All indices in select_ipus must be unique, but it is {config.select_ipus}. Name each device once."
        )
    for index in indices:
        if index < 0:
            raise ValueError(f"select_ipus names device {index}. Devices are numbered from 0.")
    if any(as_list(system) == [] for system in systems):
        raise ValueError(
            f"select_ipus is {config.select_ipus}, where one system has no devices. Name at least one for each system."
        )
    if indices and environment.use_ipu_model:
        raise ValueError(
            f"select_ipus is {config.select_ipus}, but --use_ipu_model in TF_POPLAR_FLAGS runs programs on virtual "
            "devices, which are all alike. Use auto_select_ipus."
        )


def _check_connection(config: OptionTree, environment: Environment) -> None:
    connection, version = config.device_connection.type, config.device_connection.version
    if version and version not in _VERSIONS:
        raise ValueError(f"device_connection.version is {version!r}. Use one of {', '.join(_VERSIONS)}.")
    if connection in (DeviceConnectionType.PRE_COMPILE, DeviceConnectionType.NEVER) and not version:
        raise ValueError(
            f"device_connection.type is {connection.name}, which compiles without a device, but "
            f"device_connection.version is not set. Set it to one of {', '.join(_VERSIONS)}."
        )
    if connection is DeviceConnectionType.PRE_COMPILE and cache_folder.choose(environment.executable_cache) is None:
        raise ValueError(
            "device_connection.type is PRE_COMPILE, but the executable cache is off, so nothing would be kept. "
            "Set TF_POPLAR_FLAGS=--executable_cache_path=FOLDER, or unset OPENIPU_CACHE."
        )


def _check_distribution(config: OptionTree, environment: Environment) -> None:
    name = "experimental.multi_replica_distribution"
    count, index = config._values[f"{name}.process_count"], config._values[f"{name}.process_index"]
    if count and environment.use_ipu_model:
        raise ValueError(f"{name}.process_count is {count}, but --use_ipu_model runs a single process. Set it to 0.")
    if index >= max(count, 1):
        raise ValueError(
            f"{name}.process_index is {index}, but there are {count} processes. It must be less than process_count."
        )


def _check_io_tiles(config: OptionTree) -> None:
    tiles, part = config.io_tiles.num_io_tiles, config.io_tiles.available_memory_proportion
    if config.io_tiles.place_ops_on_io_tiles and tiles == 0:
        raise ValueError(
            "io_tiles.place_ops_on_io_tiles is True, but io_tiles.num_io_tiles is 0. Set a number of tiles."
        )
    if not 0 < part <= 1:
        raise ValueError(f"io_tiles.available_memory_proportion is {part}. It must be above 0 and at most 1.")
    group = config.norms.experimental.distributed_batch_norm_replica_group_size
    if group > 1 and tiles:
        raise ValueError(
            f"norms.experimental.distributed_batch_norm_replica_group_size is {group} and io_tiles.num_io_tiles is "
            f"{tiles}, which cannot be combined. Set one of them to its default."
        )


def _check_simulator(config: OptionTree, environment: Environment) -> None:
    version = config.ipu_model.version
    if (version and version not in _VERSIONS) or (environment.use_ipu_model and not version):
        raise ValueError(f"ipu_model.version is {version!r}. Use one of {', '.join(_VERSIONS)}.")


def _check_folder(config: OptionTree) -> None:
    folder = config.serialization_output_folder
    if folder and Path(folder).expanduser().is_file():
        raise ValueError(f"serialization_output_folder is {folder!r}, which is a file. Name a folder.")


def as_list(selection: Selection) -> list[int]:
    """A selection as a list; an int stands for a list of one."""
    return [selection] if isinstance(selection, int) else list(selection)
