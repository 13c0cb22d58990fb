"""Rules about the micro-batches of an update, checked before anything compiles."""

from __future__ import annotations

from typing import Any

from openipu import _validate as validate
from openipu.engine.keras_compat.api import overrides

from .options import Options


def round_up(number: int, multiple: int) -> int:
    """The next multiple, or `number` if it is one."""
    return -(-number // multiple) * multiple


def check_accumulation(name: str, steps: int, size: int) -> None:
    """An execution holds whole updates."""
    if steps % size:
        raise RuntimeError(
            f"`{name}` is {steps}, which is not a multiple of the {size} micro-batches that one update accumulates. "
            f"Give a multiple of {size}, for example {round_up(steps, size)}."
        )


def check_training(model: Any, options: Options) -> None:
    """The rules about updates, before anything compiles."""
    size = options.updates.steps
    check_accumulation("steps_per_execution", validate.count("steps_per_execution", model.steps_per_execution), size)
    if size > 1 and overrides(model, "train_step"):
        raise RuntimeError(
            f"Model {model.name!r} has its own `train_step`, which updates the weights at every micro-batch, but "
            f"{size} micro-batches are to be accumulated per update. Remove `train_step`, or accumulate 1."
        )
