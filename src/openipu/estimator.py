"""Everything for estimators, under the names of `tf.estimator` and `tf.train`.

>>> from openipu.estimator import EstimatorSpec, ModeKeys, TrainSpec, EvalSpec, train_and_evaluate
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from openipu import _validate as validate
from openipu._estimator import EstimatorBase
from openipu.engine.estimator.hooks import (
    CheckpointSaverListener,
    SessionRunArgs,
    SessionRunContext,
    SessionRunHook,
    SessionRunValues,
)
from openipu.engine.estimator.inputs import InputContext
from openipu.engine.estimator.model_trace import get_global_step
from openipu.engine.estimator.specs import EstimatorSpec, IPUEstimatorSpec, ModeKeys, TrainOp, group
from openipu.ipu_estimator import IPUEstimator, WarmStartSettings
from openipu.ipu_pipeline_estimator import IPUPipelineEstimator, IPUPipelineEstimatorSpec
from openipu.ipu_run_config import IPURunConfig, RunConfig
from openipu.ipu_session_run_hooks import IPULoggingTensorHook, LoggingMode

__all__ = [
    "CheckpointSaverListener",
    "EstimatorSpec",
    "EvalSpec",
    "IPUEstimator",
    "IPUEstimatorSpec",
    "IPULoggingTensorHook",
    "IPUPipelineEstimator",
    "IPUPipelineEstimatorSpec",
    "IPURunConfig",
    "InputContext",
    "LoggingMode",
    "ModeKeys",
    "RunConfig",
    "SessionRunArgs",
    "SessionRunContext",
    "SessionRunHook",
    "SessionRunValues",
    "TrainOp",
    "TrainSpec",
    "WarmStartSettings",
    "get_global_step",
    "group",
    "train_and_evaluate",
]

log = logging.getLogger("openipu")


@dataclass(frozen=True, slots=True)
class TrainSpec:
    """The training part of `train_and_evaluate`.

    >>> ipu.estimator.TrainSpec(input_fn, max_steps=1000).max_steps
    1000
    """

    input_fn: Callable[..., Any]
    max_steps: int
    hooks: Sequence[Any] | None = None
    saving_listeners: Sequence[CheckpointSaverListener] | None = None

    def __post_init__(self) -> None:
        validate.function("input_fn", self.input_fn)
        validate.count("max_steps", self.max_steps)


@dataclass(frozen=True, slots=True)
class EvalSpec:
    """The evaluation part of `train_and_evaluate`. `steps=None` evaluates all of the data.

    >>> ipu.estimator.EvalSpec(input_fn, steps=None, name="test").name
    'test'
    """

    input_fn: Callable[..., Any]
    steps: int | None = 100
    name: str | None = None
    hooks: Sequence[Any] | None = None
    start_delay_secs: float = 120
    throttle_secs: float = 600

    def __post_init__(self) -> None:
        validate.function("input_fn", self.input_fn)
        validate.count("steps", self.steps, optional=True)
        for name in ("start_delay_secs", "throttle_secs"):
            validate.number(name, getattr(self, name), least=0)


class _Evaluator(CheckpointSaverListener):
    """Evaluates each new checkpoint, unless the last evaluation was too recent."""

    def __init__(self, estimator: EstimatorBase, spec: EvalSpec) -> None:
        self._estimator, self._spec = estimator, spec
        self._next = time.monotonic() + spec.start_delay_secs
        self._seen: int | None = None
        self.result: dict[str, Any] | None = None

    def after_save(self, session: SessionRunContext, global_step_value: int) -> None:
        """Evaluate if an evaluation is due."""
        del session
        if time.monotonic() >= self._next:
            self.evaluate(global_step_value)

    def evaluate(self, step: int | None) -> None:
        """Evaluate the newest checkpoint, which was saved at `step`."""
        if step is not None and step == self._seen:
            return
        spec = self._spec
        self.result = self._estimator.evaluate(spec.input_fn, spec.steps, spec.hooks, name=spec.name)
        self._seen = self.result["global_step"]
        self._next = time.monotonic() + spec.throttle_secs


def train_and_evaluate(estimator: EstimatorBase, train_spec: TrainSpec, eval_spec: EvalSpec) -> dict[str, Any]:
    """Train, and evaluate checkpoints as they are saved and once more at the end; returns the last result.

    The estimator's `RunConfig` says how often checkpoints are saved, and `throttle_secs` how often they are evaluated
    at most.

    >>> training = ipu.estimator.TrainSpec(input_fn, max_steps=8)
    >>> result = ipu.estimator.train_and_evaluate(estimator, training, ipu.estimator.EvalSpec(input_fn, steps=4))
    >>> sorted(result)
    ['error', 'global_step', 'loss']
    """
    validate.instance("train_spec", train_spec, TrainSpec)
    validate.instance("eval_spec", eval_spec, EvalSpec)
    evaluator = _Evaluator(estimator, eval_spec)
    listeners = [*(train_spec.saving_listeners or ()), evaluator]
    estimator.train(train_spec.input_fn, train_spec.hooks, max_steps=train_spec.max_steps, saving_listeners=listeners)
    step = estimator.latest_checkpoint()
    evaluator.evaluate(None if step is None else int(step.rpartition("/")[2]))
    assert evaluator.result is not None
    return evaluator.result
