"""The rules for pipelines, checked before anything compiles.

Two kinds of rules are elsewhere: partition/split.py checks which stage a layer may be in, and schedule/schedules.py
checks the numbers of a schedule.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from openipu.engine.core.pipelining import Pipelining
from openipu.engine.core.updates import Updates
from openipu.engine.schedule.schedules import check as check_schedule

import keras

_STEPS = ("train_step", "test_step", "predict_step")
_FUNCTIONS = ("make_train_function", "make_test_function", "make_predict_function")


def check_model(model: keras.Model) -> None:
    """Raise if the model's class overrides a step, because stages replace Keras' own steps."""
    own = [name for name in (*_STEPS, *_FUNCTIONS) if _is_users(getattr(type(model), name))]
    if own:
        names = " and ".join(f"`{name}`" for name in own)
        raise RuntimeError(
            f"Model {model.name!r} has a {names} of its own, but the steps of a pipelined model are cut into stages. "
            f"Remove {names} (a custom loss, metric, layer or callback may do the work), or call "
            "`reset_pipeline_stage_assignment`."
        )


def _is_users(function: Callable[..., Any]) -> bool:
    return function.__module__.split(".")[0] not in ("keras", "openipu")


def check_all_devices_used(pipelining: Pipelining) -> None:
    """Raise if the mapping leaves a device of the replica without a stage."""
    devices = pipelining.devices
    unused = sorted(set(range(max(devices))) - set(devices))
    if unused:
        raise ValueError(
            f"`device_mapping` is {list(devices)}, which leaves out device {unused[0]} but uses device {max(devices)}. "
            "Number the devices of a replica 0, 1, 2, ... without gaps."
        )


def check_accumulation_is_set(pipelining: Pipelining) -> None:
    """Raise if a Keras model still has the default of one micro-batch per update and its schedule needs more."""
    multiple, stages = pipelining.multiple(), len(pipelining.devices)
    if pipelining.updates.steps == 1 and multiple > 1:
        raise ValueError(
            "The model is pipelined, but each update has only 1 micro-batch. "
            f"{type(pipelining.schedule).__name__} with {stages} stages needs a multiple of {multiple}: call "
            f"`set_pipelining_options(gradient_accumulation_steps_per_replica={multiple})`. What "
            "`set_gradient_accumulation_options` sets is for models without stages."
        )


def check_micro_batches(pipelining: Pipelining, option: str) -> None:
    """Raise if the schedule cannot run this number of micro-batches per update, which users set with `option`."""
    devices, name = pipelining.devices, type(pipelining.schedule).__name__
    check_schedule(len(devices), pipelining.updates.steps, devices, pipelining.multiple(), name, option)


def one_dtype(updates: Updates) -> Updates:
    """The same updates. Raises if gradients have different dtypes, because a stage accumulates them together."""
    dtype = updates.accumulation.dtype
    if isinstance(dtype, tuple):
        raise ValueError(
            f"`gradient_accumulation_dtype` asks for {', '.join(sorted(set(dtype)))}, but a pipelined model "
            "accumulates all gradients in one dtype. Give the name of one."
        )
    return updates
