"""Random models through replicas, stages, schedules, accumulation and remainders, against one device."""

from __future__ import annotations

import random
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import openipu as ipu

import keras
import numpy as np
import pytest

import fuzz
import random_models
import replication
import zoo
from contract import OPTIMIZERS
from random_models import Recipe, Step

pytestmark = zoo.KERAS_WARNINGS

STABLE = ("sgd", "momentum", "loss_scale", "ema", "clipnorm")
"""Optimizers that do not magnify gradients that are nothing but rounding, as a bias before a normalisation has."""


@dataclass(frozen=True)
class Point:
    """A model and how it is run."""

    recipe: Recipe
    optimizer: str
    schedule: str
    stages: int
    """1: not pipelined."""
    cuts: tuple[int, ...] | None
    """Where stages begin, as shares of 100; None: automatic ones."""
    replicas: int
    steps: int
    method: str
    batch: int
    updates: int
    rest: int
    """Rows of the incomplete last update, modulo those of an update."""
    streamed: bool
    recompute: bool
    devices: str
    """ "own": each stage has its own device; "shared": the first and the last share one."""
    divided: bool
    """Whether each replica keeps its share of the optimizer's state."""
    results: bool
    """Whether the model evaluates and predicts, too."""

    @property
    def strength(self) -> int:
        return self.replicas * (self.steps if self.method == "sum" else 1)

    @property
    def whole(self) -> int:
        return self.batch * self.replicas * self.steps

    @property
    def rows(self) -> int:
        return self.updates * self.whole + self.rest % self.whole


