"""What the engine reads from the public configuration classes, which it may not import."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol


class DeviceSettings(Protocol):
    """The part of `IPURunConfig` that the engine reads."""

    @property
    def iterations_per_loop(self) -> int:
        """Steps of one execution."""

    @property
    def ipu_options(self) -> object | None:
        """The devices to configure when a run begins; None to use those that are configured."""

    @property
    def num_replicas(self) -> int:
        """Copies of the model."""

    @property
    def num_shards(self) -> int:
        """Devices of one replica."""

    @property
    def ordinal(self) -> int:
        """The number of the system to run on."""

    @property
    def compile_summary(self) -> bool:
        """Whether to write a report of each run."""


class Distribution(Protocol):
    """The part of `PopDistStrategy` that the engine reads."""

    @property
    def own_data(self) -> bool:
        """Whether each instance reads its own part of the data."""

    def check_configuration(self) -> None:
        """Raise unless all instances have the same configuration."""


class RunSettings(Protocol):
    """The part of `RunConfig` that the engine reads."""

    @property
    def ipu_run_config(self) -> DeviceSettings:
        """How the estimator uses devices."""

    @property
    def train_distribute(self) -> Distribution | None:
        """How instances train together; None if they do not."""

    @property
    def eval_distribute(self) -> Distribution | None:
        """How instances evaluate together; None if they do not."""

    @property
    def tf_random_seed(self) -> int | None:
        """The seed of initial values and dropout; None for Keras' own seed."""

    @property
    def save_summary_steps(self) -> int | None:
        """Steps between two entries for TensorBoard; None for no entries."""

    @property
    def save_checkpoints_steps(self) -> int | None:
        """Steps between two checkpoints."""

    @property
    def save_checkpoints_secs(self) -> float | None:
        """Seconds between two checkpoints."""

    @property
    def keep_checkpoint_max(self) -> int | None:
        """How many checkpoints to keep; None for all."""

    @property
    def report_dir(self) -> Path | None:
        """The folder for reports on all calls; None for no reports."""

    @property
    def log_step_count_steps(self) -> int | None:
        """Steps between two log lines; None for no log lines."""


class WarmStart(Protocol):
    """The part of `WarmStartSettings` that the engine reads."""

    @property
    def ckpt_to_initialize_from(self) -> str | Path:
        """A `model_dir`, or one of its checkpoints."""

    @property
    def patterns(self) -> tuple[str, ...]:
        """Regular expressions for the names of the weights to take."""
