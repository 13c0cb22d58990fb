"""Runs that resume with executions or epochs of another length: random data goes on where it was."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openipu as ipu
from openipu.engine.data.position import Position, random

import keras
import numpy as np
import pytest

import zoo

pytestmark = zoo.KERAS_WARNINGS

STEPS = 20
Drawn = list[float]


class StoppedError(Exception):
    pass


class StopBefore(keras.callbacks.Callback):
    """Ends a run before this step of this epoch."""

    def __init__(self, checkpoint: Any, step: int, epoch: int = 0) -> None:
        super().__init__()
        self._checkpoint, self._at, self._epoch = checkpoint, (epoch, step), 0

    def on_epoch_begin(self, epoch: int, logs: object = None) -> None:  # noqa: ARG002
        self._epoch = epoch

    def on_train_batch_begin(self, batch: int, logs: object = None) -> None:  # noqa: ARG002
        self._checkpoint._checkpoints.wait()
        if (self._epoch, batch) == self._at:
            raise StoppedError


class Draw(keras.callbacks.Callback):
    """Draws random numbers after each execution, as the data does."""

    def on_train_batch_end(self, batch: int, logs: object = None) -> None:  # noqa: ARG002
        np.random.rand(3)


class Sequence(keras.utils.PyDataset):
    def __init__(self, drawn: Drawn) -> None:
        super().__init__()
        self._drawn = drawn

    def __len__(self) -> int:
        return STEPS

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        return batch(self._drawn)


def generator(drawn: Drawn) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    while True:
        yield batch(drawn)


def batch(drawn: Drawn) -> tuple[np.ndarray, np.ndarray]:
    x = np.random.rand(2, 1).astype(np.float32)
    drawn.append(float(x[0, 0]))
    return x, x


def fit(
    folder: Path, width: int, x: Any, stop: int | None = None, stop_epoch: int = 0, also: Any = (), **settings: Any
) -> np.ndarray:
    keras.utils.set_random_seed(1)
    with ipu.ipu_strategy.IPUStrategy().scope():
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile("adam", "mse", steps_per_execution=width)
    checkpoint = ipu.callbacks.Checkpoint(folder, max_share=1)
    stops = [] if stop is None else [StopBefore(checkpoint, stop, stop_epoch)]
    settings = {"shuffle": False, "verbose": 0} | settings
    model.fit(x, callbacks=[*also, checkpoint, *stops], **settings)
    return np.concatenate([w.ravel() for w in model.get_weights()])


@pytest.mark.parametrize("kind", ["generator", "PyDataset"])
@pytest.mark.parametrize(("first", "then"), [(3, 5), (3, 1), (3, 20), (6, 4), (6, 6)])
def test_random_batches_are_neither_repeated_nor_left_out(tmp_path: Path, kind: str, first: int, then: int) -> None:
    def run(folder: str, width: int, stop: int | None = None) -> tuple[np.ndarray, Drawn]:
        drawn: Drawn = []
        x = generator(drawn) if kind == "generator" else Sequence(drawn)
        return fit(tmp_path / folder, width, x, stop, epochs=2, steps_per_epoch=STEPS), drawn

    whole, batches = run("whole", then)
    with pytest.raises(StoppedError):
        run("cut", first, 6)
    end, drawn = run("cut", then)
    assert drawn[-34:] == batches[-34:], "of 40 batches, 6 had been trained"
    assert np.array_equal(end, whole)


@pytest.mark.parametrize("then", [1, 3, 5])
def test_callbacks_that_draw_random_numbers_do_not_disturb_what_was_read_ahead(tmp_path: Path, then: int) -> None:
    """While the batches 3 to 5 trained, the batches 6 to 8 were read, and only then the callback drew its numbers."""

    def run(folder: str, width: int, stop: int | None = None) -> Drawn:
        drawn: Drawn = []
        fit(tmp_path / folder, width, generator(drawn), stop, also=[Draw()], steps_per_epoch=STEPS)
        return drawn

    whole = run("whole", 3)
    with pytest.raises(StoppedError):
        run("cut", 3, 6)
    drawn = run("cut", then)[-14:]
    assert drawn[:3] == whole[6:9]
    assert len(set(drawn)) == 14
    assert then != 3 or drawn == whole[6:]


def rows(count: int) -> dict[str, np.ndarray]:
    x = np.random.default_rng(0).random((count, 1), np.float32)
    return {"x": x, "y": x}


def test_other_data_in_the_middle_of_an_epoch(tmp_path: Path) -> None:
    with pytest.raises(StoppedError):
        fit(tmp_path, 2, **rows(96), batch_size=8, stop=4)
    with pytest.raises(ValueError, match=r"after 4 of 12 batches of the data, but now there are 6"):
        fit(tmp_path, 2, **rows(48), batch_size=8)
    with pytest.raises(ValueError, match=r"after 4 of 12 steps of an epoch, but now there are 8"):
        fit(tmp_path, 2, **rows(96), batch_size=8, steps_per_epoch=8)
    fit(tmp_path, 2, **rows(96), batch_size=8, steps_per_epoch=12)


def test_another_number_of_steps_in_the_middle_of_an_epoch(tmp_path: Path) -> None:
    with pytest.raises(StoppedError):
        fit(tmp_path, 2, generator([]), 4, steps_per_epoch=12)
    with pytest.raises(ValueError, match=r"after 4 of 12 steps of an epoch, but now there are 6"):
        fit(tmp_path, 2, generator([]), steps_per_epoch=6)


@pytest.mark.parametrize("count", [48, 96, 192])
def test_other_data_at_the_end_of_an_epoch(tmp_path: Path, count: int) -> None:
    """The epoch that has ended does not go on with the new data."""
    fit(tmp_path, 2, **rows(96), batch_size=8)
    fit(tmp_path, 2, **rows(count), batch_size=8, epochs=2)
    steps = [int(folder.name) for folder in tmp_path.iterdir() if folder.name.isdigit()]
    assert max(steps) == 12 + count // 8


def test_other_data_and_another_batch_size_in_the_middle_of_an_epoch(tmp_path: Path) -> None:
    with pytest.raises(StoppedError):
        fit(tmp_path, 2, **rows(95), batch_size=8, stop=4)
    with pytest.raises(
        ValueError, match=r"after 4 of 12 batches of the data, of 8 rows each, but now there are 12, of 4"
    ):
        fit(tmp_path, 2, **rows(48), batch_size=4)
    with pytest.raises(
        ValueError, match=r"after 4 of 12 steps of an epoch, of 8 rows each, but now there are 12, of 4"
    ):
        fit(tmp_path, 2, **rows(95), batch_size=4, steps_per_epoch=12)
    fit(tmp_path, 2, **rows(95), batch_size=4)


def test_another_batch_size_at_the_end_of_an_epoch_within_a_pass(tmp_path: Path) -> None:
    """The epoch has ended, though its steps would be fewer larger batches."""
    fit(tmp_path, 1, **rows(96), batch_size=8, steps_per_epoch=4)
    fit(tmp_path, 1, **rows(96), batch_size=16, steps_per_epoch=4, epochs=2)
    assert max(int(folder.name) for folder in tmp_path.iterdir() if folder.name.isdigit()) == 4 + 4


@pytest.mark.parametrize("steps", [2, 4, 9])
def test_another_number_of_steps_at_the_end_of_an_epoch(tmp_path: Path, steps: int) -> None:
    before: Drawn = []
    fit(tmp_path, 2, generator(before), steps_per_epoch=4)
    drawn: Drawn = []
    fit(tmp_path, 2, generator(drawn), steps_per_epoch=steps, epochs=2)
    assert drawn[-steps - 4 : -steps] == before[-4:], "these are read, but not trained again"
    assert max(int(folder.name) for folder in tmp_path.iterdir() if folder.name.isdigit()) == 4 + steps


def test_positions_of_older_versions_can_be_read() -> None:
    here = Position(3, 1, 3, 3, opened=random(), ahead=random(), now=random(), read=2, steps=7)
    fields = json.loads(here.to_json())
    assert Position.from_json(json.dumps(fields)).read == 2
    del fields["read"], fields["steps"], fields["openings"]
    old = Position.from_json(json.dumps(fields))
    assert (old.done, old.read, old.steps) == (3, None, None)
    assert old.for_data(None, None, 9).done == 3
