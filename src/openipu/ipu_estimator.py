"""`IPUEstimator`: train, evaluate and predict with a `model_fn`, in compiled device loops."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from openipu import _validate as validate
from openipu._estimator import EstimatorBase, WarmStartSettings, check_model_fn, declared_by
from openipu.engine.core.update_rules import round_up
from openipu.engine.estimator.model_trace import MODEL_FN_ARGUMENTS, arguments
from openipu.engine.estimator.runner import EstimatorRunner
from openipu.engine.estimator.specs import IPUEstimatorSpec
from openipu.ipu_run_config import RunConfig

__all__ = ["IPUEstimator", "IPUEstimatorSpec", "WarmStartSettings"]


class IPUEstimator(EstimatorBase):
    """Trains, evaluates and predicts with a `model_fn` written in Keras, in compiled device loops.

    `model_fn(features, labels, mode, params, config)` makes layers and returns an `EstimatorSpec` or
    `IPUEstimatorSpec`; it may leave out arguments that it does not need. It is traced, not called for every step.
    Layers know from the mode whether they are training. `input_fn(mode, params, config, input_context)` returns a
    dataset of batches (features, labels).

    `train` resumes from the newest checkpoint in `model_dir`, at the same position in the data, as if it had never been
    interrupted. For that, `input_fn` must return the same batches in the same order every time.

    >>> estimator = ipu.estimator.IPUEstimator(model_fn, "run").train(input_fn, steps=8)
    >>> sorted(estimator.evaluate(input_fn, steps=4))
    ['error', 'global_step', 'loss']

    Args:
        model_fn: The function.
        model_dir: The folder for checkpoints and event files. None for that of `config`, or else a temporary folder.
        config: A `RunConfig`; None for `RunConfig()`.
        params: A dict that is passed to `model_fn` and `input_fn`.
        warm_start_from: A `model_dir` or checkpoint with the weights to start from, or `WarmStartSettings`.
        train_batch_size: Examples in one step over all replicas; each replica's share is `params["batch_size"]`.
        eval_batch_size: The same for `evaluate`.
        predict_batch_size: The same for `predict`.
    """

    def __init__(
        self,
        model_fn: Callable[..., Any],
        model_dir: str | Path | None = None,
        config: RunConfig | None = None,
        params: dict[str, Any] | None = None,
        warm_start_from: WarmStartSettings | str | Path | None = None,
        train_batch_size: int | None = None,
        eval_batch_size: int | None = None,
        predict_batch_size: int | None = None,
    ) -> None:
        if "features" not in declared_by(model_fn):
            declared = ", ".join(declared_by(model_fn)) or "none"
            raise ValueError(f"model_fn has the arguments {declared}, but it must have `features`. Add it.")
        check_model_fn(model_fn, params, MODEL_FN_ARGUMENTS)
        super().__init__(EstimatorRunner, model_fn, model_dir, config, params, warm_start_from)
        sizes = {
            "train_batch_size": train_batch_size,
            "eval_batch_size": eval_batch_size,
            "predict_batch_size": predict_batch_size,
        }
        given = [name for name, value in sizes.items() if value is not None]
        if "batch_size" in self.params and given:
            raise ValueError(f"`params` has the key 'batch_size', but `{given[0]}` sets it. Leave one of them out.")
        self._batch_sizes = {name.removesuffix("_batch_size"): self._local(name, v) for name, v in sizes.items()}

    # --- checks

    def _local(self, name: str, given: int | None) -> int | None:
        """One replica's share of a global batch."""
        replicas = self.config.ipu_run_config.num_replicas
        size = validate.count(name, given, optional=True)
        if size is None:
            return None
        if size % replicas:
            raise ValueError(
                f"`{name}` ({size}) must be divisible by the number of workers times replicas (1 * {replicas}). Give "
                f"{round_up(size, replicas)}, for example."
            )
        return size // replicas

    def _params_of(self, kind: str, input_fn: Callable[..., Any]) -> dict[str, Any]:
        """The params of a run, with the batch size if the estimator was given one."""
        params = super()._params_of(kind, input_fn)
        size = self._batch_sizes[kind]
        if size is None:
            return params
        if "params" not in arguments(input_fn):
            raise ValueError(
                f"The estimator was given `{kind}_batch_size`, so input_fn must take an argument `params`. Add it, and "
                "make batches of `params['batch_size']` examples."
            )
        return params | {"batch_size": size}
