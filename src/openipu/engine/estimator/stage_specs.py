"""What the model_fn of a pipelined estimator returns, and the rules for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from openipu import _validate as validate
from openipu.engine.core.accumulation import Reduction, dtype_option
from openipu.engine.pipeline.build.arguments import OPTIONS, arguments
from openipu.engine.types import DTypeOption

from .specs import ENGINE_MODE

_SET_BY_ESTIMATOR = (
    "repeat_count", "inputs", "infeed_queue", "outfeed_queue", "outfeed_loss", "outfeed_mask", "accumulate_outfeed",
    "accumulate_outfeed_dtype",
)  # fmt: skip
_IGNORED = ("name", "gradient_accumulation_for_captured_grads")
"""Arguments of `pipeline` that are accepted without effect."""


class IPUPipelineEstimatorSpec:
    """What the model_fn of an `IPUPipelineEstimator` returns: a model as a list of functions, one per stage.

    The first stage gets what `input_fn` yields: features and labels, only features, or a dict as named arguments. Every
    other stage gets what the previous one returned.

    >>> def model_fn(mode):
    ...     def first(features, labels):
    ...         return keras.layers.Dense(8, "relu")(features), labels
    ...
    ...     def second(hidden, labels):
    ...         return keras.ops.mean((keras.layers.Dense(1)(hidden)[:, 0] - labels) ** 2)
    ...
    ...     return ipu.estimator.IPUPipelineEstimatorSpec(
    ...         mode, [first, second], gradient_accumulation_count=4, eval_metrics_fn=lambda loss: {"loss": loss.mean()}
    ...     )

    Args:
        mode: One of `ModeKeys`.
        computational_stages: Two or more functions.
        gradient_accumulation_count: Micro-batches of one update. `iterations_per_loop` must be a multiple of it.
        eval_metrics_fn: Required for EVAL. Called on the host with the outputs of the last stage for all micro-batches,
            joined along their first axis in the order of the data; a scalar output becomes one value per micro-batch.
            Returns a dict of numbers, Keras metrics or tuples `(metric, y_true, y_pred)`, one of them as "loss".
        optimizer_function: Required for TRAIN. Returns an `OptimizerFunctionOutput` for the outputs of the last stage.
        device_mapping: The device of each stage. By default each stage has its own.
        loss_accumulator_dtype: Has no effect: losses are added up in float32.
        training_hooks, evaluation_hooks, prediction_hooks: Hooks in addition to those passed to `train` and so on.
        reduction_method: How the gradients of micro-batches are combined: sum, mean or running_mean.
        pipeline_op_kwargs: Other arguments of `pipelining_ops.pipeline`, such as `pipeline_schedule`.
    """

    host_call: ClassVar[None] = None
    """Only an `IPUEstimatorSpec` can have one."""

    def __init__(
        self,
        mode: str,
        computational_stages: Sequence[Callable[..., Any]],
        gradient_accumulation_count: int | None = None,
        eval_metrics_fn: Callable[..., dict[str, Any]] | None = None,
        optimizer_function: Callable[..., Any] | None = None,
        device_mapping: Sequence[int] | None = None,
        loss_accumulator_dtype: DTypeOption = None,
        training_hooks: Sequence[Any] | None = None,
        evaluation_hooks: Sequence[Any] | None = None,
        prediction_hooks: Sequence[Any] | None = None,
        reduction_method: Reduction | str = Reduction.SUM,
        **pipeline_op_kwargs: Any,
    ) -> None:
        validate.choice("mode", mode, ENGINE_MODE)
        validate.function("optimizer_function", optimizer_function, optional=True)
        validate.function("eval_metrics_fn", eval_metrics_fn, optional=True)
        for needs, name, function in (
            ("train", "optimizer_function", optimizer_function),
            ("eval", "eval_metrics_fn", eval_metrics_fn),
        ):
            if mode == needs and function is None:
                raise ValueError(f"`mode` is {mode!r}, but `{name}` is None. Give a function.")
        _check_options(pipeline_op_kwargs)
        if loss_accumulator_dtype is not None:
            dtype_option(loss_accumulator_dtype)
            validate.no_effect({"loss_accumulator_dtype": "losses are added up in float32"})
        self.mode = mode
        self.optimizer_function, self.eval_metrics_fn = optimizer_function, eval_metrics_fn
        self.stages, self.pipelining = arguments(
            mode == "train",
            computational_stages=computational_stages,
            gradient_accumulation_count=gradient_accumulation_count,
            device_mapping=device_mapping,
            reduction_method=reduction_method,
            **{name: value for name, value in pipeline_op_kwargs.items() if name not in _IGNORED},
        )
        hooks = {
            "train": ("training_hooks", training_hooks),
            "eval": ("evaluation_hooks", evaluation_hooks),
            "infer": ("prediction_hooks", prediction_hooks),
        }
        self.hooks = {key: validate.sequence(*given, optional=True) for key, given in hooks.items()}[mode]


def _check_options(given: dict[str, Any]) -> None:
    for name in given:
        if name in _SET_BY_ESTIMATOR:
            raise ValueError(f"`{name}` is set by the estimator, which feeds the pipeline itself. Leave it out.")
        if name not in OPTIONS and name not in _IGNORED:
            raise TypeError(f"`pipeline` has no argument {name!r}. Its arguments are {', '.join(OPTIONS)}.")
