"""Validation inside a running `fit`."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from openipu.engine.core.state import Logs
from openipu.engine.data.make_feed import make_feed
from openipu.engine.keras_compat import api as keras_api
from openipu.engine.types import Data

import keras

from .session import Session


@dataclass(frozen=True, slots=True)
class Validation:
    """The data on which a `fit` validates, if it has any, and when it does so."""

    data: Data
    frequency: int | Collection[int]
    """The number of epochs from one validation to the next, or the epochs after which to validate."""
    batch_size: int | None
    steps: int | None

    def is_due(self, model: keras.Model, epoch: int) -> bool:
        """Whether to validate at the end of this epoch."""
        return self.data is not None and keras_api.should_evaluate(model, epoch, self.frequency)

    def run(self, session: Session, callbacks: keras.callbacks.CallbackList) -> Logs:
        """Evaluate the model, and return its logs under names that begin with "val_"."""
        model = session.model
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(self.data)
        settings: dict[str, Any] = {"batch_size": self.batch_size, "steps": self.steps}
        session.validation = session.validation or make_feed(
            session.reserve_place("test"), model.steps_per_execution, x, y, sample_weight, **settings, told=True
        )
        # Through the model, because a user's class may have an `evaluate` of its own.
        values = model.evaluate(
            x, y, sample_weight=sample_weight, **settings,
            callbacks=callbacks, return_dict=True, _use_cached_eval_dataset=True,
        )  # fmt: skip
        return {f"val_{name}": value for name, value in values.items()}
