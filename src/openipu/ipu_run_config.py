"""`RunConfig` and `IPURunConfig`: how an estimator runs."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from openipu import _validate as validate
from openipu.config import IPUConfig
from openipu.distributed.popdist_strategy import PopDistStrategy
from openipu.settings.frozen import freeze

__all__ = ["IPURunConfig", "RunConfig"]

_DEFAULT = object()
_NO_EFFECT = {
    "master": "there are no sessions",
    "session_config": "there are no sessions",
    "session_creation_timeout_secs": "there are no sessions",
    "device_fn": "`IPURunConfig` chooses the devices",
    "protocol": "there is no cluster",
    "experimental_distribute": "there is no cluster",
    "experimental_max_worker_delay_secs": "there is no cluster",
    "keep_checkpoint_every_n_hours": "`keep_checkpoint_max` decides",
    "checkpoint_save_graph_def": "checkpoints hold no graph",
}


@dataclass(frozen=True, slots=True)
class IPURunConfig:
    """How an estimator uses devices.

    >>> devices = ipu.estimator.IPURunConfig(iterations_per_loop=4)
    >>> options = ipu.estimator.RunConfig(ipu_run_config=devices)
    >>> estimator = ipu.estimator.IPUEstimator(model_fn, "run", options).train(input_fn, steps=4)

    Args:
        iterations_per_loop: Steps in one execution, on each replica.
        ipu_options: The configuration to apply when a run begins. None keeps the active one.
        num_replicas: Copies of the model, each with its own micro-batches.
        num_shards: Devices for one copy of the model. An `IPUEstimator` splits the model into this many parts by
            itself; an `IPUPipelineEstimator` puts its stages on them.
        ordinal: Which system of `ipu_options` to use: "/device:IPU:<ordinal>".
        prefetch_depth: Has no effect: the next batches are always prepared while an execution runs.
        compile_summary: Write facts about the programs of each run into `model_dir`, as `train_report.txt` and so on.
        autosharding: Has no effect: `num_shards` says whether a model is split.
    """

    iterations_per_loop: int = 1
    ipu_options: IPUConfig | None = None
    num_replicas: int = 1
    num_shards: int = 1
    ordinal: int = 0
    prefetch_depth: int | None = None
    compile_summary: bool = False
    autosharding: bool = False

    def __post_init__(self) -> None:
        for name in ("iterations_per_loop", "num_replicas", "num_shards"):
            validate.count(name, getattr(self, name))
        validate.count("ordinal", self.ordinal, least=0)
        for name in ("compile_summary", "autosharding"):
            validate.flag(name, getattr(self, name))
        if validate.count("prefetch_depth", self.prefetch_depth, optional=True) is not None:
            validate.no_effect(
                {"IPURunConfig.prefetch_depth": "the next batches are always prepared while an execution runs"}
            )
        if self.autosharding and self.num_shards == 1:
            reason = "`num_shards` is 1, so there is nothing to split the model over"
            validate.no_effect({"IPURunConfig.autosharding": reason})
        validate.instance("ipu_options", self.ipu_options, IPUConfig, optional=True)
        self._check_devices()

    def _check_devices(self) -> None:
        wanted = self.num_replicas * self.num_shards
        described = f"{wanted} devices ({self.num_replicas} replicas times {self.num_shards} shards)"
        if self.ipu_options is None:
            if wanted > 1:
                raise ValueError(
                    f"`IPURunConfig` asks for {described}, but `ipu_options` is None. Give an `IPUConfig` with "
                    f"`auto_select_ipus = {wanted}`."
                )
            return
        requests = freeze(self.ipu_options).requests
        if self.ordinal >= len(requests):
            raise ValueError(
                f"`ordinal` is {self.ordinal}, but the configuration has {validate.counted(len(requests), 'system')}, "
                "numbered from 0. Set `auto_select_ipus` to a list with the number of devices of each system."
            )
        request = requests[self.ordinal]
        # Devices chosen by index are counted when a run begins.
        if isinstance(request, int) and request != wanted:
            raise ValueError(
                f"`IPURunConfig` asks for {described}, but `ipu_options` configures {request}. Make them equal: set "
                f"`auto_select_ipus` to {wanted}, or `num_replicas` to {request}."
            )


class RunConfig:
    """How an estimator runs, saves and reports.

    >>> options = ipu.estimator.RunConfig(save_checkpoints_steps=1000, log_step_count_steps=100)
    >>> estimator = ipu.estimator.IPUEstimator(model_fn, "run", options)

    Args:
        ipu_run_config: How it uses devices; None for `IPURunConfig()`.
        master: Has no effect.
        model_dir: The folder for checkpoints and event files, unless the estimator is given one.
        tf_random_seed: The seed for initial values and dropout. None uses Keras' seed, as for any Keras model.
        save_summary_steps: How many steps lie between the losses written for TensorBoard; None writes none.
        save_checkpoints_steps: How many steps lie between checkpoints.
        save_checkpoints_secs: Instead, how many seconds lie between checkpoints; 600 unless steps are given. None saves
            only at the end.
        keep_checkpoint_max: How many checkpoints to keep; None or 0 keeps all.
        log_step_count_steps: How many steps lie between log lines with loss and speed; None logs none.
        train_distribute: A `PopDistStrategy`, with which all instances train together. Then `num_replicas` and
            `ipu_options` are about one instance, and gradients are averaged over the replicas of all.
        eval_distribute: The same for evaluation. Without it, each instance evaluates by itself.
        report_dir: The folder for `report.html`, `report.json` and `trace.json`, which tell about all calls of the
            estimator; None writes no report.
        others: The other arguments of `tf.estimator.RunConfig` have no effect; a warning names them.
    """

    def __init__(
        self,
        ipu_run_config: IPURunConfig | None = None,
        master: str | None = None,
        *,
        model_dir: str | Path | None = None,
        tf_random_seed: int | None = None,
        save_summary_steps: int | None = 100,
        save_checkpoints_steps: int | object | None = _DEFAULT,
        save_checkpoints_secs: float | object | None = _DEFAULT,
        keep_checkpoint_max: int | None = 5,
        log_step_count_steps: int | None = 100,
        train_distribute: PopDistStrategy | None = None,
        eval_distribute: PopDistStrategy | None = None,
        report_dir: str | Path | None = None,
        **others: Any,
    ) -> None:
        validate.instance("ipu_run_config", ipu_run_config, IPURunConfig, optional=True)
        for name in others:
            if name not in _NO_EFFECT:
                raise TypeError(f"`RunConfig` has no argument {name!r}. Leave it out.")
        given = {"master": master, **others}
        validate.no_effect({f"RunConfig.{name}": _NO_EFFECT[name] for name, v in given.items() if v is not None})
        if save_checkpoints_steps not in (_DEFAULT, None) and save_checkpoints_secs not in (_DEFAULT, None):
            raise ValueError(
                f"`save_checkpoints_steps` is {save_checkpoints_steps} and `save_checkpoints_secs` is "
                f"{save_checkpoints_secs}. Give one of them."
            )
        self.ipu_run_config = ipu_run_config or IPURunConfig()
        folder = validate.path("model_dir", model_dir, optional=True)
        self.model_dir = None if folder is None else str(folder)
        self.tf_random_seed = validate.count("tf_random_seed", tf_random_seed, optional=True, least=0)
        self.save_summary_steps = validate.count("save_summary_steps", save_summary_steps, optional=True)
        steps = None if save_checkpoints_steps is _DEFAULT else save_checkpoints_steps
        self.save_checkpoints_steps = validate.count("save_checkpoints_steps", steps, optional=True)
        if save_checkpoints_secs is _DEFAULT:
            save_checkpoints_secs = 600 if save_checkpoints_steps is _DEFAULT else None
        self.save_checkpoints_secs = validate.number(
            "save_checkpoints_secs", save_checkpoints_secs, optional=True, above=0
        )
        self.keep_checkpoint_max = (
            validate.count("keep_checkpoint_max", keep_checkpoint_max, optional=True, least=0) or None
        )
        self.log_step_count_steps = validate.count("log_step_count_steps", log_step_count_steps, optional=True)
        self.train_distribute = validate.instance("train_distribute", train_distribute, PopDistStrategy, optional=True)
        self.report_dir = validate.path("report_dir", report_dir, optional=True)
        self.eval_distribute = validate.instance("eval_distribute", eval_distribute, PopDistStrategy, optional=True)

    def replace(self, **changes: Any) -> RunConfig:
        """A copy with other values."""
        names = (
            "ipu_run_config", "model_dir", "tf_random_seed", "save_summary_steps", "save_checkpoints_steps",
            "save_checkpoints_secs", "keep_checkpoint_max", "log_step_count_steps", "train_distribute",
            "eval_distribute", "report_dir",
        )  # fmt: skip
        return RunConfig(**{name: getattr(self, name) for name in names} | changes)

    def __repr__(self) -> str:
        fields = [field.name for field in dataclasses.fields(IPURunConfig) if field.name != "ipu_options"]
        options = {name: getattr(self.ipu_run_config, name) for name in fields}
        return f"RunConfig(model_dir={self.model_dir!r}, ipu_run_config={options})"