def allowed(point: Point) -> Point:
    """The nearest point that the schedule and the model can have."""
    unit = {"Grouped": 2 * point.stages, "Interleaved": point.stages}.get(point.schedule, 1)
    if point.stages > 1:
        point = replace(point, steps=-(-point.steps // unit) * unit)
    if point.schedule == "Interleaved" or point.stages < 3:
        point = replace(point, devices="own")
    if point.recipe.mixes and point.optimizer not in STABLE:
        point = replace(point, optimizer="momentum")
    last = point.rest % (point.batch * point.replicas)
    if point.recipe.normalizes and last > point.batch:
        # On replicas, the last partial batch has statistics of its own: see docs/replication.md.
        point = replace(point, rest=point.rest - last % point.batch)
    return replace(point, divided=point.divided and point.replicas > 1)


def draw(rng: random.Random) -> Point:
    some, number = rng.choice, rng.randint
    return allowed(Point(
        recipe=random_models.draw(rng),
        optimizer=some((*STABLE, "adam", "global_clipnorm", "rmsprop", "adamw")),
        schedule=some(("Grouped", "Interleaved", "Sequential", "GPipe", "OneFOneB")),
        stages=some((1, 2, 2, 3, 4)),
        cuts=some((None, tuple(number(0, 99) for _ in range(3)))),
        replicas=some((1, 2)),
        steps=number(1, 4),
        method=some(("sum", "mean", "running_mean")),
        batch=number(3, 5),
        updates=number(1, 2),
        rest=some((0, number(1, 80))),
        streamed=some((False, True)),
        recompute=some((False, True)),
        devices=some(("own", "shared")),
        divided=some((False, False, True)),
        results=some((False, False, True)),
    ))  # fmt: skip


def optimizer(point: Point) -> Any:
    """Slower than elsewhere: random models are deeper, and rounding must not grow."""
    return OPTIMIZERS[point.optimizer](10 * point.strength)


def configure(devices: int, point: Point) -> None:
    config = ipu.config.IPUConfig()
    config.auto_select_ipus = devices * point.replicas
    config.allow_recompute = point.recompute
    config.norms.experimental.distributed_batch_norm_replica_group_size = point.replicas
    config.configure_ipu_system()


def leaves(assignment: list[Any]) -> Iterator[Any]:
    """The layer calls, those of nested models included."""
    for part in assignment:
        yield from leaves(part.pipeline_stage_assignments) if part.is_nested_model else (part,)


def cut(model: Any, point: Point) -> int:
    """Give the model its stages, at most one per layer, and return how many there are."""
    assignment = model.get_pipeline_stage_assignment()
    layers = list(leaves(assignment))
    count = len(layers)
    stages = min(point.stages, count)
    if point.cuts is None:
        rows, _ = random_models.data(point.recipe, point.batch)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Stage . of model .* of the cost")  # tiny models are often uneven
            model.set_pipeline_stage_assignment("auto", stages=stages, inputs=rows, print_fn=None)
        return stages
    begins: set[int] = set()
    for share in point.cuts[: stages - 1]:
        free = [i for i in range(1, count) if i not in begins]
        begins.add(free[share * len(free) // 100])
    for i, part in enumerate(layers):
        part.pipeline_stage = sum(begin <= i for begin in begins)
    model.set_pipeline_stage_assignment(assignment)
    return stages


def run_here(point: Point) -> keras.Model:
    """A compiled model with its stages and replicas."""
    configure(1, point)  # for models that are not pipelined, and to count layers
    keras.utils.set_random_seed(11)
    with ipu.ipu_strategy.IPUStrategy().scope():
        model, shares_state = random_models.make(point.recipe)
    if point.stages == 1 or (stages := cut(model, point)) == 1:
        model.reset_pipeline_stage_assignment()
        model.set_gradient_accumulation_options(
            point.steps, point.method, replicated_optimizer_state_sharding=point.divided
        )
    else:
        # Calls that change the same variables have to be on one device.
        devices = 1 if shares_state else 2 if point.devices == "shared" else stages
        configure(devices, point)
        model.set_pipelining_options(
            gradient_accumulation_steps_per_replica=point.steps,
            gradient_accumulation_reduction_method=point.method,
            pipeline_schedule="GPipe" if shares_state and point.schedule == "Interleaved" else point.schedule,
            device_mapping=[stage % devices for stage in range(stages)],
            replicated_optimizer_state_sharding=point.divided,
        )
    model.compile(optimizer(point), "mse", steps_per_execution=2 * point.steps)
    return model


def run_plain(point: Point) -> keras.Model:
    keras.utils.set_random_seed(11)
    model, _ = random_models.make(point.recipe)
    if point.recipe.mixes:
        replication.in_micro_batches(model, point.batch * point.replicas)
    model.compile(replication.amplified(optimizer(point), point.strength), "mse")
    return model


def trained(model: keras.Model, point: Point, batch: int, rows: int) -> tuple[list[Any], Any, Any, list[Any]]:
    """Weights and history of `fit` with batches of `batch`, then results with batches of `rows`."""
    x, y = random_models.data(point.recipe, point.rows)
    if point.streamed:
        history = model.fit(replication.Batches(x, y, batch), shuffle=False, verbose=0, epochs=2).history
    else:
        history = model.fit(x, y, batch_size=batch, verbose=0, epochs=2).history
    weights = [v.numpy() for v in model.variables]
    if not point.results:
        return weights, history, {}, []
    evaluated = model.evaluate(x, y, batch_size=rows, verbose=0, return_dict=True)
    return weights, history, evaluated, keras.tree.flatten(model.predict(x, batch_size=rows, verbose=0))


def assert_same(actual: Any, expected: Any, tolerance: float = 1e-5) -> None:
    replication.assert_close(actual[0], expected[0], tolerance)
    replication.assert_same_history(actual[1], expected[1], tolerance=tolerance)
    replication.assert_same_history(actual[2], expected[2], tolerance=tolerance)
    replication.assert_close(actual[3], expected[3], tolerance, what="predictions")


def magnified(point: Point, expected: Any) -> float:
    """How far plain Keras gets from its own weights, relative to the largest, if it starts one rounding off."""
    other = run_plain(point)
    for variable in other.trainable_variables:
        variable.assign(variable.numpy() * np.float32(1 + 2**-22))
    weights = trained(other, point, point.whole, point.batch * point.replicas)[0]
    pairs = [(np.float64(a), np.float64(b)) for a, b in zip(weights, expected[0], strict=True)]
    return max(np.abs(a - b).max() / max(1e-2, np.abs(b).max()) for a, b in pairs)


def check(point: Point) -> str:
    """Compare with one device. Where training magnifies rounding, the difference may be as large as that makes it."""
    expected = trained(run_plain(point), point, point.whole, point.batch * point.replicas)
    actual = trained(run_here(point), point, point.batch, point.batch)
    cut = "automatic" if point.cuts is None else "given"
    stages = "without stages" if point.stages == 1 else f"in {cut} stages"
    kind = f"{stages} (replicas: {point.replicas})"
    try:
        assert_same(actual, expected)
    except AssertionError:
        if not 1e-6 < (tolerance := magnified(point, expected)) < 1e-3:
            raise
        assert_same(actual, expected, 10 * tolerance)  # more than one rounding differs
        kind = "magnify rounding"
    return kind


# --- what random cases found -----------------------------------------------------------------------------------------


def tail_on_replicas(*kinds: str, **changes: Any) -> Point:
    """Two replicas of two stages, with 2 rows in the last micro-batch of the second replica."""
    recipe = Recipe((Step("dense"), *map(Step, kinds)), subclassed=changes.pop("subclassed", False))
    return replace(
        Point(
            recipe=recipe, optimizer="sgd", schedule="GPipe", stages=2, cuts=(50, 0, 0), replicas=2, steps=2,
            method="mean", batch=5, updates=1, rest=7, streamed=False, recompute=False, devices="own", divided=False,
            results=False,
        ),
        **changes,
    )  # fmt: skip


FOUND = {
    "dropout draws by position in a smaller last batch": tail_on_replicas("dropout"),
    "predictions with random numbers of a smaller last batch": tail_on_replicas("composite_noise", results=True),
    "a layer with dropout in a subclassed model is traced again": tail_on_replicas("composite_noise", subclassed=True),
}


@pytest.mark.parametrize("point", FOUND.values(), ids=FOUND.keys())
def test_found(point: Point) -> None:
    check(point)


@pytest.mark.slow
def test_random_models_equal_one_device(record_property: Any) -> None:
    fuzz.run(draw, check, default=18, record=record_property)
