"""A model's own `train_step` on several replicas: each replica that has data takes part in an incomplete last step."""

from __future__ import annotations

from typing import Any

import openipu as ipu

import jax
import keras
import numpy as np
import pytest
from keras import layers, ops

import gradient_maps
import replication
import zoo

pytestmark = zoo.KERAS_WARNINGS


@pytest.fixture(autouse=True)
def _systems() -> None:
    replication.configure_all()


class Own(keras.Model):
    """A step of its own that does what Keras' does, and reports what it has seen."""

    def train_step(self, state: Any, data: Any) -> Any:
        logs, state = super().train_step(state, data)
        return {**logs, "seen": ops.mean(data[0])}, state


class Inverse(Own):
    """Has gradients that are no numbers for rows of zeros, which is what replicas without data are given."""

    def train_step(self, state: Any, data: Any) -> Any:
        x, y = data[:2]
        return super().train_step(state, (x / ops.sum(x**2, axis=-1, keepdims=True), y))


def dropped(kind: Any = Own) -> keras.Model:
    inputs = keras.Input((6,))
    x = layers.Dropout(0.3, seed=4)(layers.Dense(5, "tanh")(inputs))
    return kind(inputs, layers.Dense(1)(x))


def normalised() -> keras.Model:
    inputs = keras.Input((6,))
    return Own(inputs, layers.Dense(1)(layers.BatchNormalization(momentum=0.6)(inputs)))


def made(replicas: int, make: Any = dropped, strategy: Any = None, optimizer: Any = None, **settings: Any) -> Any:
    keras.utils.set_random_seed(5)
    with (strategy or replication.strategy(replicas)).scope():
        model = make()
    model.compile(optimizer or keras.optimizers.SGD(0.2 / replicas, 0.5), "mse", metrics=["mae"], **settings)
    return model


class Sizes(keras.utils.PyDataset):
    """Batches of given sizes, in order."""

    def __init__(self, x: Any, y: Any, sizes: list[int]) -> None:
        super().__init__()
        self._ends = np.cumsum([0, *sizes])
        self._x, self._y = x, y

    def __len__(self) -> int:
        return len(self._ends) - 1

    def __getitem__(self, index: int) -> Any:
        part = slice(*self._ends[index : index + 2])
        return self._x[part], self._y[part]


def floats(model: Any) -> list[np.ndarray]:
    values = [v.numpy() for v in (*model.weights, *model.optimizer.variables)]
    return [v for v in values if np.issubdtype(v.dtype, np.floating) and v.shape]


