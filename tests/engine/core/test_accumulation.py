"""Gradient accumulation: when weights change, how gradients are reduced, and what the compiled program contains."""

from __future__ import annotations

import re
from typing import Any

import openipu as ipu
from openipu.engine.core.accumulation import Accumulation, Reduction

import jax.numpy as jnp
import keras
import numpy as np
import pytest
from keras import layers

import replication
import zoo

pytestmark = zoo.KERAS_WARNINGS

METHODS = ("sum", "mean", "running_mean")


@pytest.fixture(scope="module", autouse=True)
def _systems() -> None:
    replication.configure_all()


def dense() -> keras.Model:
    return keras.Sequential([keras.Input((6,)), layers.Dense(5, "tanh"), layers.Dense(1)])


def made(
    replicas: int,
    steps: int | None = None,
    method: Any = "sum",
    make: Any = dense,
    strategy: Any = None,
    **settings: Any,
) -> Any:
    keras.utils.set_random_seed(5)
    with (strategy or replication.strategy(replicas)).scope():
        model = make()
    if steps is not None:
        model.set_gradient_accumulation_options(steps, method)
    model.compile(
        **{"optimizer": keras.optimizers.SGD(0.05), "loss": "mse", "steps_per_execution": steps or 1} | settings
    )
    return model


# --- arithmetic ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", list(Reduction))
@pytest.mark.parametrize("steps", [1, 2, 8])
def test_reductions(method: Reduction, steps: int) -> None:
    gradients = np.random.default_rng(0).normal(size=(steps, 3)).astype("float32")
    accumulation = Accumulation(steps, method)
    total = accumulation.start([jnp.ones(3)])
    for position, gradient in enumerate(gradients):
        total = accumulation.add(total, [jnp.asarray(gradient)], position)
    expected = gradients.sum(0) if method is Reduction.SUM else gradients.mean(0)
    np.testing.assert_allclose(total[0], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("method", "finite"), [("sum", False), ("mean", True), ("running_mean", True)])
def test_means_do_not_overflow_where_a_sum_does(method: str, finite: bool) -> None:
    accumulation = Accumulation(4, Reduction[method.upper()], "float16")
    total = accumulation.start([jnp.zeros(1)])
    for position in range(4):
        total = accumulation.add(total, [jnp.full(1, 60000.0)], position)
    assert total[0].dtype == jnp.float16
    assert bool(jnp.isfinite(total[0])[0]) == finite


# --- updates ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("rows", "updates"), [(48, 6), (49, 7), (44, 6)])
def test_the_optimizer_counts_updates(rows: int, updates: int) -> None:
    """Two replicas, two micro-batches of two samples: eight samples per update, and a last incomplete one."""
    model = made(2, 2)
    model.fit(*zoo.numbers(rows), batch_size=2, verbose=0)
    assert int(model.optimizer.iterations.numpy()) == updates


def test_random_layers_draw_anew_for_every_micro_batch() -> None:
    """Keras' own accumulation takes the mean and draws per step too, so the two must agree."""
    x, y = zoo.numbers(24)

    def make() -> keras.Model:
        return keras.Sequential([keras.Input((6,)), layers.Dropout(0.5), layers.Dense(4, "tanh"), layers.Dense(1)])

    keras.utils.set_random_seed(5)
    plain = make()
    plain.compile(keras.optimizers.SGD(0.05, gradient_accumulation_steps=3), "mse")
    accumulated = made(1, 3, "mean", make)
    for model in (plain, accumulated):
        model.fit(x, y, batch_size=4, verbose=0, shuffle=False)
    replication.assert_close(accumulated.trainable_variables, plain.trainable_variables)


def test_none_keeps_the_number_of_steps_and_each_call_sets_the_rest() -> None:
    model = made(2, 4, "mean")
    model.set_gradient_accumulation_options(dtype="float32", replicated_optimizer_state_sharding=True)
    assert model._ipu_session.options.updates.accumulation == Accumulation(4, Reduction.SUM, "float32")
    assert model._ipu_session.options.updates.shard_optimizer
    model.set_gradient_accumulation_options(2, Reduction.RUNNING_MEAN)
    assert model._ipu_session.options.updates.accumulation == Accumulation(2, Reduction.RUNNING_MEAN)
    assert not model._ipu_session.options.updates.shard_optimizer


def test_new_options_take_effect_in_the_next_fit() -> None:
    x, y = zoo.numbers(32)
    model = made(2, 2, steps_per_execution=4)
    counts = []
    for steps in (2, 4, 1):
        model.set_gradient_accumulation_options(steps)
        before = int(model.optimizer.iterations.numpy())
        model.fit(x, y, batch_size=4, verbose=0)
        counts.append(int(model.optimizer.iterations.numpy()) - before)
    assert counts == [2, 1, 4]


def test_evaluation_and_prediction_do_not_accumulate() -> None:
    x, y = zoo.numbers(22)
    model = made(2, 4, steps_per_execution=8)
    replication.assert_close([model.predict(x, batch_size=4, verbose=0)], [np.asarray(model(x))], what="rows")
    value = model.evaluate(x, y, batch_size=4, verbose=0)
    np.testing.assert_allclose(value, np.square(np.asarray(model(x)) - y).mean(), rtol=1e-5)


def test_gradients_accumulate_in_the_asked_type() -> None:
    """A sum in float16 loses what is too small for it."""
    x, y = zoo.numbers(16)
    changes = []
    for dtype in (None, "float16"):
        model = made(1, 4)
        model.set_gradient_accumulation_options(4, dtype=dtype)
        before = model.get_weights()
        model.fit(x, y, batch_size=4, verbose=0, shuffle=False)
        changes.append(model.get_weights()[0] - before[0])
    difference = np.abs(changes[1] - changes[0]).max() / np.abs(changes[0]).max()
    assert 1e-6 < difference < 1e-2


