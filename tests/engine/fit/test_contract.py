"""Weights and metrics of any number of replicas and micro-batches are those of one device with the whole batch.

Gradients are summed over replicas, and over micro-batches with the method "sum". The one device that is compared with
therefore sees each gradient as many times as large (`replication.amplified`), whatever its optimizer is.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import keras
import pytest

import replication
import zoo
from contract import CASES, OPTIMIZERS

pytestmark = zoo.KERAS_WARNINGS

BATCH = 4
UPDATES = 3

# Not here: models that mix the samples of a batch or draw random numbers (test_replicas.py), and own train steps.
MODELS = (
    "dense", "cnn", "two_in_two_out", "own_everything", "mixed_bfloat16", "mixed_float16",
    "averaged_weights_and_schedule", "frozen", "separable", "encoder", "recurrent",
)  # fmt: skip


class Point(NamedTuple):
    """One point of the grid."""

    model: str
    optimizer: str
    replicas: int
    steps: int
    method: str
    feed: str
    remainder: bool

    @property
    def batch(self) -> int:
        """Samples of a full update."""
        return BATCH * self.replicas * self.steps

    @property
    def rows(self) -> int:
        """Three full updates; as a remainder, some full micro-batches and a partial one."""
        rest = 2 * self.replicas * self.steps // 3 * BATCH + 3 if self.remainder else 0
        return UPDATES * self.batch + rest

    @property
    def strength(self) -> int:
        return self.replicas * (self.steps if self.method == "sum" else 1)

    def __str__(self) -> str:
        parts = (self.model, self.optimizer, f"r{self.replicas}", f"ga{self.steps}", self.method, self.feed)
        return "-".join(parts) + "-remainder" * self.remainder


LEVELS = (MODELS, tuple(OPTIMIZERS), (1, 2, 4, 8), (1, 2, 8), ("sum", "mean", "running_mean"), ("resident", "streamed"),
          (False, True))  # fmt: skip


RUN = list(itertools.combinations(range(2, len(LEVELS)), 2))
"""Pairs of factors that say how a model is run."""


def cover(groups: list[tuple[int, ...]], points: list[Point]) -> Iterator[Point]:
    """More points, until every combination of the levels of each group of factors is there, found greedily."""
    wanted = [(g, values) for g in groups for values in itertools.product(*(LEVELS[i] for i in g))]
    seen = {(g, tuple(p[i] for i in g)) for p in points for g in groups}
    missing = {key: None for key in wanted if key not in seen}
    turn = itertools.count(len(points))

    def reached(levels: dict[int, Any]) -> set[Any]:
        return {(g, tuple(levels[i] for i in g)) for g in groups if levels.keys() >= set(g)}

    while missing:
        group, values = next(iter(missing))
        fixed: dict[int, Any] = dict(zip(group, values, strict=True))
        for factor in sorted(set(range(len(LEVELS))) - set(group), key=lambda i: -len(LEVELS[i])):
            shift = next(turn) % len(LEVELS[factor])
            trials = [fixed | {factor: level} for level in LEVELS[factor][shift:] + LEVELS[factor][:shift]]
            fixed = max(trials, key=lambda trial: len(reached(trial) & missing.keys()))
        for key in reached(fixed):
            missing.pop(key, None)
        yield Point(*(fixed[i] for i in range(len(LEVELS))))


def grid() -> list[Any]:
    """Every model and optimizer, and every pair of levels of how they are run, by default; the rest is slow."""
    default = list(cover([*RUN, (0,), (1,)], []))
    pairs = list(itertools.combinations(range(len(LEVELS)), 2))
    more = list(cover([*pairs, (2, 3, 4, 6), (1, 2, 3), (0, 2, 3)], default))
    marked = [(p, ()) for p in default] + [(p, pytest.mark.slow) for p in more]
    return [pytest.param(p, marks=m, id=str(p)) for p, m in sorted(marked, key=lambda pair: pair[0].replicas)]


@pytest.fixture(scope="module", autouse=True)
def _systems() -> Iterator[None]:
    replication.configure_all()
    yield
    plain.cache_clear()


class Result(NamedTuple):
    weights: list[Any]
    history: dict[str, list[float]]
    iterations: int
    model: Any


def train(model: keras.Model, x: Any, y: Any, batch: int, feed: str) -> Result:
    data = (replication.Batches(x, y, batch),) if feed == "streamed" else (x, y)
    settings = {} if feed == "streamed" else {"batch_size": batch}
    history = model.fit(*data, **settings, epochs=2, verbose=0, shuffle=feed == "resident").history
    optimizer = getattr(model.optimizer, "inner_optimizer", model.optimizer)
    return Result([v.numpy() for v in model.trainable_variables], history, int(optimizer.iterations.numpy()), model)


def make(point: Point, *, one_device: bool) -> keras.Model:
    case = CASES[point.model]
    optimizer = OPTIMIZERS[point.optimizer](point.strength)
    keras.utils.set_random_seed(11)
    with zoo.policy(case.policy):
        if one_device:
            model = case.make()
            optimizer = replication.amplified(optimizer, point.strength)
            if case.policy != "float32":
                replication.in_micro_batches(model, BATCH)
            model.compile(**case.compile() | {"optimizer": optimizer})
            return model
        with replication.strategy(point.replicas).scope():
            model = case.make()
        model.set_gradient_accumulation_options(point.steps, point.method)
        # Two updates per execution, so that an epoch has a full and an incomplete one.
        model.compile(**case.compile() | {"optimizer": optimizer}, steps_per_execution=2 * point.steps)
        return model


@functools.cache
def plain(point: Point) -> Result:
    """The same with plain Keras on one device, for the point with 1 replica and 1 step that has the same batches."""
    x, y = CASES[point.model].data(point.rows)
    return train(make(point, one_device=True), x, y, point.batch, point.feed)


@pytest.mark.parametrize("point", grid())
def test_equals_one_device(point: Point) -> None:
    case = CASES[point.model]
    actual = train(make(point, one_device=False), *case.data(point.rows), BATCH, point.feed)
    expected = plain(point)
    assert actual.iterations == expected.iterations == 2 * (UPDATES + point.remainder)
    replication.assert_close(actual.weights, expected.weights)
    turned = 0 if case.policy == "float32" else 1 / point.rows
    replication.assert_same_history(actual.history, expected.history, turned)
    if point.feed == "resident":
        assert len(replication.programs(actual.model)) == 1 + point.remainder


def test_the_default_grid_has_every_pair() -> None:
    points = [p.values[0] for p in grid()]
    default = [p.values[0] for p in grid() if not p.marks]
    assert len(default) <= 30
    for first, second in itertools.combinations(range(len(LEVELS)), 2):
        wanted = set(itertools.product(LEVELS[first], LEVELS[second]))
        assert {(p[first], p[second]) for p in (default if (first, second) in RUN else points)} == wanted


def test_the_comparison_notices_a_lost_sample() -> None:
    point = Point("dense", "sgd", 2, 2, "sum", "streamed", True)
    x, y = zoo.table(point.rows)
    actual = train(make(point, one_device=False), x[:-1], y[:-1], BATCH, point.feed)
    with pytest.raises(AssertionError):
        replication.assert_close(actual.weights, plain(point).weights)
    with pytest.raises(AssertionError):
        replication.assert_same_history(actual.history, plain(point).history)
