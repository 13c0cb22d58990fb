"""Rules of pipelined models that need no devices, checked when the plan is made.

Rules about the stages themselves are in split.py (`check`), those about one schedule's numbers in schedules.py.
"""

from __future__ import annotations

from typing import Any

from openipu.engine.core.accumulation import Accumulation

from openipu.engine.core.pipelining import Pipelining
from openipu.engine.schedule.schedules import check as check_schedule
from openipu.engine.schedule.schedules import check_devices
from openipu.engine.pipeline.runtime.stage_function import Recompute

_STEPS = ("train_step", "test_step", "predict_step")
_FUNCTIONS = ("make_train_function", "make_test_function", "make_predict_function")


def check_model(model: Any) -> None:
    """Raise where the model's class does by itself what stages have to do."""
    own = [name for name in (*_STEPS, *_FUNCTIONS) if _is_users(getattr(type(model), name))]
    if own:
        raise RuntimeError(
            f"Model {model.name!r} has a `{own[0]}` of its own, but a pipelined model's steps are cut into stages. "
            f"Remove `{own[0]}` (a custom loss, metric, layer or callback may do what it does), or use "
            "`reset_pipeline_stage_assignment`."
        )


def _is_users(function: Any) -> bool:
    return function.__module__.split(".")[0] not in ("keras", "openipu")


def devices_of_stages(pipelining: Pipelining, stages: int) -> tuple[int, ...]:
    """The device of each stage, counted within a replica."""
    if pipelining.device_mapping is None:
        return tuple(range(stages))
    mapping = check_devices(stages, pipelining.device_mapping)
    unused = sorted(set(range(max(mapping))) - set(mapping))
    if unused:
        raise ValueError(
            f"`device_mapping` {list(mapping)} leaves out device {unused[0]} although it uses device {max(mapping)}. "
            "Number the devices of a replica 0, 1, 2, ... without gaps."
        )
    return mapping


def check_training(pipelining: Pipelining, accumulation: Accumulation, stages: int) -> None:
    """Raise where the schedule cannot run so many micro-batches through so many stages."""
    devices = devices_of_stages(pipelining, stages)
    schedule, steps = pipelining.schedule, accumulation.steps
    overlap = getattr(schedule, "overlap", None)
    least = overlap(stages, devices, True) if overlap else 1
    if steps == 1 and least > 1:
        raise ValueError(
            "The model is pipelined, but `gradient_accumulation_steps_per_replica` has not been set (it is 1). "
            f"{type(schedule).__name__} with {stages} stages needs a multiple of {least}: use "
            f"`set_pipelining_options(gradient_accumulation_steps_per_replica={least})`."
        )
    check_schedule(stages, steps, devices, least, type(schedule).__name__)


def one_dtype(accumulation: Accumulation) -> Accumulation:
    """The same; raises where weights have different dtypes to accumulate in, because a stage keeps them together."""
    if isinstance(accumulation.dtype, tuple):
        raise ValueError(
            f"Gradients are to be accumulated in {', '.join(sorted(set(accumulation.dtype)))}, but those of a "
            "pipelined model are accumulated in one dtype. Give its name."
        )
    return accumulation


def recomputed(marks_count: bool, allowed: bool) -> Recompute:
    """What stages compute again; `allowed` is what `IPUConfig.allow_recompute` says."""
    if not allowed:
        return "nothing"
    return "unmarked" if marks_count else "everything"
