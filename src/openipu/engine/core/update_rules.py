"""Rules about the micro-batches of an update, checked before anything is compiled."""

from __future__ import annotations

from collections.abc import Sequence

from openipu import _validate as validate
from openipu.engine.keras_compat.api import overrides

import keras

from .options import Options


def round_up(number: int, multiple: int) -> int:
    """The smallest multiple that is not below `number`."""
    return -(-number // multiple) * multiple


def check_accumulation(name: str, steps: int, size: int, where: str) -> None:
    """Raise if an execution does not hold whole updates. `where` is what users give the number of steps to."""
    if steps % size:
        raise RuntimeError(
            f"`{name}` is {steps}, which is not a multiple of the {size} micro-batches that one update accumulates. "
            f"Give {where} a multiple of {size}, for example `{name}={round_up(steps, size)}`."
        )


def check_added_up(weights: Sequence[keras.Variable], because: str) -> None:
    """Raise if a weight is replaced by its gradient, as in float8 layers: such gradients must not be added up."""
    paths = [w.path for w in weights if getattr(w, "overwrite_with_gradient", False)]
    if paths:
        raise ValueError(
            f"Each update replaces the weight {paths[0]!r} by its gradient (`overwrite_with_gradient`, as in float8 "
            f"training), but {because}. Train on one device with one micro-batch per update, or use another dtype "
            "policy."
        )


def check_training(model: keras.Model, options: Options) -> None:
    """Check the rules about updates before anything is compiled."""
    size = options.updates.steps
    steps = validate.count("steps_per_execution", model.steps_per_execution)
    check_accumulation("steps_per_execution", steps, size, "`compile`")
    if size > 1 and overrides(model, "train_step"):
        raise RuntimeError(
            f"Model {model.name!r} has its own `train_step`, which updates the weights at every micro-batch, but "
            f"each update should accumulate {size} micro-batches. Remove `train_step`, or accumulate 1."
        )
