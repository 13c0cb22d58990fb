"""Small models with data, one per thing that a training loop can get wrong, and a way to train them."""
# Keras decides the arguments of hooks, steps and metrics.
# ruff: noqa: ARG002

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import openipu as ipu

import jax
import keras
import numpy as np
import pytest
from keras import layers, ops

# Keras variables do not take NumPy 2's `copy` argument yet.
KERAS_WARNINGS = pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy:DeprecationWarning")

BATCH = 8
FULL_STEPS = 12
EPOCHS = 3


@dataclass(frozen=True)
class Case:
    """A model, its data and how it is compiled. `tolerance` is relative to the largest number of each array."""

    make: Callable[[], keras.Model]
    data: Callable[[int], tuple[Any, Any]]
    compile: Callable[[], dict[str, Any]]
    tolerance: float = 1e-5
    policy: str = "float32"


@dataclass(frozen=True)
class Outcome:
    """What training left behind."""

    weights: list[np.ndarray]
    optimizer: list[np.ndarray]
    history: dict[str, list[float]]
    evaluated: dict[str, float]
    predicted: list[np.ndarray]


def train(case: Case, rows: int, steps_per_execution: int | None, seed: int = 7, **fit: Any) -> Outcome:
    """Train as plain Keras does, or with `steps_per_execution` inside a strategy's scope."""
    x, y = case.data(rows)
    model = make(case, steps_per_execution, seed)
    # The validation data has a last partial batch too.
    held_out = case.data(2 * BATCH + 3)
    settings = {"epochs": EPOCHS, "batch_size": BATCH, "validation_data": held_out, "verbose": 0, **fit}
    history = model.fit(x, y, **settings).history
    return outcome(model, history, held_out)


def make(case: Case, steps_per_execution: int | None, seed: int = 7) -> keras.Model:
    """A compiled model: plain for None, else one of a strategy."""
    keras.utils.set_random_seed(seed)
    with policy(case.policy), scope_if(steps_per_execution is not None):
        model = case.make()
        model.compile(**case.compile(), steps_per_execution=steps_per_execution or 1)
    return model


def outcome(model: keras.Model, history: dict[str, list[float]], held_out: tuple[Any, Any]) -> Outcome:
    return Outcome(
        [np.asarray(v, "float32") for v in model.get_weights()],
        [np.asarray(v.numpy(), "float32") for v in model.optimizer.variables],
        history,
        model.evaluate(*held_out, batch_size=BATCH, verbose=0, return_dict=True),
        [np.asarray(a, "float32") for a in jax.tree.leaves(model.predict(held_out[0], batch_size=BATCH, verbose=0))],
    )


def assert_same(actual: Outcome, expected: Outcome, tolerance: float = 1e-5) -> None:
    """Equal up to `tolerance` times the largest number of each array.

    Arrays of numbers below a hundredth (momenta near the end of training) are differences of larger ones.
    """
    assert list(actual.history) == list(expected.history)
    for name, values in expected.history.items():
        np.testing.assert_allclose(actual.history[name], values, rtol=tolerance, atol=1e-6, err_msg=name)
    assert list(actual.evaluated) == list(expected.evaluated)
    for name, value in expected.evaluated.items():
        np.testing.assert_allclose(actual.evaluated[name], value, rtol=tolerance, atol=1e-6, err_msg=name)
    for part in ("weights", "optimizer", "predicted"):
        ours, theirs = getattr(actual, part), getattr(expected, part)
        assert len(ours) == len(theirs)
        for i, (a, b) in enumerate(zip(ours, theirs, strict=True)):
            assert a.shape == b.shape
            np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * max(1e-2, np.abs(b).max(initial=0.0)),
                                       err_msg=f"{part}[{i}]")  # fmt: skip


def scope_if(inside: bool) -> contextlib.AbstractContextManager[Any]:
    return ipu.ipu_strategy.IPUStrategy().scope() if inside else contextlib.nullcontext()


@contextlib.contextmanager
def policy(name: str) -> Iterator[None]:
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy(name)
    try:
        yield
    finally:
        keras.config.set_dtype_policy(before)


