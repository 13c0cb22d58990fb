"""A model's loop, kept where Keras keeps its own step functions."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

from openipu.engine.core.keras_steps import make_step
from openipu.engine.core.model_state import unshared, variables_of
from openipu.engine.core.options import Options
from openipu.engine.core.state import Mode, parts_of, state_of
from openipu.engine.core.state_layout import ReplicaLayout, StateLayout
from openipu.engine.core.trainer import make_trainer
from openipu.engine.devices.placement import Placement
from openipu.engine.host_io.step_logs import StepLogs
from openipu.engine.loop.arrays import rows_of
from openipu.engine.loop.loop import Loop
from openipu.engine.loop.replica_loop import ReplicaLoop, make_replica_loop
from openipu.engine.pipeline.build.keras_pipeline import KerasPipeline, make_keras_loop

import keras


class StepFunction:
    """A loop under Keras' calling convention. It sits where Keras keeps its own, so `compile` drops it too.

    `train_on_batch`, `test_on_batch` and `predict_on_batch` call it with the parts of the state that they use.
    """

    def __init__(
        self,
        model: keras.Model,
        mode: Mode,
        place: Placement,
        options: Options,
        pipeline: KerasPipeline | None = None,
    ) -> None:
        self.place, self.options, self._mode = place, options, mode
        self._model, self._owners = model, variables_of(model, mode)
        self.live = StepLogs(options.buffer_depth) if options.live_callbacks else None
        self.loop: Loop
        self.spread: StateLayout
        if pipeline is not None:
            self.loop, self.spread = make_keras_loop(model, mode, place, options, pipeline, self.live)
        else:
            self.loop, self.spread = _make_loop(model, mode, place, options, self.live)

    def fits(self, place: Placement, options: Options) -> bool:
        """Whether it still runs the model: at this place, with these options, and with the same variables as before.

        Those change without `compile` when layers are frozen, LoRA is enabled, or the model gets another optimizer.
        """
        pairs = zip(self._owners, variables_of(self._model, self._mode), strict=True)
        same = all(len(old) == len(new) and all(map(operator.is_, old, new)) for old, new in pairs)
        return same and (self.place, self.options) == (place, options)

    def __call__(self, parts: tuple[Any, ...], iterator: Iterator[Any]) -> tuple[Any, tuple[Any, ...]]:
        """Run one step on the next batch, and return its logs or outputs and the new parts of the state."""
        batch = next(iterator)
        if self._mode == "train" and rows_of(batch) == 0:
            raise ValueError("The batch has 0 samples. Give at least one row to train on.")
        state = self.spread.spread(unshared(state_of(self._mode, parts), self._model))
        result, state = self.loop.execute_one(state, batch)
        value = result.rows() if self._mode == "predict" else result.value
        return value, parts_of(self._mode, self.spread.gather(state))


def _make_loop(
    model: keras.Model, mode: Mode, place: Placement, options: Options, live: StepLogs | None
) -> tuple[ReplicaLoop, ReplicaLayout]:
    """The loop for a model that is not pipelined, and the layout of its state on the devices."""
    trainer = None
    if mode == "train":
        trainer = make_trainer(model.optimizer, model.trainable_variables, place, options)
    step = make_step(model, mode, place, options, trainer)
    return make_replica_loop(f"{model.name}_{mode}", step, place, trainer, live)
