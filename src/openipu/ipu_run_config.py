"""`RunConfig` and `IPURunConfig`: how an estimator runs."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from openipu import _validate as validate
from openipu.config import IPUConfig
from openipu.settings.frozen import freeze

__all__ = ["IPURunConfig", "RunConfig"]

_DEFAULT = object()
_NO_EFFECT = {
    "master": "there are no sessions",
    "session_config": "there are no sessions",
    "session_creation_timeout_secs": "there are no sessions",
    "device_fn": "`IPURunConfig` says where programs run",
    "protocol": "there is no cluster",
    "experimental_distribute": "there is no cluster",
    "experimental_max_worker_delay_secs": "there is no cluster",
    "keep_checkpoint_every_n_hours": "`keep_checkpoint_max` decides",
    "checkpoint_save_graph_def": "checkpoints hold no graph",
}


@dataclass(frozen=True, slots=True)
class IPURunConfig:
    """How an estimator uses devices.

    Args:
        iterations_per_loop: Steps of one execution, on each replica.
        ipu_options: The system to configure when a run begins. None: the one that is configured.
        num_replicas: Copies of the model, each with its own micro-batches.
        num_shards: Devices of one copy of the model: an `IPUEstimator` cuts it into as many parts by itself, an
            `IPUPipelineEstimator` puts its stages on them.
        ordinal: Which system of `ipu_options`: "/device:IPU:<ordinal>".
        prefetch_depth: Has no effect: the batches of the next execution are built while one runs.
        compile_summary: Write facts about each run's programs into `model_dir`, such as `train_report.txt`.
        autosharding: Accepted for scripts that give it: `num_shards` says whether a model is cut.
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
            validate.no_effect({"IPURunConfig.prefetch_depth": "the next execution's batches are built while one runs"})
        if self.autosharding and self.num_shards == 1:
            reason = "`num_shards` is 1, so there are no devices to split a model over"
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
                f"`ordinal` is {self.ordinal}, but only {len(requests)} system(s) are available to choose from, "
                "numbered from 0. Give `auto_select_ipus` a list with one number of devices per system."
            )
        request = requests[self.ordinal]
        # Systems of chosen devices are counted when a run begins.
        if isinstance(request, int) and request != wanted:
            raise ValueError(
                f"`IPURunConfig` asks for {described}, but `ipu_options` configures {request}. Make them equal: set "
                f"`auto_select_ipus` to {wanted}, or `num_replicas` to {request}."
            )


class RunConfig:
    """How an estimator runs, saves and reports.

    Args:
        ipu_run_config: How it uses devices; None: `IPURunConfig()`.
        master: Has no effect.
        model_dir: Where checkpoints and event files go, unless the estimator is told otherwise.
        tf_random_seed: What initial values and dropout depend on. None: on Keras' seed, as for any Keras model.
        save_summary_steps: Write the loss for TensorBoard after each so many steps; None: never.
        save_checkpoints_steps: Save after each so many steps.
        save_checkpoints_secs: Or after each so many seconds; 600 unless steps are given. None: only at the end.
        keep_checkpoint_max: How many checkpoints stay; None or 0: all.
        log_step_count_steps: Log loss and speed after each so many steps; None: never.
        train_distribute: Not supported yet.
        eval_distribute: Not supported yet.
        others: The other arguments of `tf.estimator.RunConfig` have no effect and are named in a warning.
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
        train_distribute: object | None = None,
        eval_distribute: object | None = None,
        **others: Any,
    ) -> None:
        validate.instance("ipu_run_config", ipu_run_config, IPURunConfig, optional=True)
        for name in others:
            if name not in _NO_EFFECT:
                raise TypeError(f"`RunConfig` has no argument {name!r}.")
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
        self.train_distribute, self.eval_distribute = train_distribute, eval_distribute
        self._check_distribution()

    def _check_distribution(self) -> None:
        for name in ("train_distribute", "eval_distribute"):
            if getattr(self, name) is None:
                continue
            iterations = self.ipu_run_config.iterations_per_loop
            why = f" with `iterations_per_loop` = {iterations}" if iterations > 1 else ""
            raise NotImplementedError(
                f"`{name}` is set, but an estimator does not run on several hosts{why}. Use `num_replicas` for several "
                "devices of this one."
            )

    def replace(self, **changes: Any) -> RunConfig:
        """A copy with other values."""
        names = (
            "ipu_run_config", "model_dir", "tf_random_seed", "save_summary_steps", "save_checkpoints_steps",
            "save_checkpoints_secs", "keep_checkpoint_max", "log_step_count_steps", "train_distribute",
            "eval_distribute",
        )  # fmt: skip
        return RunConfig(**{name: getattr(self, name) for name in names} | changes)

    def __repr__(self) -> str:
        fields = [field.name for field in dataclasses.fields(IPURunConfig) if field.name != "ipu_options"]
        options = {name: getattr(self.ipu_run_config, name) for name in fields}
        return f"RunConfig(model_dir={self.model_dir!r}, ipu_run_config={options})"
