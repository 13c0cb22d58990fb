"""The arguments of a pipeline of plain functions, checked: the same for `pipeline` and for estimators."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from openipu import _validate as validate
from openipu.engine.core.accumulation import Accumulation, Reduction, check_divided, dtype_option
from openipu.engine.core.pipelining import (
    PipelineSchedule,
    Pipelining,
    RecomputationMode,
    recomputation_mode_of,
    schedule_of,
)
from openipu.engine.core.updates import Updates

from .rules import check_micro_batches
from .stage_options import check_stage_options

UserFunctions = tuple[Callable[..., Any], ...]
"""The functions that a user gives as stages."""

WITHOUT_EFFECT = {
    "forward_propagation_stages_poplar_options": "XLA has no such options",
    "backward_propagation_stages_poplar_options": "XLA has no such options",
    "weight_update_poplar_options": "XLA has no such options",
    "offload_weight_update_variables": "each device keeps the state of its own stages",
    "offload_activations": "activations stay on their device; `allow_recompute` saves their memory",
    "offload_gradient_accumulation_buffers": "gradients stay on the device of their stage",
    "replicated_weight_sharding": "weights are on every replica",
    "offload_weights": "weights stay on the device of their stage",
}
OPTIONS = (
    "computational_stages",
    "gradient_accumulation_count",
    "gradient_accumulation_dtype",
    "batch_serialization_iterations",
    "device_mapping",
    "pipeline_schedule",
    "recomputation_mode",
    "replicated_optimizer_state_sharding",
    "continuous_weight_updates",
    "reduction_method",
    *WITHOUT_EFFECT,
)
"""The names that `arguments` takes besides `training`."""


def arguments(
    training: bool,
    computational_stages: Any,
    gradient_accumulation_count: Any,
    gradient_accumulation_dtype: Any = None,
    batch_serialization_iterations: int = 1,
    device_mapping: Any = None,
    pipeline_schedule: Any = None,
    recomputation_mode: Any = None,
    replicated_optimizer_state_sharding: bool = False,
    continuous_weight_updates: bool = False,
    reduction_method: Any = Reduction.SUM,
    **without_effect: Any,
) -> tuple[UserFunctions, Pipelining]:
    """The stages and how they run, from the arguments that `pipelining_ops.pipeline` documents."""
    stages = _stages(computational_stages)
    check_divided(replicated_optimizer_state_sharding, without_effect.get("offload_weight_update_variables"))
    _name_without_effect(without_effect, len(stages))
    _check_fixed(batch_serialization_iterations, continuous_weight_updates)
    accumulation = Accumulation(
        _micro_batches(gradient_accumulation_count),
        Reduction.parse(reduction_method) if training else Reduction.SUM,
        dtype_option(gradient_accumulation_dtype, "gradient_accumulation_dtype"),
    )
    pipelining = Pipelining(
        schedule_of(PipelineSchedule.Grouped if pipeline_schedule is None else pipeline_schedule),
        _mapping(device_mapping),
        recomputation_mode_of(RecomputationMode.Auto if recomputation_mode is None else recomputation_mode),
        updates=Updates(accumulation, bool(replicated_optimizer_state_sharding)),
    ).for_stages(len(stages), training)
    check_micro_batches(pipelining, "`gradient_accumulation_count`")
    return stages, pipelining


def check_function(name: str, value: Any, needed: bool = False) -> None:
    """Raise unless `value` is a function, or None where none is needed."""
    if needed and value is None:
        raise ValueError(f"`{name}` is not given, but this mode needs it. Give a function.")
    if value is not None and not callable(value):
        raise TypeError(f"`{name}` is a {type(value).__name__}. Give a function.")


def _micro_batches(value: Any) -> int:
    if value is None:
        raise ValueError("`gradient_accumulation_count` is not given. Say how many micro-batches one update takes.")
    count: int = validate.count("gradient_accumulation_count", value)
    return count


def _name_without_effect(given: dict[str, Any], stages: int) -> None:
    for option, value in given.items():
        if option.endswith("poplar_options") and value is not None:
            check_stage_options(option, value, stages)
    validate.no_effect({option: WITHOUT_EFFECT[option] for option, value in given.items() if value is not None})


def _stages(value: Any) -> UserFunctions:
    if isinstance(value, list | tuple) and any(isinstance(stage, list | tuple) for stage in value):
        raise NotImplementedError(
            "A stage of `computational_stages` is a list of functions to run side by side, but a stage is one function "
            "here. Give a function that calls them and returns all of their outputs."
        )
    if not isinstance(value, list | tuple) or not all(map(callable, value)):
        raise TypeError(f"`computational_stages` is {value!r}. Give a list of functions.")
    return tuple(value)


def _check_fixed(serialization: Any, continuous: Any) -> None:
    if serialization != 1:
        raise NotImplementedError(
            f"`batch_serialization_iterations` is {serialization!r}. Give 1, and smaller micro-batches instead."
        )
    if continuous:
        raise NotImplementedError("`continuous_weight_updates` is not available: weights change once per update.")


def _mapping(value: Any) -> tuple[int, ...] | None:
    if value is not None and not isinstance(value, list | tuple):
        raise TypeError(f"`device_mapping` is {value!r}. Give a list with the device of each stage.")
    return None if value is None else tuple(value)