REMAINDERS = [
    pytest.param(4, 40, [16, 16, 8], id="two of four replicas"),
    pytest.param(4, 34, [16, 16, 2], id="a smaller batch alone"),
    pytest.param(4, 42, [16, 16, 8, 2], id="two of four, and a smaller batch"),
    pytest.param(2, 4, [4], id="less than one step"),
    pytest.param(2, 3, [3], id="less than one batch"),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize(("replicas", "rows", "sizes"), REMAINDERS)
def test_an_incomplete_last_step_is_that_of_one_device(
    replicas: int, rows: int, sizes: list[int], steps: int, stream: bool
) -> None:
    """Each update is that of one device with all of its samples; a smaller batch makes an update of its own."""
    x, y = zoo.numbers(rows)
    one, many = made(1), made(replicas, steps_per_execution=steps)
    data = (replication.Batches(x, y, 4),) if stream else (x, y)
    settings = {} if stream else {"batch_size": 4}
    for _ in range(2):  # the second time, seeds have to be equal after the first
        expected = one.fit(Sizes(x, y, sizes), shuffle=False, verbose=0).history
        actual = many.fit(*data, shuffle=False, verbose=0, **settings).history
        replication.assert_close(floats(many), floats(one))
        replication.assert_same_history(
            {name: actual[name] for name in ("loss", "mae")}, {name: expected[name] for name in ("loss", "mae")}
        )
    assert int(many.optimizer.iterations) == 2 * len(sizes)


@pytest.mark.parametrize("rows", [4, 3])
def test_train_on_batch_makes_one_update_as_strong_as_a_full_one(rows: int) -> None:
    x, y = zoo.numbers(rows)
    one, many = made(1), made(4)
    logs = [[model.train_on_batch(x, y, return_dict=True) for _ in range(2)] for model in (one, many)]
    replication.assert_close(floats(many), floats(one))
    for a, b in zip(logs[1], logs[0], strict=True):
        replication.assert_same_history(a, b)


def test_replicas_without_data_add_nothing() -> None:
    x, y = zoo.numbers(6)
    one, many = (made(r, lambda: dropped(Inverse)) for r in (1, 4))
    one.fit(Sizes(x, y, [4, 2]), shuffle=False, verbose=0)
    many.fit(replication.Batches(x, y, 2), epochs=1, shuffle=False, verbose=0, steps_per_epoch=2)
    many.fit(replication.Batches(x[4:], y[4:], 2), epochs=1, shuffle=False, verbose=0)
    replication.assert_close(floats(many), floats(one))


def test_batch_statistics_of_a_group_leave_out_replicas_without_data() -> None:
    x, y = zoo.numbers(40)
    models = []
    for replicas, data in ((1, (Sizes(x, y, [16, 16, 8]),)), (4, (x, y))):
        replication.configure(replicas, batch_norm_group=replicas)
        model = made(replicas, normalised, strategy=ipu.ipu_strategy.IPUStrategy())
        model.fit(*data, shuffle=False, verbose=0, batch_size=None if replicas == 1 else 4)
        models.append(floats(model))
    replication.assert_close(models[1], models[0])


def test_gradients_are_mapped_and_averaged_in_an_incomplete_step() -> None:
    def optimizer() -> Any:
        mapped = ipu.optimizers.MapGradientOptimizer(keras.optimizers.SGD(0.2), lambda gradient, _: 3.0 * gradient)
        return ipu.optimizers.CrossReplicaOptimizer(mapped)

    x, y = zoo.numbers(24)
    one, many = (made(r, optimizer=optimizer()) for r in (1, 4))
    one.fit(Sizes(x, y, [16, 8]), shuffle=False, verbose=0)
    many.fit(x, y, batch_size=4, shuffle=False, verbose=0)
    replication.assert_close(floats(many), floats(one))


@pytest.mark.parametrize("rows", [32, 40, 34, 3])
def test_metrics_of_an_own_test_step_are_those_of_one_device(rows: int) -> None:
    """Also if it reports something else besides, and for metrics that are no means."""

    class Tested(keras.Model):
        def test_step(self, state: Any, data: Any) -> Any:
            logs, state = super().test_step(state, data)
            return {**logs, "extra": ops.mean(data[0])}, state

    def make() -> keras.Model:
        inputs = keras.Input((6,))
        return Tested(inputs, layers.Dense(1, "sigmoid")(inputs))

    x, y = zoo.table(rows)
    y = (y[:, None] > 0).astype("float32")
    results = []
    for replicas in (1, 4):
        model = made(replicas, make)
        model.compile("sgd", "bce", metrics=["mae", keras.metrics.AUC(name="auc", num_thresholds=20)])
        results.append(model.evaluate(x, y, batch_size=16 // replicas, verbose=0, return_dict=True))
    for name in ("loss", "mae", "auc"):
        np.testing.assert_allclose(results[1][name], results[0][name], rtol=1e-5, err_msg=name)


def test_weights_that_are_updated_by_hand_are_named(caplog: pytest.LogCaptureFixture) -> None:
    class ByHand(keras.Model):
        def train_step(self, state: Any, data: Any) -> Any:
            def loss_of(weights: Any) -> Any:
                return ops.mean((self.stateless_call(weights, state[1], data[0])[0] - data[1]) ** 2)

            loss, gradients = jax.value_and_grad(loss_of)(state[0])
            return {"loss": loss}, ([w - 0.1 * g for w, g in zip(state[0], gradients, strict=True)], *state[1:])

    def make() -> keras.Model:
        inputs = keras.Input((6,))
        return ByHand(inputs, layers.Dense(1)(inputs), name="by_hand")

    x, y = zoo.numbers(8)
    made(1, make).fit(x, y, verbose=0)
    assert "stateless_apply" not in caplog.text
    made(2, make).fit(x, y, batch_size=4, verbose=0)
    assert "by_hand" in caplog.text
    assert "without `self.optimizer.stateless_apply`" in caplog.text


def test_each_replica_maps_its_gradients_before_they_are_added_up() -> None:
    """Two replicas add half of the weight twice, and their rate is half of that of one device."""
    x, y = zoo.numbers(16)
    one, two = (
        made(r, optimizer=ipu.optimizers.MapGradientOptimizer(keras.optimizers.SGD(0.2 / r), gradient_maps.decayed))
        for r in (1, 2)
    )
    one.fit(x, y, batch_size=8, shuffle=False, verbose=0)
    two.fit(x, y, batch_size=4, shuffle=False, verbose=0)
    replication.assert_close(floats(two), floats(one))


@pytest.mark.parametrize("rows", [40, 34])
def test_reported_values_are_means_over_the_replicas_that_have_data(rows: int) -> None:
    x, y = zoo.numbers(rows)
    history = made(4, steps_per_execution=3).fit(x, y, batch_size=4, shuffle=False, verbose=0).history
    np.testing.assert_allclose(history["seen"], [x[32:].mean()], rtol=1e-5)
