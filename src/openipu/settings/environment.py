"""The environment variables of the original.

TF_POPLAR_FLAGS holds flags (`--name` or `--name=value`, separated by spaces), POPLAR_ENGINE_OPTIONS a JSON object of
strings. Flags that have no effect here are reported with the reason; flags that do not exist are errors.
"""

import difflib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from .cache_folder import expanded

_FEED: Final = "data always comes from the given dataset"
_DEVICE: Final = "XLA devices never have to be waited for"
_THREADS: Final = "XLA and the feeds choose their own threads"
_COMPILER: Final = "it is for the original compiler"

FLAGS: Final[dict[str, str | None]] = {
    "executable_cache_path": None,
    "use_ipu_model": None,
    "use_on_demand": None,
    "allow_nans": _COMPILER,
    "disable_poplar_version_check": _COMPILER,
    "dump_schedule_as_dot": _COMPILER,
    "enable_hlo_verifier": _COMPILER,
    "fallback_scheduler": _COMPILER,
    "help": "the flags are listed in the documentation",
    "ipu_model_tiles": "there is no simulator",
    "log_cycle_count": "XLA devices have no cycle counter to read",
    "max_compilation_threads": _THREADS,
    "max_infeed_threads": _THREADS,
    "null_data_feed": _FEED,
    "on_demand_device_poll_time": _DEVICE,
    "on_demand_device_timeout": _DEVICE,
    "save_vertex_graph": _COMPILER,
    "show_progress_bar": "XLA reports no progress while it compiles",
    "sync_replica_start": "the replicas of a program always start together",
    "synthetic_data_categories": _FEED,
    "synthetic_data_initializer": _FEED,
    "tensor_map_file_path": _COMPILER,
    "use_synthetic_data": _FEED,
    "while_loop_brute_force_max_trip_count": _COMPILER,
}
"""All flags: None if a flag takes effect, else the reason why it does not."""

_OTHER_VARIABLES: Final = {
    "POPLAR_RUNTIME_OPTIONS": _COMPILER,
    "POPLAR_TARGET_OPTIONS": _COMPILER,
    "TF_POPLAR_VLOG_LEVEL": "set the level of the Python logger 'openipu' instead",
}


@dataclass(frozen=True, slots=True)
class Environment:
    """What the environment asks for. `without_effect` holds settings that have no effect, and the reasons."""

    use_ipu_model: bool
    use_on_demand: bool
    executable_cache: Path | None
    engine_options: Mapping[str, str]
    without_effect: Mapping[str, str]


def environment() -> Environment:
    """Read the environment variables as they are now."""
    flags = _flags(os.environ.get("TF_POPLAR_FLAGS", ""))
    cache = flags.get("executable_cache_path")
    no_effect = {f"--{flag}": why for flag in flags if (why := FLAGS[flag]) is not None}
    no_effect |= {variable: why for variable, why in _OTHER_VARIABLES.items() if os.environ.get(variable)}
    return Environment(
        use_ipu_model=_truth("use_ipu_model", flags),
        use_on_demand=_truth("use_on_demand", flags),
        executable_cache=None if cache is None else expanded(cache, "--executable_cache_path"),
        engine_options=_engine_options(os.environ.get("POPLAR_ENGINE_OPTIONS", "")),
        without_effect=no_effect,
    )


def running_on_ipu_model() -> bool:
    """Whether TF_POPLAR_FLAGS asks for the simulator: programs then run on (virtual) CPU devices.

    >>> ipu.config.running_on_ipu_model()
    False
    """
    return environment().use_ipu_model


def with_executable_cache(flags: str, folder: str) -> str:
    """A value for TF_POPLAR_FLAGS: these flags, and --executable_cache_path."""
    if not folder or folder.split() != [folder]:
        raise ValueError(
            f"{folder!r} cannot be the folder of compiled programs, because flags are separated by spaces. Use a path "
            "without spaces."
        )
    others = [flag for flag in flags.split() if flag.partition("=")[0] != "--executable_cache_path"]
    return " ".join([*others, f"--executable_cache_path={folder}"])


def _flags(text: str) -> dict[str, str]:
    flags = {}
    for word in text.split():
        name, separator, value = word.removeprefix("--").partition("=")
        if not word.startswith("--") or name not in FLAGS:
            near = difflib.get_close_matches(name, FLAGS, n=1)
            hint = f"Did you mean '--{near[0]}'?" if near else f"The flags are: {', '.join(FLAGS)}."
            raise ValueError(f"{word!r} in TF_POPLAR_FLAGS is not a flag. {hint}")
        flags[name] = value if separator else "true"
        if name == "executable_cache_path" and not (separator and value):
            raise ValueError(
                f"{word!r} in TF_POPLAR_FLAGS does not name a folder. Write --executable_cache_path=FOLDER."
            )
    return flags


def _truth(flag: str, flags: Mapping[str, str]) -> bool:
    value = flags.get(flag, "false")
    if value.lower() not in ("true", "false", "1", "0"):
        raise ValueError(
            f"--{flag}={value} in TF_POPLAR_FLAGS is neither true nor false. Write --{flag} to turn it on."
        )
    return value.lower() in ("true", "1")


def _engine_options(text: str) -> dict[str, str]:
    if not text:
        return {}
    try:
        options = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"POPLAR_ENGINE_OPTIONS is not JSON: {error}. Write an object of strings.") from None
    if not isinstance(options, dict) or not all(isinstance(value, str) for value in options.values()):
        raise ValueError(
            f"POPLAR_ENGINE_OPTIONS must be a JSON object of strings, but is {text}. "
            'Write for example {"xla_cpu_enable_fast_math": "true"}.'
        )
    return options
