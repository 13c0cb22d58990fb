"""Small helpers that scripts know as `ipu.utils`, and the names of `ipu.config` that the original has here too."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

from openipu import _validate as validate
from openipu._unavailable import unavailable
from openipu.config import (
    DeviceConnectionType,
    ExecutionProfileType,
    IPUConfig,
    MergeRemoteBuffersBehaviour,
    SchedulingAlgorithm,
    SelectionOrder,
    StochasticRoundingBehaviour,
    configure_ipu_system,
    get_ipu_config,
    reset_ipu_configuration,
    running_on_ipu_model,
)

__all__ = [
    "DeviceConnectionType",
    "ExecutionProfileType",
    "IPUConfig",
    "MergeRemoteBuffersBehaviour",
    "SchedulingAlgorithm",
    "SelectionOrder",
    "StochasticRoundingBehaviour",
    "auto_select_ipus",
    "configure_ipu_system",
    "create_ipu_config",
    "get_ipu_config",
    "get_num_of_ipus_in_device",
    "move_variable_initialization_to_cpu",
    "reset_ipu_configuration",
    "reset_ipu_seed",
    "running_on_ipu_model",
    "select_ipus",
    "set_recomputation_options",
    "use_synthetic_data_for",
]


def get_num_of_ipus_in_device(ipu_device: str = "/device:IPU:0", device: str = "cpu") -> int:
    """The number of devices in a system. `device` is the host, where the original keeps its configuration.

    >>> ipu.utils.get_num_of_ipus_in_device("/device:IPU:0")
    2
    """
    from openipu.engine.devices import systems
    from openipu.engine.devices.current_system import ordinal_of

    del device
    return len(systems.system(ordinal_of(ipu_device)).devices)


def reset_ipu_seed(
    seed: int,
    device: str = "/device:IPU:0",
    cpu_device: str = "cpu",
    experimental_identical_replicas: bool = False,
) -> None:
    """Restart all random sequences: initial weights and dropout of layers created from now on, shuffling, NumPy.

    Existing layers are not affected: their random sequences are part of the model's state.

    >>> ipu.utils.reset_ipu_seed(42)
    >>> first = keras.layers.Dense(1, name="first")(x)
    >>> ipu.utils.reset_ipu_seed(42)
    >>> bool((keras.layers.Dense(1, name="second")(x) == first).all())
    True

    Args:
        seed: A whole number.
        device: The name of a system. It makes no difference: random sequences belong to models, not to systems.
        cpu_device: Ignored.
        experimental_identical_replicas: Has no effect: random numbers belong to samples, so replicas draw different
            numbers for different samples.
    """
    from openipu.engine.devices.current_system import ordinal_of

    import keras

    del cpu_device
    ordinal_of(device)
    seed = validate.count("seed", seed, least=None)
    if validate.flag("experimental_identical_replicas", experimental_identical_replicas):
        validate.no_effect({"experimental_identical_replicas": "random numbers belong to samples, not to replicas"})
    keras.utils.set_random_seed(seed % 2**32)


def move_variable_initialization_to_cpu(graph: object | None = None) -> None:
    """Does nothing: variables are always initialised on the host.

    >>> ipu.utils.move_variable_initialization_to_cpu()
    """
    if graph is not None:
        raise ValueError("There are no graphs here. Call this without arguments, or not at all.")


def use_synthetic_data_for(synthetic_data_category: object) -> bool:
    """False: data always comes from the given dataset.

    >>> ipu.utils.use_synthetic_data_for("infeed")
    False

    Args:
        synthetic_data_category: What the data is for, such as "infeed".
    """
    del synthetic_data_category
    return False


# --- configuration from before `IPUConfig` ----------------------------------------------------------------------------

_OLD = {
    "always_rearrange_copies_on_the_host": "experimental.always_rearrange_copies_on_the_host",
    "merge_infeed_io_copies": "optimizations.merge_infeed_io_copies",
    "disable_graph_outlining": "optimizations.enable_graph_outlining",
    "max_scheduler_lookahead_depth": "scheduling.maximum_scheduler_lookahead_depth",
    "max_scheduler_search_space_size": "scheduling.maximum_scheduler_search_space_size",
    "prefetch_data_streams": "optimizations.prefetch_data_streams",
    "selection_order": "selection_order",
}
"""Arguments of `create_ipu_config` that are now options of `IPUConfig`."""
_REPORTS = (
    "profiling", "enable_ipu_events", "use_poplar_text_report", "use_poplar_cbor_report", "profile_execution",
    "enable_poplar_serialized_graph", "report_every_nth_execution", "max_report_size", "report_directory",
    "scheduler_selection", "disable_graph_convolution_caching", "enable_experimental_remote_buffer_embedding",
)  # fmt: skip
"""Arguments for the original compiler and its reports."""


def create_ipu_config(**options: Any) -> IPUConfig:
    """An `IPUConfig` from the arguments of its predecessor.

    Arguments that `IPUConfig` has as options set them; those for the original compiler and its reports have no effect.

    >>> config = ipu.utils.create_ipu_config(prefetch_data_streams=True)
    >>> config.optimizations.prefetch_data_streams
    True
    """
    unknown = sorted(set(options) - {*_OLD, *_REPORTS})
    if unknown:
        raise TypeError(f"create_ipu_config has no arguments {unknown}. Use the options of `IPUConfig`.")
    config = IPUConfig()
    for name, value in options.items():
        if name in _OLD and value is not None:
            _set(config, _OLD[name], not value if name == "disable_graph_outlining" else value)
    ignored = [name for name in _REPORTS if options.get(name)]
    validate.no_effect({f"create_ipu_config({name}=)": "it is for the original compiler" for name in ignored})
    return config


def auto_select_ipus(opts: IPUConfig, num_ipus: int | Sequence[int]) -> IPUConfig:
    """A copy of the configuration that uses `num_ipus` devices.

    >>> ipu.utils.auto_select_ipus(ipu.config.IPUConfig(), 4).auto_select_ipus
    4
    """
    return _with(opts, "auto_select_ipus", num_ipus)


def select_ipus(opts: IPUConfig, indices: int | Sequence[int]) -> IPUConfig:
    """A copy of the configuration that uses these devices.

    >>> ipu.utils.select_ipus(ipu.config.IPUConfig(), 1).select_ipus
    1
    """
    return _with(opts, "select_ipus", indices)


def set_recomputation_options(opts: IPUConfig, allow_recompute: bool = True) -> IPUConfig:
    """A copy of the configuration that recomputes activations in the backward pass instead of keeping them.

    >>> ipu.utils.set_recomputation_options(ipu.config.IPUConfig()).allow_recompute
    True
    """
    return _with(opts, "allow_recompute", allow_recompute)


def _with(config: IPUConfig, name: str, value: object) -> IPUConfig:
    changed = copy.deepcopy(config)
    _set(changed, name, value)
    return changed


def _set(config: object, path: str, value: object) -> None:
    *parents, name = path.split(".")
    for parent in parents:
        config = getattr(config, parent)
    setattr(config, name, value)


def __getattr__(name: str) -> Any:
    return unavailable("utils", name)
