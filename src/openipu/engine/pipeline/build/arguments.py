"""What users say about a pipeline of plain functions, checked: the same for `pipeline` and for estimators."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from openipu._validate import name_once
from openipu.engine.core.accumulation import Accumulation, Reduction, check_divided, dtype_option

from openipu.engine.core.pipelining import PipelineSchedule, Pipelining, RecomputationMode, schedule_of
from openipu.engine.schedule.schedules import Schedule, check, check_devices

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
"""The arguments of `arguments`."""


@dataclass(frozen=True, slots=True)
class Arguments:
    """How functions run as a pipeline. Equal for calls that ask for the same."""

    stages: tuple[Callable[..., Any], ...]
    accumulation: Accumulation
    schedule: Schedule
    devices: tuple[int, ...]
    """The device of each stage, counted within a replica."""
    shard: bool
    """Whether each replica keeps its share of the optimizer's state."""
    marks_count: bool = False
    """Whether values marked by `recomputation_checkpoint` are kept where stages are computed again."""


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
) -> Arguments:
    """The checked form of the arguments that `pipelining_ops.pipeline` documents."""
    stages = _stages(computational_stages)
    for option, value in without_effect.items():
        if option.endswith("poplar_options") and value is not None:
            check_stage_options(option, value, len(stages))
    check_divided(replicated_optimizer_state_sharding, without_effect.get("offload_weight_update_variables"))
    name_once({option: WITHOUT_EFFECT[option] for option, value in without_effect.items() if value is not None})
    count = count_of("gradient_accumulation_count", gradient_accumulation_count)
    _check_fixed(batch_serialization_iterations, continuous_weight_updates, recomputation_mode)
    schedule = schedule_of(PipelineSchedule.Grouped if pipeline_schedule is None else pipeline_schedule)
    devices = _mapping(device_mapping, len(stages))
    overlap = getattr(schedule, "overlap", None)
    multiple = overlap(len(stages), devices, training) if overlap else 1
    check(len(stages), count, devices, multiple, type(schedule).__name__, "`gradient_accumulation_count`")
    method = Reduction.parse(reduction_method) if training else Reduction.SUM
    accumulation = Accumulation(count, method, dtype_option(gradient_accumulation_dtype, "gradient_accumulation_dtype"))
    mode = recomputation_mode or RecomputationMode.Auto
    marks_count = Pipelining(schedule, devices, mode).marks_count
    return Arguments(stages, accumulation, schedule, devices, bool(replicated_optimizer_state_sharding), marks_count)


def count_of(name: str, value: Any) -> int:
    """`value`, if it counts something."""
    if value is None:
        raise ValueError(f"`{name}` is not given. Say how many micro-batches one update takes.")
    if type(value) is not int or value < 1:
        raise ValueError(f"`{name}` is {value!r}, but it counts something: give a whole number of 1 or more.")
    return value


def check_function(name: str, value: Any, needed: bool = False) -> None:
    """Raise unless `value` is a function, or None where none is needed."""
    if needed and value is None:
        raise ValueError(f"`{name}` is not given, but this mode needs it. Give a function.")
    if value is not None and not callable(value):
        raise TypeError(f"`{name}` is a {type(value).__name__}. Give a function.")


def check_stage_options(name: str, value: Any, stages: int | None = None) -> None:
    """Raise unless these are options for each of the stages, or for the update of the weights."""
    from .stage_options import PipelineStageOptions  # late: it imports this

    listed = not name.startswith("weight_update")
    values = value if listed and isinstance(value, list | tuple) else [value]
    if (listed and not isinstance(value, list | tuple)) or not all(isinstance(v, PipelineStageOptions) for v in values):
        wanted = "a list of `PipelineStageOptions`, one per stage" if listed else "one `PipelineStageOptions`"
        raise TypeError(f"`{name}` is {value!r}. Give {wanted}.")
    if listed and stages is not None and len(values) != stages:
        raise ValueError(f"`{name}` has {len(values)} elements for {stages} stages. Give one for each stage.")


def _stages(value: Any) -> tuple[Callable[..., Any], ...]:
    if isinstance(value, list | tuple) and any(isinstance(stage, list | tuple) for stage in value):
        raise NotImplementedError(
            "A stage of `computational_stages` is a list of functions that are to run side by side. A stage is one "
            "function here: call them in it and return all of their outputs."
        )
    if not isinstance(value, list | tuple) or not all(map(callable, value)):
        raise TypeError(f"`computational_stages` is {value!r}. Give a list of functions.")
    if len(value) < 2:
        raise ValueError(f"A pipeline has at least 2 stages, but {len(value)} are given. Cut the model into more.")
    return tuple(value)


def _check_fixed(serialization: Any, continuous: Any, mode: Any) -> None:
    if serialization != 1:
        raise NotImplementedError(
            f"`batch_serialization_iterations` is {serialization!r}. Give 1, and smaller micro-batches instead."
        )
    if continuous:
        raise NotImplementedError("`continuous_weight_updates` is not available: weights change once per update.")
    if mode is not None and not isinstance(mode, RecomputationMode):
        raise TypeError(f"`recomputation_mode` is {mode!r}. Give a `RecomputationMode`.")


def _mapping(value: Any, stages: int) -> tuple[int, ...]:
    if value is None:
        return tuple(range(stages))
    if not isinstance(value, list | tuple):
        raise TypeError(f"`device_mapping` is {value!r}. Give a list with the device of each stage.")
    return check_devices(stages, value)
