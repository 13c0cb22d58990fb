"""`IPUPipelineEstimator`: an estimator whose model is split into stages, each on its own device."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from openipu._estimator import EstimatorBase, WarmStartSettings, check_model_fn, declared_by
from openipu.engine.estimator.stage_program import StagedRunner
from openipu.engine.estimator.stage_specs import IPUPipelineEstimatorSpec
from openipu.engine.estimator.stage_trace import PIPELINE_FN_ARGUMENTS
from openipu.ipu_run_config import RunConfig

__all__ = ["IPUPipelineEstimator", "IPUPipelineEstimatorSpec"]


class IPUPipelineEstimator(EstimatorBase):
    """Trains, evaluates and predicts with a model that is split into stages, each on its own device.

    `model_fn(mode, params, config)` returns an `IPUPipelineEstimatorSpec`, whose functions get the data; it may leave
    out arguments that it does not need. Everything else is as for an `IPUEstimator`: compiled loops of
    `iterations_per_loop` micro-batches, checkpoints, hooks, event files. `IPURunConfig.num_shards` is the number of
    devices for one copy of the model, `num_replicas` the number of copies.

    Checkpoints hold whole weights by name, so they fit any number of stages and replicas, and also an `IPUEstimator`
    that makes the same layers in the same order.

    >>> def model_fn(mode):
    ...     def first(features, labels):
    ...         return keras.layers.Dense(8, "relu")(features), labels
    ...
    ...     def second(hidden, labels):
    ...         return keras.ops.mean((keras.layers.Dense(1)(hidden)[:, 0] - labels) ** 2)
    ...
    ...     def update(loss):
    ...         return ipu.pipelining_ops.OptimizerFunctionOutput(keras.optimizers.SGD(0.01), loss)
    ...
    ...     return ipu.estimator.IPUPipelineEstimatorSpec(mode, [first, second], 4, optimizer_function=update)
    >>> devices = ipu.estimator.IPURunConfig(iterations_per_loop=4, num_shards=2, ipu_options=config)
    >>> options = ipu.estimator.RunConfig(ipu_run_config=devices)
    >>> estimator = ipu.estimator.IPUPipelineEstimator(model_fn, "staged", options).train(input_fn, steps=8)

    Args:
        model_fn: The function.
        model_dir: The folder for checkpoints and event files. None for that of `config`, or else a temporary folder.
        config: A `RunConfig`; None for `RunConfig()`.
        params: A dict that is passed to `model_fn` and `input_fn`.
        warm_start_from: A `model_dir` or checkpoint with the weights to start from, or `WarmStartSettings`.
    """

    def __init__(
        self,
        model_fn: Callable[..., Any],
        model_dir: str | Path | None = None,
        config: RunConfig | None = None,
        params: dict[str, Any] | None = None,
        warm_start_from: WarmStartSettings | str | Path | None = None,
    ) -> None:
        for name in ("features", "labels"):
            if name in declared_by(model_fn):
                raise ValueError(
                    f"model_fn has the argument {name!r}, but in a pipeline the first stage gets the data. Move {name} "
                    f"to the first stage; model_fn can have {', '.join(PIPELINE_FN_ARGUMENTS)}."
                )
        check_model_fn(model_fn, params, PIPELINE_FN_ARGUMENTS)
        super().__init__(StagedRunner, model_fn, model_dir, config, params, warm_start_from)
