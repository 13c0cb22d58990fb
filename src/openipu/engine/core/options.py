"""What a user sets on a model beyond Keras' `compile`: one frozen value, saved and loaded with the model."""

from __future__ import annotations

import dataclasses
import enum
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from .accumulation import Accumulation
from .pipelining import Pipelining

if TYPE_CHECKING:
    from .wrapped_optimizer import Declared


class MetricReduction(enum.Enum):
    """What is reported of the metrics of several replicas."""

    NONE = "NONE"
    """The true value over the samples of all replicas."""
    LIST = "LIST"
    """The values of each replica."""
    SUM = "SUM"
    """The sum of the replicas' values."""
    MEAN = "MEAN"
    """The mean of the replicas' values."""


@dataclass(frozen=True, slots=True)
class Options:
    """Options of one model.

    Where it is pipelined, `pipelining` says what `accumulation`, `shard_optimizer` and `offload_optimizer` say else.
    """

    accumulation: Accumulation = field(default_factory=Accumulation)
    metric_reduction: MetricReduction = MetricReduction.NONE
    shard_optimizer: bool = False
    """Each replica keeps and updates its share of the optimizer's state."""
    offload_optimizer: bool | None = None
    """Whether the optimizer's state is to live in host memory."""
    average_replicas: bool = False
    """Gradients are averaged over replicas instead of summed: what a `CrossReplicaOptimizer` asks for."""
    stages: tuple[tuple[str, int], ...] | None = None
    """Name and stage of each layer call (pipeline/partition/assignment.py).

    None: as `PipelineStage` says. Empty: not pipelined.
    """
    pipelining: Pipelining | None = None
    """How the stages are run; None is the same as `Pipelining()`."""
    live_callbacks: bool = False
    """Batch callbacks are called for each step, while the execution runs."""
    prefetch_depth: int | None = None
    """Batches that are kept ready for executions to come."""
    buffer_depth: int | None = None
    """Steps whose logs may wait for the callbacks."""

    def of_weights(self, weights: Sequence[Any]) -> Options:
        """These options with the dtypes of gradients by name, where a function of a weight gives them."""
        own = self.pipelining
        own = own and dataclasses.replace(own, accumulation=own.accumulation.of_weights(weights))
        return dataclasses.replace(self, accumulation=self.accumulation.of_weights(weights), pipelining=own)

    def in_stages(self) -> Options:
        """The options of the pipelined model."""
        own = self.pipelining or Pipelining()
        return dataclasses.replace(
            self,
            accumulation=own.accumulation,
            shard_optimizer=own.shard_optimizer,
            offload_optimizer=own.offload_optimizer,
        )

    def with_optimizer(self, plan: Declared) -> Options:
        """These options together with what the wrappers around an optimizer ask for."""
        accumulation = plan.accumulation or self.accumulation
        if plan.accumulation and self.accumulation.steps > 1 and plan.accumulation != self.accumulation:
            raise ValueError(
                f"The model accumulates {self.accumulation} and its optimizer {plan.accumulation}. Set one of them: "
                "the options of the model, or the optimizer's wrapper."
            )
        return dataclasses.replace(
            self,
            accumulation=accumulation,
            shard_optimizer=self.shard_optimizer or plan.shard_state,
            offload_optimizer=self.offload_optimizer if plan.offload is None else plan.offload,
            average_replicas=plan.replica_reduction == "mean",
        )

    def to_json(self) -> str:
        """A text that `from_json` reads."""
        plain = dataclasses.asdict(dataclasses.replace(self, pipelining=None))
        plain["accumulation"] = self.accumulation.to_dict()
        plain["pipelining"] = None if self.pipelining is None else self.pipelining.to_dict()
        return json.dumps(plain, default=lambda member: member.name, indent=1)

    @classmethod
    def from_json(cls, text: str) -> Options:
        """The inverse of `to_json`."""
        values = json.loads(text)
        accumulation = Accumulation.from_dict(values.pop("accumulation"))
        reduction = MetricReduction[values.pop("metric_reduction")]
        stages, pipelining = values.pop("stages", None), values.pop("pipelining", None)
        return cls(
            accumulation=accumulation,
            metric_reduction=reduction,
            stages=None if stages is None else tuple((name, stage) for name, stage in stages),
            pipelining=None if pipelining is None else Pipelining.from_dict(pipelining),
            **values,
        )
