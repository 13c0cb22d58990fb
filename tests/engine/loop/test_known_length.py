"""The loop of known length, which only GPUs use, gives the same results on a CPU."""

from __future__ import annotations

from typing import Any

from openipu.engine.loop import loop_shape, replica_loop
from openipu.engine.loop.loop_shape import SMALL_STEP, prefers_known_length

import jax
import keras
import numpy as np
import pytest

import replication
import zoo

pytestmark = zoo.KERAS_WARNINGS


@pytest.fixture(autouse=True)
def _systems() -> None:
    replication.configure_all()


def test_only_gpus_prefer_it() -> None:
    assert [p for p in ("cpu", "gpu", "tpu") if prefers_known_length(p)] == ["gpu"]


def test_small_updates_are_unrolled() -> None:
    assert [loop_shape.unrolled(size) for size in (1, SMALL_STEP, SMALL_STEP + 1)] == [4, 4, 1]


def test_the_equations_of_inner_programs_count() -> None:
    def program(x: Any) -> Any:
        return jax.lax.fori_loop(0, 3, lambda _, y: y * 2 + 1, x) - x

    assert loop_shape.equations(jax.make_jaxpr(lambda x: x * 2 + 1)(1.0).jaxpr) == 2
    assert loop_shape.equations(jax.make_jaxpr(program)(1.0).jaxpr) > 4


def test_the_equations_of_a_scan_count_in_each_iteration() -> None:
    """Otherwise the step of an LSTM is in the program four times, and takes three times as long to compile."""

    def program(x: Any, length: int) -> Any:
        return jax.lax.scan(lambda y, _: (y * 2 + 1, None), x, length=length)[0]

    short, long = (loop_shape.equations(jax.make_jaxpr(lambda x, n=n: program(x, n))(1.0).jaxpr) for n in (10, 64))
    assert long - short == 54 * 2


@pytest.mark.parametrize("small", [0, SMALL_STEP])
@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("most", [1, 3, 4, 9])
def test_every_index_is_run_once_and_in_order(
    monkeypatch: pytest.MonkeyPatch, most: int, known: bool, small: int
) -> None:
    monkeypatch.setattr(loop_shape, "SMALL_STEP", small)

    def run(count: Any) -> Any:
        return loop_shape.repeat(lambda i, total: total * 10 + i, 0, count, most, known=known)

    # A loop of known length is only asked for if all of it runs.
    assert int(jax.jit(run)(most)) == int("".join(map(str, range(most))))


def test_a_body_is_traced_once_to_learn_its_size() -> None:
    traced = []

    def body(index: Any, total: Any) -> Any:
        traced.append(index)
        return total + index

    assert int(jax.jit(lambda: loop_shape.repeat(body, 0, 9, 9, known=True))()) == 36
    assert len(traced) == 1


def trained(replicas: int, steps: int) -> tuple[list[np.ndarray], dict[str, list[float]], set[str]]:
    """Weights, history, and the forms of the programs after 2 full executions, a short one, and a remainder."""
    keras.utils.set_random_seed(5)
    with replication.strategy(replicas).scope():
        model = keras.Sequential([keras.Input((6,)), keras.layers.Dropout(0.2, seed=1), keras.layers.Dense(1)])
    model.set_gradient_accumulation_options(steps)
    model.compile(keras.optimizers.SGD(0.01, 0.9), "mse", metrics=["mae"], steps_per_execution=6)
    history = model.fit(*zoo.numbers(replicas * 2 * (6 + 6 + 4) + 1), batch_size=2, epochs=2, verbose=0).history
    forms = {key[2].updates for key in model.train_function.loop.programs}
    return [np.asarray(v.value) for v in (*model.weights, *model.optimizer.variables)], history, forms


@pytest.mark.parametrize("small", [0, SMALL_STEP])
@pytest.mark.parametrize(("replicas", "steps"), [(1, 1), (2, 3)])
def test_training_is_the_same(monkeypatch: pytest.MonkeyPatch, replicas: int, steps: int, small: int) -> None:
    expected = trained(replicas, steps)
    assert expected[2] == {"any", "none"}
    monkeypatch.setattr(replica_loop, "prefers_known_length", lambda _platform: True)
    monkeypatch.setattr(loop_shape, "SMALL_STEP", small)
    actual = trained(replicas, steps)
    assert actual[2] == {"all", "any", "none"}
    replication.assert_close(actual[0], expected[0])
    replication.assert_same_history(actual[1], expected[1])
