"""What a user sets on a model beyond Keras' `compile`: one frozen value, saved and loaded with the model."""

from __future__ import annotations

import dataclasses
import enum
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from .pipelining import Pipelining
from .updates import Updates

if TYPE_CHECKING:
    import keras

    from .wrapped_optimizer import Declared


class MetricReduction(enum.Enum):
    """How the metrics of several replicas are reported.

    >>> model.set_replication_options(ipu.keras.ReplicatedMetricReductionMethod.MEAN)
    """

    NONE = "NONE"
    """The true value over the samples of all replicas."""
    LIST = "LIST"
    """The values of each replica."""
    SUM = "SUM"
    """The sum of the replicas' values."""
    MEAN = "MEAN"
    """The mean of the replicas' values."""


@dataclass(frozen=True, slots=True)
class Opening:
    """The layers that are cut inside, like nested models (pipeline/partition/opened_layer.py)."""

    layers: tuple[int, ...] = ()
    """Their numbers among all layers of the model."""
    shapes: tuple[tuple[tuple[int, ...], str], ...] = ()
    """Shape and dtype of each input of the model for which they were opened."""

    @classmethod
    def from_dict(cls, values: dict[str, Any] | None) -> Opening:
        """The inverse of `dataclasses.asdict`."""
        if not values:
            return cls()
        return cls(tuple(values["layers"]), tuple((tuple(shape), dtype) for shape, dtype in values["shapes"]))


CLOSED = Opening()
"""No layer is cut inside."""


@dataclass(frozen=True, slots=True)
class Options:
    """The options of one model."""

    unpipelined: Updates = field(default_factory=Updates)
    """What an update is while the model is not pipelined; `pipelining` has updates of its own."""
    metric_reduction: MetricReduction = MetricReduction.NONE
    average_replicas: bool = False
    """Whether gradients are averaged over replicas instead of summed, as a `CrossReplicaOptimizer` asks."""
    stages: tuple[tuple[str, int], ...] | None = None
    """The name and stage of each layer call (pipeline/partition/assignment.py).

    None: as `PipelineStage` says. Empty: not pipelined.
    """
    opening: Opening = CLOSED
    """Which layers `stages` looks into."""
    pipelining: Pipelining | None = None
    """How the stages run; None means `Pipelining()`."""
    live_callbacks: bool = False
    """Whether batch callbacks are called for each step while the execution runs."""
    prefetch_depth: int | None = None
    """How many batches are kept ready for the next executions."""
    buffer_depth: int | None = None
    """How many steps' logs may wait for the callbacks."""
    check_labels: bool = field(default=True, compare=False)
    """Whether labels are compared with the model's classes. Programs do not depend on it."""

    @property
    def updates(self) -> Updates:
        """What an update is: that of the pipeline if `pipelining` is set. See `resolved`."""
        return self.unpipelined if self.pipelining is None else self.pipelining.updates

    def resolved(self, pipelined: bool) -> Options:
        """These options for a run, with `pipelining` set if and only if the model is pipelined."""
        return dataclasses.replace(self, pipelining=(self.pipelining or Pipelining()) if pipelined else None)

    def of_weights(self, weights: Sequence[keras.Variable]) -> Options:
        """These options for the weights of a model. Functions that choose accumulation dtypes become their results."""
        staged = self.pipelining and self.pipelining.with_updates(self.pipelining.updates.of_weights(weights))
        return dataclasses.replace(self, unpipelined=self.unpipelined.of_weights(weights), pipelining=staged)

    def with_optimizer(self, declared: Declared) -> Options:
        """These options combined with what the wrappers around an optimizer ask for."""
        updates, average = self.updates.with_optimizer(declared), declared.replica_reduction == "mean"
        if self.pipelining is None:
            return dataclasses.replace(self, unpipelined=updates, average_replicas=average)
        return dataclasses.replace(self, pipelining=self.pipelining.with_updates(updates), average_replicas=average)

    def to_json(self) -> str:
        """Text for `from_json`."""
        plain = dataclasses.asdict(dataclasses.replace(self, unpipelined=Updates(), pipelining=None))
        del plain["unpipelined"]
        plain |= self.unpipelined.to_dict()
        plain["pipelining"] = None if self.pipelining is None else self.pipelining.to_dict()
        return json.dumps(plain, default=lambda member: member.name, indent=1)

    @classmethod
    def from_json(cls, text: str) -> Options:
        """The inverse of `to_json`."""
        values = json.loads(text)
        updates = Updates.from_dict(values)
        for name in updates.to_dict():
            del values[name]
        reduction = MetricReduction[values.pop("metric_reduction")]
        stages, pipelining = values.pop("stages", None), values.pop("pipelining", None)
        opening = Opening.from_dict(values.pop("opening", None))
        return cls(
            updates,
            reduction,
            stages=None if stages is None else tuple((name, stage) for name, stage in stages),
            opening=opening,
            pipelining=None if pipelining is None else Pipelining.from_dict(pipelining),
            **values,
        )
