"""What one update of the weights is: how many micro-batches it takes, and where the optimizer's state is kept."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from .accumulation import Accumulation

if TYPE_CHECKING:
    import keras

    from .wrapped_optimizer import Declared


@dataclass(frozen=True, slots=True)
class Updates:
    """How gradients are accumulated, and what happens to the optimizer's state between updates."""

    accumulation: Accumulation = field(default_factory=Accumulation)
    shard_optimizer: bool = False
    """Whether each replica keeps and updates only its share of the optimizer's state."""
    offload_optimizer: bool | None = None
    """Whether the optimizer's state lives in host memory."""

    @property
    def steps(self) -> int:
        """How many micro-batches one update takes."""
        return self.accumulation.steps

    def of_weights(self, weights: Sequence[keras.Variable]) -> Updates:
        """These updates for the weights of a model. A function that chooses accumulation dtypes becomes its results."""
        return replace(self, accumulation=self.accumulation.of_weights(weights))

    def with_optimizer(self, declared: Declared) -> Updates:
        """These updates combined with what the wrappers around an optimizer ask for."""
        asked = declared.accumulation
        if asked and self.accumulation.steps > 1 and asked != self.accumulation:
            raise ValueError(
                f"The model accumulates {self.accumulation}, but its optimizer {asked}. Set only one of them: "
                "the model's options or the optimizer's wrapper."
            )
        return Updates(
            asked or self.accumulation,
            self.shard_optimizer or declared.shard_state,
            self.offload_optimizer if declared.offload is None else declared.offload,
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain values for `from_dict`."""
        return {
            "accumulation": self.accumulation.to_dict(),
            "shard_optimizer": self.shard_optimizer,
            "offload_optimizer": self.offload_optimizer,
        }

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Updates:
        """The inverse of `to_dict`. Other values in the dict are ignored."""
        return cls(
            Accumulation.from_dict(values["accumulation"]), values["shard_optimizer"], values["offload_optimizer"]
        )
