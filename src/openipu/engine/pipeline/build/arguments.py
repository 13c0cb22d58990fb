"""Checks the arguments of a pipeline of plain functions, for `pipelining_ops.pipeline` and for estimators."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from openipu import _validate as validate
from openipu.engine.core.accumulation import Accumulation, Reduction, check_divided, dtype_option
from openipu.engine.core.pipelining import PipelineSchedule, Pipelining, RecomputationMode, schedule_of
from openipu.engine.core.updates import Updates
from openipu.engine.schedule.schedules import Schedule

import keras
from jax.typing import DTypeLike

from .rules import check_micro_batches
from .stage_options import check_stage_options

UserFunctions = tuple[Callable[..., Any], ...]
"""The functions that a user passes as stages."""

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
SWITCHES = {name for name in WITHOUT_EFFECT if not name.endswith("poplar_options")}
"""Those of them that are True or False."""
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
"""The parameters of `arguments` besides `training`."""


def arguments(
    training: bool,
    computational_stages: Sequence[Callable[..., Any]],
    gradient_accumulation_count: int | None,
    gradient_accumulation_dtype: DTypeLike | Callable[[keras.Variable], DTypeLike | None] | None = None,
    batch_serialization_iterations: int = 1,
    device_mapping: Sequence[int] | None = None,
    pipeline_schedule: PipelineSchedule | Schedule | str | None = None,
    recomputation_mode: RecomputationMode | None = None,
    replicated_optimizer_state_sharding: bool = False,
    continuous_weight_updates: bool = False,
    reduction_method: Reduction | str = Reduction.SUM,
    **without_effect: Any,
) -> tuple[UserFunctions, Pipelining]:
    """The stages and how they run, from arguments that `pipelining_ops.pipeline` documents."""
    stages = _stages(computational_stages)
    shard = validate.flag("replicated_optimizer_state_sharding", replicated_optimizer_state_sharding)
    for switch in without_effect.keys() & SWITCHES:
        validate.flag(switch, without_effect[switch], optional=True)
    check_divided(shard, without_effect.get("offload_weight_update_variables"))
    _warn_without_effect(without_effect, len(stages))
    _check_fixed(batch_serialization_iterations, continuous_weight_updates)
    accumulation = Accumulation(
        validate.count("gradient_accumulation_count", gradient_accumulation_count),
        validate.member("reduction_method", reduction_method, Reduction) if training else Reduction.SUM,
        dtype_option(gradient_accumulation_dtype, "gradient_accumulation_dtype"),
    )
    pipelining = Pipelining(
        schedule_of(PipelineSchedule.Grouped if pipeline_schedule is None else pipeline_schedule),
        None if device_mapping is None else validate.sequence("device_mapping", device_mapping),
        _recomputation_mode(recomputation_mode),
        updates=Updates(accumulation, shard),
    ).for_stages(len(stages), training)
    check_micro_batches(pipelining, "`gradient_accumulation_count`")
    return stages, pipelining


def _stages(given: object) -> UserFunctions:
    stages = validate.sequence("computational_stages", given)
    if any(isinstance(stage, list | tuple) for stage in stages):
        raise NotImplementedError(
            "A stage of `computational_stages` is a list of functions to run side by side, but a stage is one function "
            "here. Give a function that calls them and returns all of their outputs."
        )
    return tuple(validate.function(f"computational_stages[{number}]", stage) for number, stage in enumerate(stages))


def _recomputation_mode(given: object) -> RecomputationMode:
    mode = RecomputationMode.Auto if given is None else given
    return validate.member("recomputation_mode", mode, RecomputationMode, by_name=False, error=TypeError)


def _warn_without_effect(given: dict[str, Any], stages: int) -> None:
    for option, value in given.items():
        if option.endswith("poplar_options") and value is not None:
            check_stage_options(option, value, stages)
    validate.no_effect({option: WITHOUT_EFFECT[option] for option, value in given.items() if value is not None})


def _check_fixed(serialization: object, continuous: object) -> None:
    if validate.count("batch_serialization_iterations", serialization) != 1:
        raise NotImplementedError(
            f"`batch_serialization_iterations` is {serialization}, but micro-batches are not cut further here. Give 1, "
            "and make the micro-batches smaller."
        )
    if validate.flag("continuous_weight_updates", continuous):
        raise NotImplementedError(
            "`continuous_weight_updates` is True, but weights change once per update here. Leave it out."
        )
