"""Weights and metrics of a pipelined model are those of one device with the whole batch, whatever the stages do."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import openipu as ipu

import keras
import numpy as np
import pytest
from keras import layers, ops

import replication
import zoo
from contract import CASES as CONTRACT_CASES
from contract import OPTIMIZERS

pytestmark = zoo.KERAS_WARNINGS

BATCH = 4


def skips() -> keras.Model:
    """Skip connections over several stages, from the inputs to the outputs, and a layer that is used twice."""
    x = inputs = keras.Input((6,))
    twice = layers.Dense(6, "tanh")
    first = x = twice(x)
    x = layers.Dense(6, "relu")(x)
    x = twice(x)
    x = layers.Add()([x, first])
    x = layers.Concatenate()([layers.Dense(4)(x), inputs])
    return keras.Model(inputs, layers.Dense(3)(x))


def penalised() -> keras.Model:
    """Regularizers, an activity loss and an operation between layers."""
    x = inputs = keras.Input((6,))
    x = layers.Dense(6, "tanh", kernel_regularizer="l2")(x)
    x = layers.Dense(6, activity_regularizer=keras.regularizers.L2(0.1))(ops.relu(x) + 0.5)
    x = layers.Dense(6, "tanh", bias_regularizer="l1")(x)
    return keras.Model(inputs, layers.Dense(3)(x))


def tied() -> keras.Model:
    """A decoder block between an embedding and the same embedding: the first and the last stage share its weights."""
    embedding = layers.ReversibleEmbedding(12, 8)
    x = embedding(inputs := keras.Input((6,), dtype="int32"))
    x = layers.LayerNormalization()(x + layers.MultiHeadAttention(2, 4, use_bias=False)(x, x, use_causal_mask=True))
    x = layers.LayerNormalization()(x + layers.Dense(8, "gelu")(x))
    return keras.Model(inputs, embedding(x, reverse=True))


def sentences(rows: int) -> tuple[np.ndarray, np.ndarray]:
    found = np.random.default_rng(rows).integers(0, 12, (rows, 7)).astype("int32")
    return found[:, :-1], found[:, 1:]


CASES = CONTRACT_CASES | {
    "tied": zoo.Case(tied, sentences, zoo.CASES["dense"].compile),
    "skips": zoo.Case(skips, zoo.table, zoo.CASES["dense"].compile),
    "penalised": zoo.Case(penalised, zoo.table, zoo.CASES["dense"].compile),
}
MODELS = ("skips", "tied", "cnn", "penalised", "two_in_two_out", "own_everything", "mixed_bfloat16", "mixed_float16",
          "averaged_weights_and_schedule", "frozen", "separable", "encoder", "recurrent", "dense")  # fmt: skip
LAYERS = dict.fromkeys(("dense", "recurrent", "mixed_bfloat16", "mixed_float16", "averaged_weights_and_schedule"), 2)
LAYERS["own_everything"] = 3
"""Of those models that have fewer than four."""
SCHEDULES = ("Grouped", "Interleaved", "Sequential", "GPipe", "OneFOneB")


class Point(NamedTuple):
    """One point of the grid."""

    model: str
    optimizer: str
    schedule: str
    stages: int
    replicas: int
    recompute: bool
    feed: str
    remainder: bool
    devices: str
    """ "own": each stage has its own device; "shared": the first and the last share one."""

    @property
    def steps(self) -> int:
        """Micro-batches per update: a multiple of what every schedule asks for."""
        return {2: 8, 3: 12, 4: 8}[self.stages]

    @property
    def batch(self) -> int:
        return BATCH * self.replicas * self.steps

    @property
    def rows(self) -> int:
        """Two full updates; as a remainder, some full micro-batches and a partial one."""
        return 2 * self.batch + (3 * self.replicas * BATCH + BATCH + 3 if self.remainder else 0)

    def __str__(self) -> str:
        parts = (self.model, self.optimizer, self.schedule, f"s{self.stages}", f"r{self.replicas}", self.feed)
        return "-".join(parts) + "-recompute" * self.recompute + "-remainder" * self.remainder + f"-{self.devices}"


LEVELS: tuple[tuple[Any, ...], ...] = (
    MODELS, tuple(OPTIMIZERS), SCHEDULES, (2, 3, 4), (1, 2), (False, True), ("resident", "streamed"), (False, True),
    ("own", "shared"),
)  # fmt: skip


RUN = range(2, len(LEVELS))
"""The factors that say how a model is run; all of their levels are there by default."""


def grid() -> list[Any]:
    """A few points by default, with every schedule; each model and optimizer, and more combinations, are slow."""
    rng = np.random.default_rng(5)
    count = max(map(len, LEVELS))
    columns = [rng.permutation(np.resize(np.arange(len(level)), count)) for level in LEVELS]
    base = [Point(*(level[i] for level, i in zip(LEVELS, row, strict=True))) for row in zip(*columns, strict=True)]
    more = [Point(*(level[rng.integers(len(level))] for level in LEVELS)) for _ in range(60)]
    points = dict.fromkeys(map(_allowed, [*base, *more]))
    seen: set[Any] = set()
    found = []
    for point in points:
        levels = {(i, point[i]) for i in RUN}
        found.append(pytest.param(point, marks=pytest.mark.slow if levels <= seen else (), id=str(point)))
        seen |= levels
    return found


def _allowed(point: Point) -> Point:
    """No more stages than layers; and Interleaved trains only with a device for each stage."""
    point = point._replace(stages=min(point.stages, LAYERS.get(point.model, 4)))
    return point._replace(devices="own") if point.schedule == "Interleaved" or point.stages == 2 else point


@pytest.fixture(scope="module", autouse=True)
def _systems() -> Iterator[None]:
    yield
    plain.cache_clear()


def pipelined(point: Point) -> keras.Model:
    case = CASES[point.model]
    config = ipu.config.IPUConfig()
    devices = 2 if point.devices == "shared" else point.stages
    config.auto_select_ipus = devices * point.replicas
    config.allow_recompute = point.recompute
    config.configure_ipu_system()
    keras.utils.set_random_seed(11)
    with zoo.policy(case.policy), ipu.ipu_strategy.IPUStrategy().scope():
        model = case.make()
        assign(model, point.stages)
        model.set_pipelining_options(
            gradient_accumulation_steps_per_replica=point.steps,
            gradient_accumulation_reduction_method="mean",
            pipeline_schedule=point.schedule,
            device_mapping=[stage % devices for stage in range(point.stages)],
        )
        optimizer = OPTIMIZERS[point.optimizer](point.replicas)
        model.compile(**case.compile() | {"optimizer": optimizer}, steps_per_execution=2 * point.steps)
    return model


def assign(model: keras.Model, stages: int) -> None:
    """Equal numbers of layers to each stage, in their order."""
    assignment = model.get_pipeline_stage_assignment()
    for i, part in enumerate(assignment):
        part.pipeline_stage = i * stages // len(assignment)
    model.set_pipeline_stage_assignment(assignment)


class Result(NamedTuple):
    weights: list[Any]
    history: dict[str, list[float]]
    evaluated: dict[str, float]
    predicted: Any


def train(model: keras.Model, x: Any, y: Any, batch: int, feed: str) -> Result:
    data = (replication.Batches(x, y, batch),) if feed == "streamed" else (x, y)
    settings = {} if feed == "streamed" else {"batch_size": batch}
    history = model.fit(*data, **settings, epochs=2, verbose=0, shuffle=feed == "resident").history
    evaluated = model.evaluate(x, y, batch_size=batch, verbose=0, return_dict=True)
    return Result(
        [v.numpy() for v in model.trainable_variables],
        history,
        evaluated,
        model.predict(x, batch_size=batch, verbose=0),
    )


@functools.cache
def plain(point: Point) -> Result:
    """The same with plain Keras on one device."""
    case = CASES[point.model]
    optimizer = OPTIMIZERS[point.optimizer](point.replicas)
    keras.utils.set_random_seed(11)
    with zoo.policy(case.policy):
        model = case.make()
        optimizer = replication.amplified(optimizer, point.replicas)
        if case.policy != "float32":
            replication.in_micro_batches(model, BATCH)
        model.compile(**case.compile() | {"optimizer": optimizer})
    x, y = case.data(point.rows)
    return train(model, x, y, point.batch, point.feed)


@pytest.mark.parametrize("point", grid())
def test_equals_one_device(point: Point) -> None:
    case = CASES[point.model]
    model = pipelined(point)
    actual = train(model, *case.data(point.rows), BATCH, point.feed)
    expected = plain(point)
    turned = 0 if case.policy == "float32" else 1 / point.rows
    replication.assert_close(actual.weights, expected.weights)
    for a, b in zip(keras.tree.flatten(actual.predicted), keras.tree.flatten(expected.predicted), strict=True):
        replication.assert_close([a], [b], what="predictions")
    replication.assert_same_history(actual.history, expected.history, turned)
    replication.assert_same_history(actual.evaluated, expected.evaluated, turned)
    if point.feed == "resident":
        assert len(replication.programs(model)) == 1 + point.remainder


def test_the_default_grid_has_every_level() -> None:
    default = [p.values[0] for p in grid() if not p.marks]
    for i in RUN:
        assert {p[i] for p in default} == set(LEVELS[i])
    assert len(default) <= 8
    for i in range(2):
        assert {p.values[0][i] for p in grid()} == set(LEVELS[i])


def test_the_comparison_notices_a_lost_sample() -> None:
    point = Point("dense", "sgd", "Grouped", 2, 1, False, "streamed", True, "own")
    x, y = CASES["dense"].data(point.rows)
    actual = train(pipelined(point), x[:-1], y[:-1], BATCH, point.feed)
    with pytest.raises(AssertionError):
        replication.assert_close(actual.weights, plain(point).weights)
