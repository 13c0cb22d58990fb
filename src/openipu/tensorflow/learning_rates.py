"""TensorFlow 1's decays of a learning rate, `tf.compat.v1.train.exponential_decay` and its like, in a model_fn.

There they are values of each step; outside, TensorFlow's own functions are used.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, Final

from openipu.engine.estimator.variable_ledger import current_ledger
from openipu.engine.types import Array

import tensorflow as tf
from keras.optimizers import schedules

from .replacements import Replacements


def _exponential(
    learning_rate: float,
    global_step: Array,
    decay_steps: int,
    decay_rate: float,
    staircase: bool = False,
    name: str | None = None,
) -> Any:
    del name
    return schedules.ExponentialDecay(learning_rate, decay_steps, decay_rate, staircase)(global_step)


def _natural(
    learning_rate: float,
    global_step: Array,
    decay_steps: int,
    decay_rate: float,
    staircase: bool = False,
    name: str | None = None,
) -> Any:
    return _exponential(learning_rate, global_step, decay_steps, math.exp(-decay_rate), staircase, name)


def _inverse_time(
    learning_rate: float,
    global_step: Array,
    decay_steps: int,
    decay_rate: float,
    staircase: bool = False,
    name: str | None = None,
) -> Any:
    del name
    return schedules.InverseTimeDecay(learning_rate, decay_steps, decay_rate, staircase)(global_step)


def _polynomial(
    learning_rate: float,
    global_step: Array,
    decay_steps: int,
    end_learning_rate: float = 0.0001,
    power: float = 1.0,
    cycle: bool = False,
    name: str | None = None,
) -> Any:
    del name
    return schedules.PolynomialDecay(learning_rate, decay_steps, end_learning_rate, power, cycle)(global_step)


def _cosine(
    learning_rate: float, global_step: Array, decay_steps: int, alpha: float = 0.0, name: str | None = None
) -> Any:
    del name
    return schedules.CosineDecay(learning_rate, decay_steps, alpha)(global_step)


def _piecewise(x: Array, boundaries: Sequence[int], values: Sequence[float], name: str | None = None) -> Any:
    del name
    return schedules.PiecewiseConstantDecay(list(boundaries), list(values))(x)


DECAYS: Final[dict[str, Callable[..., Any]]] = {
    "cosine_decay": _cosine,
    "exponential_decay": _exponential,
    "inverse_time_decay": _inverse_time,
    "natural_exp_decay": _natural,
    "piecewise_constant": _piecewise,
    "piecewise_constant_decay": _piecewise,
    "polynomial_decay": _polynomial,
}


def _in_model_fn(decay: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def function(*args: Any, **kwargs: Any) -> Any:
        return (original if current_ledger() is None else decay)(*args, **kwargs)

    return function


def install(replacements: Replacements) -> None:
    """Let model functions decay learning rates."""
    for name, decay in DECAYS.items():
        replacements.put(tf.compat.v1.train, name, _in_model_fn(decay, getattr(tf.compat.v1.train, name)))
