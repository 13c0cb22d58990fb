"""What a user sets on a model, beyond what Keras' `compile` takes: one frozen value, saved and loaded with the model."""

from __future__ import annotations

from dataclasses import dataclass, field

from .accumulate import Accumulation


@dataclass(frozen=True, slots=True)
class Options:
    """Options of one model."""

    accumulation: Accumulation = field(default_factory=Accumulation)
