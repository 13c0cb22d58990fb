"""A run that resumes with another batch size: no row is read twice, and none is left out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import openipu as ipu

import keras
import numpy as np
import pytest

import zoo

pytestmark = zoo.KERAS_WARNINGS

ROWS = 20
X = np.arange(ROWS, dtype=np.float32)[:, None] + 1


class Total(keras.losses.Loss):
    """With SGD and a rate of 1, the weight of a model that multiplies becomes the sum of all inputs it has seen."""

    def __init__(self) -> None:
        super().__init__(reduction="sum")

    def call(self, y_true: Any, y_pred: Any) -> Any:
        return 0 * y_true - y_pred


class StoppedError(Exception):
    pass


class StopAt(keras.callbacks.Callback):
    """Ends a run before this batch of the first epoch, or before the second epoch."""

    def __init__(self, checkpoint: Any, batch: int) -> None:
        super().__init__()
        self._checkpoint, self._batch, self._epoch = checkpoint, batch, 0

    def on_epoch_begin(self, epoch: int, logs: object = None) -> None:  # noqa: ARG002
        self._epoch = epoch
        self._stop_if(epoch > 0)

    def on_train_batch_begin(self, batch: int, logs: object = None) -> None:  # noqa: ARG002
        self._stop_if(batch == self._batch)

    def _stop_if(self, due: bool) -> None:
        self._checkpoint._checkpoints.wait()
        if due:
            raise StoppedError


def run(folder: Path, batch_size: int, stop_at: int | None = None) -> float:
    """Train for two epochs, and return the sum of all inputs."""
    with ipu.ipu_strategy.IPUStrategy().scope():
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")])
    model.compile(keras.optimizers.SGD(1.0), Total())
    checkpoint = ipu.callbacks.Checkpoint(folder, max_share=1)
    callbacks = [checkpoint] if stop_at is None else [checkpoint, StopAt(checkpoint, stop_at)]
    model.fit(X, X, batch_size=batch_size, epochs=2, verbose=0, callbacks=callbacks)
    return float(model.get_weights()[0][0, 0])


@pytest.mark.parametrize(("stop_at", "then"), [(10, 8), (10, 3), (4, 8), (4, 1)])
def test_every_row_is_read_once_in_each_epoch(tmp_path: Path, stop_at: int, then: int) -> None:
    """After 10 batches of 2 rows, the first epoch has ended, though 20 rows do not fill batches of 8 rows."""
    with pytest.raises(StoppedError):
        run(tmp_path, 2, stop_at)
    assert run(tmp_path, then) == 2 * X.sum()


def test_the_middle_of_the_last_batch_is_not_the_end_of_an_epoch(tmp_path: Path) -> None:
    """After 9 batches of 2 rows, 2 of the 4 rows in the last batch of 8 are still to come."""
    with pytest.raises(StoppedError):
        run(tmp_path, 2, 9)
    with pytest.raises(ValueError, match=r"after 9 batches of 2 rows, which is in the middle of a batch of 8 rows"):
        run(tmp_path, 8)
    assert run(tmp_path, 6) == 2 * X.sum()
