"""TensorFlow 1's decays of a learning rate, `tf.compat.v1.train.exponential_decay` and its like, in a model_fn.

There they are values of each step; outside, TensorFlow's own functions are used.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any, Final

from openipu.engine.estimator.variable_ledger import current_ledger

import tensorflow as tf
from keras.optimizers import schedules

from .replacements import Replacements


def _natural(rate: float, steps: int, decay_rate: float, staircase: bool) -> schedules.LearningRateSchedule:
    return schedules.ExponentialDecay(rate, steps, math.exp(-decay_rate), staircase)


def _piecewise(boundaries: Sequence[int], values: Sequence[float]) -> schedules.LearningRateSchedule:
    return schedules.PiecewiseConstantDecay(list(boundaries), list(values))


DECAYS: Final[dict[str, Callable[..., schedules.LearningRateSchedule]]] = {
    "cosine_decay": schedules.CosineDecay,
    "exponential_decay": schedules.ExponentialDecay,
    "inverse_time_decay": schedules.InverseTimeDecay,
    "natural_exp_decay": _natural,
    "piecewise_constant": _piecewise,
    "piecewise_constant_decay": _piecewise,
    "polynomial_decay": schedules.PolynomialDecay,
}
"""The schedules that decay alike. Their arguments are TensorFlow's, in the same order, without the step."""
STEPS: Final = ("global_step", "x")
"""What the decays call the step."""


def decayed(name: str, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The learning rate at a step, for the arguments of TensorFlow's function of that name."""
    bound = inspect.signature(original).bind(*args, **kwargs)
    bound.apply_defaults()
    given = bound.arguments
    step = next(given.pop(word) for word in STEPS if word in given)
    del given["name"]
    return DECAYS[name](*given.values())(step)


def _in_model_fn(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def function(*args: Any, **kwargs: Any) -> Any:
        if current_ledger() is None:
            return original(*args, **kwargs)
        return decayed(name, original, *args, **kwargs)

    return function


def install(replacements: Replacements) -> None:
    """Let model functions decay learning rates."""
    for name in DECAYS:
        replacements.put(tf.compat.v1.train, name, _in_model_fn(name, getattr(tf.compat.v1.train, name)))
