"""Several replicas: random numbers, batch statistics, metrics, evaluation and prediction are those of one device."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openipu as ipu
from openipu.engine.core.model_state import variables_of
from openipu.engine.core.replica_metrics import adds_up, mention_metrics
from openipu.engine.core.state import State
from openipu.engine.data.make_feed import make_feed

import keras
import numpy as np
import pytest
from keras import layers

import replication
import zoo

pytestmark = zoo.KERAS_WARNINGS


@pytest.fixture(autouse=True)
def _systems() -> None:
    replication.configure_all()


def data(rows: int) -> tuple[np.ndarray, np.ndarray]:
    x, y = zoo.table(rows)
    return x, (y[:, None] > 0).astype("float32")


def dense() -> keras.Model:
    return keras.Sequential([keras.Input((6,)), layers.Dense(5, "tanh"), layers.Dense(1, "sigmoid")])


def normalised() -> keras.Model:
    return keras.Sequential([keras.Input((6,)), layers.BatchNormalization(momentum=0.6), layers.Dense(1)])


def made(make: Any, replicas: int, *, strategy: Any = None, seed: int = 5, options: Any = None, **settings: Any) -> Any:
    keras.utils.set_random_seed(seed)
    with (strategy or replication.strategy(replicas)).scope():
        model = make()
    if options:
        model.set_gradient_accumulation_options(**options)
    model.compile(**{"optimizer": keras.optimizers.SGD(0.2 / replicas), "loss": "mse", **settings})
    return model


def fit(model: Any, x: Any, y: Any, **settings: Any) -> Any:
    """Train with the same order of samples every time."""
    np.random.seed(3)
    return model.fit(x, y, verbose=0, **settings)


def weights(model: Any) -> list[np.ndarray]:
    return [v.numpy() for v in model.weights if np.issubdtype(v.numpy().dtype, np.floating)]


# --- training --------------------------------------------------------------------------------------------------------


def test_a_learning_rate_divided_by_the_replicas_gives_the_weights_of_one_device() -> None:
    x, y = data(70)
    one, four = (made(dense, r, metrics=["accuracy"], steps_per_execution=3) for r in (1, 4))
    histories = [fit(m, x, y, batch_size=b, epochs=2).history for m, b in ((one, 16), (four, 4))]
    replication.assert_close(weights(four), weights(one))
    replication.assert_same_history(histories[1], histories[0])


@pytest.mark.parametrize("feed", ["resident", "streamed"])
def test_runs_are_repeatable_to_the_bit(feed: str) -> None:
    x, y = data(45)
    runs = []
    for _ in range(2):
        model = made(dense, 4, optimizer="adam", metrics=["auc"], steps_per_execution=2)
        source = (x, y) if feed == "resident" else (replication.Batches(x, y, 4),)
        history = model.fit(*source, batch_size=4 if feed == "resident" else None, epochs=2, verbose=0).history
        runs.append((weights(model), history))
    for a, b in zip(*(run[0] for run in runs), strict=True):
        np.testing.assert_array_equal(a, b)
    assert runs[0][1] == runs[1][1]


def test_all_replicas_hold_the_same_weights_to_the_bit() -> None:
    x, y = zoo.numbers(43)
    model = made(zoo.batchnorm_dropout, 4, optimizer="adam", steps_per_execution=3)
    model.fit(x, y, batch_size=4, verbose=0)
    function = model.train_function
    state = function.spread.spread(State(*([v.value for v in part] for part in variables_of(model, "train"))))
    feed = make_feed(function.place, 3, x, y, batch_size=4)
    for slab in feed.epoch():
        _, state = function.loop.execute(state, feed.source.resident, slab)
    arrays = [*state.trainable, *state.non_trainable, *state.optimizer]
    assert len(arrays) > 30
    for array in arrays:
        copies = [np.asarray(shard.data) for shard in array.addressable_shards]
        assert len(copies) == 4
        for other in copies[1:]:
            np.testing.assert_array_equal(copies[0], other)


CLASSES = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
RANDOM = {
    "dropout and noise": (
        lambda: keras.Sequential([
            keras.Input((6,)), layers.Dropout(0.4), layers.Dense(5, "tanh"), layers.GaussianNoise(0.3),
            layers.GaussianDropout(0.2), layers.AlphaDropout(0.2), layers.Dense(1),
        ]),
        zoo.numbers,
        "mse",
    ),
    "spatial dropout and augmentation": (zoo.augmented, zoo.pictures, CLASSES),
    "recurrent": (zoo.lstm, zoo.sequences, "mse"),
    "attention": (zoo.attention, zoo.tokens, CLASSES),
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "replicas", "steps"),
    [(name, 4, 1) for name in RANDOM]
    + [pytest.param(n, 2, 2, marks=() if n == "dropout and noise" else pytest.mark.slow) for n in RANDOM],
)
def test_random_layers_do_not_depend_on_the_number_of_replicas(name: str, replicas: int, steps: int) -> None:
    make, samples, loss = RANDOM[name]
    x, y = samples(48)
    options = {"gradient_accumulation_steps_per_replica": steps}
    settings = {"loss": loss, "steps_per_execution": steps, "options": options}
    one, many = (made(make, r, **settings) for r in (1, replicas))
    before = weights(many)
    for model, batch in ((one, 2 * replicas), (many, 2)):
        fit(model, x, y, batch_size=batch)
    replication.assert_close(weights(many), weights(one))
    assert any(np.abs(a - b).max() > 1e-4 for a, b in zip(before, weights(many), strict=True))


@pytest.mark.parametrize(("replicas", "steps", "rows"), [(4, 1, 27), (2, 2, 35), (4, 1, 17), (2, 2, 18)])
def test_random_layers_in_the_last_incomplete_update(replicas: int, steps: int, rows: int) -> None:
    """Micro-batches of some replicas and the tail draw what one device draws for a smaller last batch."""

    def make() -> keras.Model:
        drops = [layers.Dropout(0.4), layers.GaussianNoise(0.5)]
        return keras.Sequential([keras.Input((6,)), drops[0], layers.Dense(5, "tanh"), drops[1], layers.Dense(1)])

    x, y = zoo.numbers(rows)
    options = {"gradient_accumulation_steps_per_replica": steps}
    one, many = (made(make, r, steps_per_execution=steps, options=options) for r in (1, replicas))
    for _ in range(2):  # the second time, seeds have to be equal after the first
        for model, batch in ((one, 4 * replicas), (many, 4)):
            fit(model, x, y, batch_size=batch)
        replication.assert_close(weights(many), weights(one))


def test_replicas_draw_different_random_numbers() -> None:
    """Equal rows, half of them on each replica: with equal masks the two gradients would be equal."""

    def make() -> keras.Model:
        return keras.Sequential([keras.Input((64,)), layers.Dropout(0.5), layers.Dense(1, use_bias=False)])

    x, y = np.ones((2, 64), "float32"), np.ones((2, 1), "float32")
    model = made(make, 2, optimizer=keras.optimizers.SGD(1.0), loss=lambda _, y_pred: -y_pred)
    before = model.get_weights()[0]
    model.fit(x, y, batch_size=1, verbose=0)
    change = (model.get_weights()[0] - before).round(3)
    assert set(np.unique(change)) == {0.0, 2.0, 4.0}


def test_own_train_step_is_reduced_over_replicas() -> None:
    """Its clipping comes before the reduction, so the data makes all gradients of the two replicas equal."""
    x, y = zoo.numbers(16)
    x, y = x.repeat(2, 0).reshape(8, 4, 6)[:, ::2].reshape(16, 6), y.repeat(2, 0)[::2]
    pairs = np.concatenate([np.concatenate([x[i : i + 2]] * 2) for i in range(0, 16, 2)])
    targets = np.concatenate([np.concatenate([y[i : i + 2]] * 2) for i in range(0, 16, 2)])

    def make() -> keras.Model:
        inputs = keras.Input((6,))
        return zoo.OwnStep(inputs, layers.Dense(1)(layers.Dense(4, "tanh")(inputs)))

    one, two = (made(make, r) for r in (1, 2))
    logs = [one.fit(x, y, batch_size=2, shuffle=False, verbose=0).history,
            two.fit(pairs, targets, batch_size=2, shuffle=False, verbose=0).history]  # fmt: skip
    replication.assert_close(weights(two), weights(one))
    replication.assert_same_history(logs[1], logs[0])


# --- batch statistics ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("group", "rows"), [(4, 48), (4, 40), (2, 48)])
def test_batch_statistics_are_shared_by_a_group(group: int, rows: int) -> None:
    """With a group of all replicas everything is equal to one device, also when some replicas have no micro-batch."""
    x, y = zoo.numbers(rows)
    models = []
    for replicas, shared in ((1, 1), (4, group)):
        replication.configure(replicas, batch_norm_group=shared)
        strategy = ipu.ipu_strategy.IPUStrategy()
        model = made(zoo.batchnorm_dropout, replicas, strategy=strategy, loss="mse", steps_per_execution=2)
        model.fit(x, y, batch_size=16 // replicas, epochs=2, verbose=0)
        models.append(weights(model))
    if group == 4:
        replication.assert_close(models[1], models[0])
    else:
        assert any(np.abs(a - b).max() > 1e-4 for a, b in zip(*models, strict=True))


def test_moving_statistics_are_the_mean_over_replicas() -> None:
    x, y = zoo.numbers(12)
    model = made(normalised, 4, optimizer=keras.optimizers.SGD(0.0))
    model.fit(x, y, batch_size=3, shuffle=False, verbose=0)
    batches = x.reshape(4, 3, 6)
    layer = model.layers[0]
    np.testing.assert_allclose(layer.moving_mean.numpy(), 0.4 * batches.mean((0, 1)), rtol=1e-5)
    np.testing.assert_allclose(layer.moving_variance.numpy(), 0.6 + 0.4 * batches.var(1).mean(0), rtol=1e-5)


@pytest.mark.parametrize("rows", [3, 6, 8])
def test_replicas_without_a_micro_batch_leave_moving_statistics_alone(rows: int) -> None:
    """One micro-batch, two, or two and a partial one, for four replicas."""
    x, y = zoo.numbers(rows)
    model = made(normalised, 4, optimizer=keras.optimizers.SGD(0.0))
    model.fit(x, y, batch_size=3, shuffle=False, verbose=0)
    expected = 0.4 * x[: rows // 3 * 3].mean(0)
    if rows % 3:
        expected = 0.6 * expected + 0.4 * x[rows // 3 * 3 :].mean(0)
    np.testing.assert_allclose(model.layers[0].moving_mean.numpy(), expected, rtol=1e-5, atol=1e-6)


class Masked(layers.Layer):
    """Adds a mask of zeros and minus infinities that it keeps as a weight, as older attention layers do."""

    def build(self, shape: Any) -> None:
        self.mask = self.add_weight(shape=(shape[-1],), trainable=False)
        self.mask.assign(np.where(np.arange(shape[-1]) < 2, -np.inf, 0.0))

    def call(self, inputs: Any) -> Any:
        return keras.ops.softmax(inputs + self.mask)


@pytest.mark.parametrize("rows", [24, 6])
def test_infinite_weights_that_are_not_trained_stay_as_they_are(rows: int) -> None:
    """Whole steps, and one that only some replicas have data for."""
    model = made(lambda: keras.Sequential([keras.Input((6,)), Masked(), layers.Dense(1)]), 4)
    losses = model.fit(*zoo.numbers(rows), batch_size=3, epochs=2, verbose=0).history["loss"]
    assert np.isfinite(losses).all()
    assert model.layers[0].mask.numpy().tolist() == [-np.inf, -np.inf, 0, 0, 0, 0]


@pytest.mark.parametrize("replicas", [1, 2])
def test_arrays_that_two_variables_share_are_not_used_up(replicas: int) -> None:
    """When training ends, an optimizer that averages weights gives them its own arrays. Plain Keras then loses them."""

    def averaging(look: bool) -> Any:
        optimizer = keras.optimizers.SGD(0.2 / replicas, use_ema=True, ema_momentum=0.5)
        model = made(dense, replicas, optimizer=optimizer)
        for _ in range(2):
            fit(model, *data(16), batch_size=4)
            if look:
                model.evaluate(*data(16), verbose=0)
                model.predict_on_batch(data(4)[0])
                model.predict(data(16)[0], verbose=0)
        model.train_on_batch(*data(4))
        return model

    one, other = averaging(look=False), averaging(look=True)
    for a, b in zip(one.variables + one.optimizer.variables, other.variables + other.optimizer.variables, strict=True):
        np.testing.assert_array_equal(a.numpy(), b.numpy())


# --- metrics ---------------------------------------------------------------------------------------------------------

METRICS = ("accuracy", "auc", "precision", "recall")


def more_metrics() -> list[Any]:
    m = keras.metrics
    return [
        *METRICS,
        m.RootMeanSquaredError(),
        m.F1Score(threshold=0.5),
        m.R2Score(),
        m.MeanIoU(2, name="iou"),
        m.BinaryIoU(name="both"),
    ]


@pytest.mark.filterwarnings("ignore:Explicitly requested dtype int64:UserWarning")  # Keras' IoU asks for it
@pytest.mark.parametrize("batch", [2, pytest.param(5, marks=pytest.mark.slow)])
def test_metrics_are_true_over_all_samples(batch: int) -> None:
    x, y = data(37)
    one, four = (made(dense, r, metrics=more_metrics(), steps_per_execution=2) for r in (1, 4))
    expected, actual = (m.evaluate(x, y, batch_size=batch, verbose=0, return_dict=True) for m in (one, four))
    replication.assert_same_history(actual, expected)
    histories = [fit(m, x, y, batch_size=b, epochs=2).history for m, b in ((one, 4 * batch), (four, batch))]
    replication.assert_same_history(histories[1], histories[0])


@pytest.mark.parametrize("live", [False, True])
def test_counts_in_batch_logs_are_those_of_all_replicas(live: bool) -> None:
    """A mean over replicas hides in metrics that are means themselves, but not in counts."""
    x, y = data(36)
    seen: list[list[float]] = []
    for replicas, batch in ((1, 8), (2, 4)):
        model = made(dense, replicas, metrics=[keras.metrics.TruePositives(name="found")], steps_per_execution=2)
        model.set_asynchronous_callbacks(live)
        found: list[float] = []
        told = keras.callbacks.LambdaCallback(on_train_batch_end=lambda _, logs, to=found: to.append(logs["found"]))
        fit(model, x, y, batch_size=batch, epochs=2, shuffle=False, callbacks=[told])
        # Each batch of one device is two of two replicas, whose logs come after both.
        seen.append(found if replicas == 1 or not live else [*found[1:8:2], found[8], *found[10:17:2], found[17]])
    assert seen[0] == seen[1]
    assert seen[0][-1] > 4


@pytest.mark.parametrize("looks", [False, True])
def test_metric_reduction_methods(looks: bool) -> None:
    """LIST gives the metrics of each replica, also when a callback looks at the model in the middle of an epoch."""
    x, y = data(24)
    parts = [made(dense, 1, metrics=["mae"]).evaluate(x[r::2], y[r::2], verbose=0) for r in range(2)]
    values = {}
    look = keras.callbacks.LambdaCallback(on_test_batch_end=lambda _, logs: model.jax_state_sync())  # noqa: ARG005
    mean = ipu.keras.ReplicatedMetricReductionMethod.MEAN
    for name, method in {"list": "list", "SUM": "SUM", "MEAN": mean, "none": "none"}.items():
        model = made(dense, 2, metrics=["mae"])
        model.set_replication_options(method)
        values[name] = model.evaluate(x, y, batch_size=1, verbose=0, callbacks=[look] if looks else [])
    by_replica = np.array(values["list"])
    np.testing.assert_allclose(by_replica.T, parts, rtol=1e-5)
    np.testing.assert_allclose(values["SUM"], by_replica.sum(1), rtol=1e-6)
    np.testing.assert_allclose(values["MEAN"], by_replica.mean(1), rtol=1e-6)
    np.testing.assert_allclose(values["none"], by_replica.mean(1), rtol=1e-5)


def test_a_list_of_metrics_goes_into_history_and_progress_bar(capsys: pytest.CaptureFixture[str]) -> None:
    model = made(dense, 2, metrics=["mae"])
    model.set_replication_options("LIST")
    history = model.fit(*data(20), batch_size=4, epochs=2, verbose=2, validation_data=data(9)).history
    assert all(np.shape(values) == (2, 2) for values in history.values())
    assert "val_mae" in capsys.readouterr().out


def test_own_compute_metrics_counts_only_real_samples() -> None:
    x, y = zoo.numbers(17)
    one, four = (made(zoo.own_loss_and_metrics, r) for r in (1, 4))
    expected, actual = (m.evaluate(x, y, batch_size=4, verbose=0, return_dict=True) for m in (one, four))
    replication.assert_same_history(actual, expected)


# --- evaluate, predict, methods on batches ---------------------------------------------------------------------------


def sources(x: Any, y: Any, batch: int) -> dict[str, Any]:
    import tensorflow as tf

    def generator() -> Iterator[Any]:
        for start in range(0, len(x), batch):
            yield x[start : start + batch], y[start : start + batch]

    return {
        "generator": generator(),
        "tf.data": tf.data.Dataset.from_tensor_slices((x, y)).batch(batch),
        "PyDataset": replication.Batches(x, y, batch),
    }


@pytest.mark.parametrize("replicas", [2, 8])
def test_rows_are_in_order_and_none_is_lost(replicas: int) -> None:
    x, y = data(41)
    model = made(dense, replicas, metrics=["auc"], steps_per_execution=2)
    expected, measured = np.asarray(model(x)), None
    for batch in (1, 4, 41, 64):
        np.testing.assert_allclose(model.predict(x, batch_size=batch, verbose=0), expected, rtol=1e-6)
        values = model.evaluate(x, y, batch_size=batch, verbose=0)
        measured = measured or values
        np.testing.assert_allclose(values, measured, rtol=1e-5)
    for name in ("generator", "tf.data", "PyDataset"):
        predicted = model.predict(sources(x, y, 4)[name], verbose=0)
        np.testing.assert_allclose(predicted, expected, rtol=1e-6, err_msg=name)
        np.testing.assert_allclose(model.evaluate(sources(x, y, 4)[name], verbose=0), measured, rtol=1e-5, err_msg=name)


def test_predict_with_steps_gives_their_rows() -> None:
    x, y = data(40)
    model = made(dense, 4)
    predicted = model.predict(replication.Batches(x, y, 4), steps=7, verbose=0)
    np.testing.assert_allclose(predicted, np.asarray(model(x[:28])), rtol=1e-6)


def test_methods_on_batches() -> None:
    """A batch given by hand is one update of the strength of a full one."""
    x, y = data(10)
    one, four = (made(dense, r, metrics=["mae"]) for r in (1, 4))
    for start in (0, 5):
        results = [m.train_on_batch(x[start : start + 5], y[start : start + 5]) for m in (one, four)]
        np.testing.assert_allclose(results[1], results[0], rtol=1e-5)
    replication.assert_close(weights(four), weights(one))
    np.testing.assert_allclose(four.test_on_batch(x, y), one.test_on_batch(x, y), rtol=1e-5)
    np.testing.assert_allclose(four.predict_on_batch(x), one.predict_on_batch(x), rtol=1e-5)


# --- changes ---------------------------------------------------------------------------------------------------------


def test_training_goes_on_when_the_number_of_replicas_changes() -> None:
    x, y = data(33)
    settings: dict[str, Any] = {"optimizer": keras.optimizers.SGD(0.1, momentum=0.9), "metrics": ["mae"]}
    model = made(dense, 1, strategy=ipu.ipu_strategy.IPUStrategy(), **settings)
    keras.utils.set_random_seed(5)
    plain = dense()
    plain.compile(**settings | {"optimizer": keras.optimizers.SGD(0.1, momentum=0.9), "loss": "mse"})
    for replicas in (1, 4, 2):
        replication.configure(replicas)
        model.optimizer.learning_rate = 0.1 / replicas
        # Momentum holds what earlier learning rates gave. Both begin again, so that they stay comparable.
        for m in (model, plain):
            m.optimizer.build(m.trainable_variables)
            for momentum in m.optimizer.momentums:
                momentum.assign(0 * momentum)
        actual = model.fit(x, y, batch_size=8 // replicas, verbose=0, shuffle=False).history
        expected = plain.fit(x, y, batch_size=8, verbose=0, shuffle=False).history
        replication.assert_same_history(actual, expected)
    replication.assert_close(weights(model), weights(plain))


def test_a_saved_model_goes_on_with_its_options(tmp_path: Any) -> None:
    x, y = data(40)
    options = {"gradient_accumulation_steps_per_replica": 2, "gradient_accumulation_reduction_method": "mean",
               "replicated_optimizer_state_sharding": True}  # fmt: skip
    model = made(dense, 4, optimizer="adam", metrics=["mae"], steps_per_execution=4, options=options)
    model.set_replication_options("MEAN")
    model.fit(x, y, batch_size=2, verbose=0)
    model.save(tmp_path / "model.keras")
    with replication.strategy(4).scope():
        loaded = keras.models.load_model(tmp_path / "model.keras")
    assert loaded._ipu_session.options == model._ipu_session.options
    histories = [m.fit(x, y, batch_size=2, verbose=0, shuffle=False).history for m in (model, loaded)]
    assert histories[1] == histories[0]
    replication.assert_close(weights(loaded), weights(model), 1e-6)


def test_a_metric_that_may_not_add_up_is_named(caplog):
    class Largest(keras.metrics.Metric):
        def __init__(self):
            super().__init__(name="largest")
            self.value = self.add_weight(initializer="zeros")

        def update_state(self, y_true, y_pred, sample_weight=None):  # noqa: ARG002
            self.value.assign(keras.ops.maximum(self.value, keras.ops.max(y_true)))

        def result(self):
            return self.value.value

    class Doubled(keras.metrics.Mean):
        pass

    model = keras.Sequential([keras.layers.Dense(1)])
    model.compile("sgd", "mse", metrics=[Largest(), "mae", keras.metrics.RootMeanSquaredError()])
    model.train_on_batch(np.ones((2, 1)), np.ones((2, 1)))
    mention_metrics(model.name, model.metrics)
    assert "largest" in caplog.text
    assert "mae" not in caplog.text
    assert "root_mean" not in caplog.text
    assert adds_up(Doubled())