@pytest.mark.parametrize("how", ["options", "optimizer"])
def test_the_type_to_accumulate_in_may_depend_on_the_weight(how: str, tmp_path: Any) -> None:
    """Kernels in float16, as a sum in float16 shows, and biases (None) in their own type."""

    def dtype(variable: Any) -> Any:
        return "float16" if variable.name == "kernel" else None

    x, y = zoo.numbers(16)
    changes = []
    for chosen in (None, "float16", dtype):
        model = made(1, 4)
        if how == "options":
            model.set_gradient_accumulation_options(4, dtype=chosen)
        else:
            model.set_gradient_accumulation_options(1)
            optimizer = ipu.optimizers.GradientAccumulationOptimizerV2(keras.optimizers.SGD(0.05), 4, dtype=chosen)
            model.compile(optimizer, "mse", steps_per_execution=4)
        before = model.get_weights()
        model.fit(x, y, batch_size=4, verbose=0, shuffle=False)
        changes.append([a - b for a, b in zip(model.get_weights(), before, strict=True)])
    own, half, mixed = changes
    for kernel, bias in ((0, 1), (2, 3)):
        np.testing.assert_array_equal(mixed[kernel], half[kernel])
        np.testing.assert_array_equal(mixed[bias], own[bias])
        assert np.abs(half[kernel] - own[kernel]).max() > 0
    if how == "options":
        model.save(tmp_path / "model.keras")
        with replication.strategy(1).scope():
            loaded = keras.models.load_model(tmp_path / "model.keras")
        assert loaded._ipu_session.options.updates.accumulation.dtype == ("float16", "float32") * 2
    else:
        with pytest.raises(ValueError, match=r"is the function .* cannot be saved"):
            model.optimizer.get_config()


# --- programs --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("replicas", "steps"), [(1, 1), (2, 1), (1, 2), (4, 2), (8, 8)])
def test_two_programs_per_fit(replicas: int, steps: int) -> None:
    """One for whole updates and one for the remainder, for all executions, epochs and fits."""
    rows = 4 * replicas * steps * 2 + 4 * (2 * replicas * steps // 3) + 3
    model = made(replicas, steps)
    for _ in range(2):
        model.fit(*zoo.numbers(rows), batch_size=4, epochs=2, verbose=0)
    assert len(replication.programs(model)) == 2


def test_a_stream_with_a_partial_batch_needs_at_most_two_programs_more() -> None:
    """Its partial batch may come in an execution of its own, or with batches that are left over."""
    x, y = zoo.numbers(4 * 4 * 3 + 7)
    model = made(2, 2)
    model.fit(replication.Batches(x, y, 4), epochs=3, verbose=0)
    assert len(replication.programs(model)) <= 3


@pytest.mark.parametrize("steps", [1, 4])
@pytest.mark.parametrize("method", METHODS)
def test_one_all_reduce_per_update(method: str, steps: int) -> None:
    model = made(4, steps, method, steps_per_execution=2 * steps, metrics=["mae"], make=zoo.own_everything)
    model.fit(*zoo.numbers(4 * 4 * steps * 2 + 9), batch_size=4, verbose=0)
    program, rest = replication.programs(model)
    parts = replication.computations(program.as_text())
    updates = replication.loops(parts)
    assert len(updates) == 1, "one loop over updates"
    inside = [line for name in replication.reached(parts, updates[0]) for line in parts[name]]
    assert replication.collectives(inside) == ["all-reduce"]
    if steps > 1:
        [micro] = replication.loops(parts, updates[0])
        body = [line for name in replication.reached(parts, micro) for line in parts[name]]
        assert replication.collectives(body) == [], "micro-batches are not reduced one by one"
    # Beside it: the metrics (own_everything also has a counter to average).
    everything = [line for instructions in parts.values() for line in instructions]
    assert set(replication.collectives(everything)) == {"all-reduce"}
    assert len(replication.collectives(everything)) <= 1 + 2
    last = replication.collectives(rest.as_text().splitlines())
    assert set(last) == {"all-reduce"}
    assert len(last) <= 1 + 4


def test_small_gradients_are_exchanged_in_one_piece() -> None:
    """Replicas on a CPU meet for each array of an all-reduce. Of ten weights here, one is large."""

    def make() -> keras.Model:
        return keras.Sequential([keras.Input((6,)), *[layers.Dense(4) for _ in range(4)], layers.Dense(1200)])

    model = made(2, 1, make=make, steps_per_execution=2)
    x, _ = zoo.numbers(16)
    model.fit(x, np.zeros((16, 1200), "float32"), batch_size=4, verbose=0)
    [program] = replication.programs(model)
    parts = replication.computations(program.as_text())
    [update] = replication.loops(parts)
    [reduction] = [line for line in parts[update] if " all-reduce(" in line]
    shapes = re.findall(r"f32\[([\d,]*)\]", reduction.split(" all-reduce(")[0])
    assert sorted(shapes) == sorted(["4,1200", str(6 * 4 + 3 * 16 + 4 * 4 + 1200)])


def test_one_replica_has_no_collectives() -> None:
    model = made(1, 2)
    model.fit(*zoo.numbers(19), batch_size=4, verbose=0)
    whole, rest = (program.as_text() for program in replication.programs(model))
    assert " while(" in whole
    assert replication.collectives((whole + rest).splitlines()) == []