# --- data ------------------------------------------------------------------------------------------------------------


def table(rows: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(rows)
    x = rng.normal(size=(rows, 6)).astype("float32")
    return x, (x[:, 0] + 0.5 * x[:, 1] > 0).astype("int32") + (x[:, 2] > 0.5).astype("int32")


def numbers(rows: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(rows)
    x = rng.normal(size=(rows, 6)).astype("float32")
    return x, (x @ np.linspace(-1, 1, 6).astype("float32"))[:, None]


def pictures(rows: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(rows)
    x = rng.uniform(size=(rows, 8, 8, 2)).astype("float32")
    return x, (x.mean((1, 2, 3)) > 0.5).astype("int32") + (x[..., 0].mean((1, 2)) > 0.5)


def sequences(rows: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(rows)
    x = rng.normal(size=(rows, 5, 3)).astype("float32")
    return x, x.sum((1, 2))[:, None]


def tokens(rows: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(rows)
    x = rng.integers(1, 20, (rows, 6))
    x[:, 4:] *= rng.integers(0, 2, (rows, 2))
    return x.astype("int32"), (x.sum(1) % 3).astype("int32")


def named(rows: int) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    x, y = numbers(rows)
    return {"left": x[:, :4], "right": x[:, 4:]}, {"sum": y, "kind": (y > 0).astype("float32")}


# --- models ----------------------------------------------------------------------------------------------------------


def dense() -> keras.Model:
    return keras.Sequential([keras.Input((6,)), layers.Dense(9, "tanh"), layers.Dense(3)])


def cnn() -> keras.Model:
    return keras.Sequential([
        keras.Input((8, 8, 2)),
        layers.Conv2D(4, 3, activation="gelu", padding="same"),
        layers.MaxPooling2D(),
        layers.Conv2D(5, 3, strides=2, activation="gelu"),
        layers.Flatten(),
        layers.Dense(3),
    ])  # fmt: skip


def batchnorm_dropout() -> keras.Model:
    x = inputs = keras.Input((6,))
    x = layers.Dropout(0.3)(layers.BatchNormalization()(layers.Dense(8, use_bias=False)(x)))
    x = layers.GaussianNoise(0.1)(layers.BatchNormalization()(layers.Dense(8, "tanh")(x)))
    return keras.Model(inputs, layers.Dense(3)(layers.Dropout(0.2, seed=3)(x)))


def lstm() -> keras.Model:
    x = layers.LSTM(5, return_sequences=True, dropout=0.2)(inputs := keras.Input((5, 3)))
    return keras.Model(inputs, layers.Dense(1)(layers.LSTM(4)(x)))


def bidirectional_gru() -> keras.Model:
    x = layers.Bidirectional(layers.GRU(4, recurrent_dropout=0.1))(inputs := keras.Input((5, 3)))
    return keras.Model(inputs, layers.Dense(1)(x))


def two_in_two_out() -> keras.Model:
    inputs = {"left": keras.Input((4,), name="left"), "right": keras.Input((2,), name="right")}
    x = layers.Concatenate()([layers.Dense(5, "tanh")(inputs["left"]), layers.Dense(3)(inputs["right"])])
    kind = layers.Dense(1, "sigmoid", name="kind")(x)
    return keras.Model(inputs, {"sum": layers.Dense(1, name="sum")(x), "kind": kind})


class Residual(keras.Model):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = layers.Dense(6, "tanh"), layers.Dropout(0.2), layers.Dense(1)

    def call(self, inputs: Any, training: bool = False) -> Any:
        return self.last(inputs + self.second(self.first(inputs), training=training))


class OwnStep(keras.Model):
    """Trains on the sum of two losses, clips gradients by hand and reports a log of its own."""

    def train_step(self, state: Any, data: Any) -> Any:
        trainable, non_trainable, optimizer, metrics = state
        x, y, _ = keras.utils.unpack_x_y_sample_weight(data)

        def loss_of(trainable: Any) -> Any:
            prediction, updated = self.stateless_call(trainable, non_trainable, x, training=True)
            return ops.mean((prediction - y) ** 2) + 0.1 * ops.mean(ops.abs(prediction - y)), (prediction, updated)

        (loss, (prediction, non_trainable)), gradients = jax.value_and_grad(loss_of, has_aux=True)(trainable)
        trainable, optimizer = self.optimizer.stateless_apply(
            optimizer, [ops.clip(g, -0.5, 0.5) for g in gradients], trainable
        )
        logs, new = {}, []
        for metric in self.metrics:
            mine, metrics = metrics[: len(metric.variables)], metrics[len(metric.variables) :]
            given = (loss,) if metric.name == "loss" else (y, prediction)
            mine = metric.stateless_update_state(mine, *given)
            logs[metric.name] = metric.stateless_result(mine)
            new += mine
        logs["biggest_gradient"] = ops.max(ops.abs(gradients[0]))
        return logs, (trainable, non_trainable, optimizer, new)


def own_step() -> keras.Model:
    x = layers.Dropout(0.2)(layers.Dense(7, "tanh")(inputs := keras.Input((6,))))
    return OwnStep(inputs, layers.Dense(1)(x))


class Scaled(layers.Layer):
    def build(self, shape: Any) -> None:
        self.scale = self.add_weight(shape=(shape[-1],), initializer="ones", regularizer=keras.regularizers.L2(0.05))
        self.calls = self.add_weight(shape=(), initializer="zeros", trainable=False)

    def call(self, inputs: Any) -> Any:
        self.calls.assign_add(1.0)
        self.add_loss(0.01 * ops.mean(inputs**2))
        return inputs * self.scale


class Huberish(keras.losses.Loss):
    def call(self, y_true: Any, y_pred: Any) -> Any:
        return ops.mean(ops.sqrt(1 + (y_true - y_pred) ** 2) - 1, axis=-1)


class Bias(keras.metrics.Metric):
    def __init__(self, name: str = "bias", **kwargs: Any) -> None:
        super().__init__(name=name, **kwargs)
        self.total = self.add_variable((), "zeros", name="total")
        self.seen = self.add_variable((), "zeros", name="seen", dtype="int32")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        self.total.assign_add(ops.sum(y_pred - y_true))
        self.seen.assign_add(ops.size(y_true))

    def result(self) -> Any:
        return self.total / ops.cast(self.seen, "float32")


def own_everything() -> keras.Model:
    x = layers.Dense(7, "tanh", kernel_regularizer="l1")(inputs := keras.Input((6,)))
    return keras.Model(inputs, layers.Dense(1)(Scaled()(x)))


class OwnLossAndMetrics(keras.Model):
    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return super().compute_loss(x, y, y_pred, sample_weight, training) + 0.1 * ops.mean(y_pred**2)

    def compute_metrics(self, x, y, y_pred, sample_weight=None):
        return super().compute_metrics(x, y, y_pred, sample_weight) | {"spread": ops.std(y_pred)}


def own_loss_and_metrics() -> keras.Model:
    x = layers.Dense(7, "tanh")(inputs := keras.Input((6,)))
    return OwnLossAndMetrics(inputs, layers.Dense(1)(x))


def frozen() -> keras.Model:
    model = keras.Sequential([
        keras.Input((6,)),
        layers.Dense(7, "tanh"),
        layers.BatchNormalization(),
        layers.Dense(5, "tanh"),
        layers.Dense(3),
    ])  # fmt: skip
    model.layers[0].trainable = model.layers[1].trainable = False
    return model


def attention() -> keras.Model:
    x = layers.Embedding(20, 8, mask_zero=True)(inputs := keras.Input((6,), dtype="int32"))
    # Without biases: that of the keys has no gradient, so its updates would be rounding errors.
    x = layers.LayerNormalization()(x + layers.MultiHeadAttention(2, 4, dropout=0.1, use_bias=False)(x, x))
    return keras.Model(inputs, layers.Dense(3)(layers.GlobalAveragePooling1D()(x)))


def separable() -> keras.Model:
    return keras.Sequential([
        keras.Input((8, 8, 2)),
        layers.DepthwiseConv2D(3, depth_multiplier=2, activation="tanh"),
        layers.SeparableConv2D(5, 3, padding="same", activation="tanh"),
        layers.Conv2D(4, 3, groups=1, dilation_rate=2, activation="tanh"),
        layers.GlobalAveragePooling2D(),
        layers.Dense(3),
    ])  # fmt: skip


def augmented() -> keras.Model:
    return keras.Sequential([
        keras.Input((8, 8, 2)),
        layers.RandomFlip(seed=1),
        layers.Conv2D(3, 3, activation="tanh"),
        layers.Conv2DTranspose(3, 2, strides=2, activation="tanh"),
        layers.GroupNormalization(1),
        layers.SpatialDropout2D(0.2),
        layers.GlobalAveragePooling2D(),
        layers.Dense(3),
    ])  # fmt: skip


def constrained() -> keras.Model:
    return keras.Sequential([
        keras.Input((6,)),
        layers.Dense(7, "tanh", kernel_constraint=keras.constraints.MaxNorm(0.8)),
        layers.SpectralNormalization(layers.Dense(5)),
        layers.Dense(1, kernel_constraint="non_neg"),
    ])  # fmt: skip


def _classes(optimizer: Callable[[], Any], **more: Any) -> Callable[[], dict[str, Any]]:
    def settings() -> dict[str, Any]:
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        return {"optimizer": optimizer(), "loss": loss, "metrics": ["accuracy"], **more}

    return settings


def _momentum() -> Any:
    return keras.optimizers.SGD(0.05, momentum=0.9, nesterov=True)


def _averaged() -> Any:
    schedule = keras.optimizers.schedules.CosineDecay(0.1, 30, warmup_target=0.2, warmup_steps=5)
    return keras.optimizers.SGD(schedule, momentum=0.9, use_ema=True, ema_momentum=0.9, ema_overwrite_frequency=5)


def _accumulated() -> Any:
    return keras.optimizers.AdamW(0.01, gradient_accumulation_steps=3, global_clipnorm=1.0)


def _values(**settings: Any) -> Callable[[], dict[str, Any]]:
    return lambda: {"optimizer": keras.optimizers.RMSprop(0.01), "loss": "mse", "metrics": ["mae"], **settings}


CASES = {
    "dense": Case(dense, table, _classes(lambda: keras.optimizers.Adam(0.01))),
    "cnn": Case(cnn, pictures, _classes(_momentum)),
    "batchnorm_dropout": Case(batchnorm_dropout, table, _classes(_momentum)),
    "lstm": Case(lstm, sequences, _values()),
    "bidirectional_gru": Case(bidirectional_gru, sequences, _values()),
    "two_in_two_out": Case(two_in_two_out, named, lambda: {
        "optimizer": keras.optimizers.Adam(0.01), "loss": {"sum": "mse", "kind": "binary_crossentropy"},
        "loss_weights": {"sum": 1.0, "kind": 0.5}, "metrics": {"sum": ["mae"], "kind": ["accuracy", "auc"]},
    }),
    "subclassed": Case(Residual, numbers, _values()),
    "own_step": Case(own_step, numbers, _values()),
    "own_everything": Case(own_everything, numbers, lambda: {
        "optimizer": keras.optimizers.Adamax(0.01), "loss": Huberish(), "metrics": [Bias(), "mae"],
    }),
    "own_loss_and_metrics": Case(own_loss_and_metrics, numbers, _values()),
    "mixed_bfloat16": Case(dense, table, _classes(_momentum), 1e-2, "mixed_bfloat16"),
    "mixed_float16": Case(dense, table, _classes(_momentum), 1e-3, "mixed_float16"),
    "averaged_weights_and_schedule": Case(dense, table, _classes(_averaged)),
    "frozen": Case(frozen, table, _classes(_momentum)),
    "attention": Case(attention, tokens, _classes(lambda: keras.optimizers.Lamb(0.01))),
    "separable": Case(separable, pictures, _classes(_momentum)),
    "augmented": Case(augmented, pictures, _classes(_momentum, weighted_metrics=["accuracy"])),
    "constrained_accumulated": Case(constrained, numbers, lambda: {
        "optimizer": _accumulated(), "loss": "huber", "metrics": ["r2_score"],
    }),
}  # fmt: skip
