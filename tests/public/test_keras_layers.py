"""The layers of `ipu.keras.layers` against NumPy and against Keras: values, gradients, masks, saving, mistakes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import openipu as ipu
from openipu.keras import layers

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest

import replication
import zoo

pytestmark = zoo.KERAS_WARNINGS

RNG = np.random.default_rng(7)
SEQUENCES = RNG.normal(size=(4, 6, 8)).astype("float32")
IMAGES = RNG.normal(size=(3, 4, 5, 6)).astype("float32")


def with_weights_of(layer: Any, other: Any, x: Any) -> tuple[Any, Any]:
    """Both layers, built and with random weights that are the same."""
    layer(x), other(x)
    weights = [RNG.normal(size=w.shape) for w in layer.get_weights()]
    layer.set_weights(weights)
    other.set_weights(weights)
    return layer, other


def values_and_gradients(layer: Any, x: Any, **call: Any) -> Any:
    """The outputs, and the gradients of a number that depends on all of them, for weights and inputs."""
    fixed = [v.value for v in layer.non_trainable_variables]

    def score(weights: Any, inputs: Any) -> Any:
        outputs, _ = layer.stateless_call(weights, fixed, inputs, **call)
        leaves = keras.tree.flatten(outputs)
        return sum(jnp.sum(jnp.sin(a.astype("float32") * (i + 1))) for i, a in enumerate(leaves)), outputs

    weights = [v.value for v in layer.trainable_variables]
    argument = 0 if jnp.issubdtype(jnp.asarray(x).dtype, jnp.integer) else (0, 1)
    gradients, outputs = jax.jit(jax.grad(score, argument, has_aux=True))(weights, jnp.asarray(x))
    return outputs, gradients


def alike(one: Any, other: Any, tolerance: float = 1e-5) -> None:
    assert jax.tree.structure(one) == jax.tree.structure(other)
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_allclose(np.asarray(a, "f"), np.asarray(b, "f"), rtol=tolerance, atol=tolerance)


# --- as Keras' own layers --------------------------------------------------------------------------------------------

SAME: dict[str, tuple[Callable[[], Any], Callable[[], Any], Any]] = {
    "embedding": (
        lambda: layers.Embedding(12, 3, serialization_factor=4),
        lambda: keras.layers.Embedding(12, 3),
        np.array([[0, 11, 3], [3, 3, 1]]),
    ),
    "lstm": (lambda: layers.LSTM(5), lambda: keras.layers.LSTM(5), SEQUENCES),
    "lstm, everything": (
        lambda: layers.PopnnLSTM(5, "relu", return_sequences=True, return_state=True, unit_forget_bias=False),
        lambda: keras.layers.LSTM(5, "relu", return_sequences=True, return_state=True, unit_forget_bias=False),
        SEQUENCES,
    ),
    "gru": (lambda: layers.GRU(5), lambda: keras.layers.GRU(5), SEQUENCES),
    "gru, reset before": (
        lambda: layers.PopnnGRU(5, reset_after=False, return_sequences=True),
        lambda: keras.layers.GRU(5, reset_after=False, return_sequences=True),
        SEQUENCES,
    ),
    "layer normalization": (layers.LayerNorm, keras.layers.LayerNormalization, SEQUENCES),
    "two axes": (
        lambda: layers.LayerNormalization([1, 2], 1e-2, scale=False),
        lambda: keras.layers.LayerNormalization([1, 2], 1e-2, scale=False),
        SEQUENCES,
    ),
    "neighbouring channels": (
        lambda: layers.GroupNormalization(3, strided_channel_grouping=False),
        lambda: keras.layers.GroupNormalization(3),
        IMAGES,
    ),
    "channels first": (
        lambda: layers.GroupNorm(2, 1, strided_channel_grouping=False, center=False),
        lambda: keras.layers.GroupNormalization(2, 1, center=False),
        IMAGES,
    ),
    "instances": (layers.InstanceNorm, lambda: keras.layers.GroupNormalization(-1), IMAGES),
    "one group": (lambda: layers.GroupNorm(1), lambda: keras.layers.GroupNormalization(1), IMAGES),
    "dense by rows": (
        lambda: layers.SerialDense(6, 3, "input_columns", activation="relu"),
        lambda: keras.layers.Dense(6, "relu"),
        SEQUENCES,
    ),
    "dense by sums": (
        lambda: layers.SerialDense(6, 4, "input_rows_kernel_columns", use_bias=False),
        lambda: keras.layers.Dense(6, use_bias=False),
        SEQUENCES,
    ),
    "dense by columns": (
        lambda: layers.SerialDense(6, 2, "kernel_rows"), lambda: keras.layers.Dense(6), SEQUENCES[:, 0]
    ),
    "dense of a matrix": (
        lambda: layers.SerialDense(6, 2, "input_columns"), lambda: keras.layers.Dense(6), SEQUENCES[:, 0]
    ),
    "checkpoint": (layers.RecomputationCheckpoint, keras.layers.Identity, SEQUENCES),
}  # fmt: skip


SECOND = ("two axes", "one group", "channels first", "dense of a matrix", "gru, reset before")
"""Cases that stand beside one that notices the same mistakes."""


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow) if n in SECOND else n for n in SAME])
def test_values_and_gradients_are_those_of_keras(name: str) -> None:
    make, of_keras, x = SAME[name]
    layer, expected = with_weights_of(make(), of_keras(), x)
    assert [v.shape for v in layer.variables] == [v.shape for v in expected.variables]
    alike(values_and_gradients(layer, x), values_and_gradients(expected, x))
    symbols = [keras.tree.map_structure(lambda t: (t.shape, t.dtype), one(keras.Input(x.shape[1:], dtype=x.dtype)))
               for one in (layer, expected)]  # fmt: skip
    assert symbols[0] == symbols[1]


POLICIES = ["mixed_float16", *(pytest.param(p, marks=pytest.mark.slow) for p in ("mixed_bfloat16", "float16"))]
HALF = ["embedding", "lstm", "gru", "neighbouring channels", "instances", "dense by rows", "dense by sums"]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", HALF)
def test_mixed_precision(name: str, policy: str) -> None:
    make, of_keras, x = SAME[name]
    with zoo.policy(policy):
        layer = make()
        layer(x)
    weights = [RNG.normal(size=w.shape) for w in layer.get_weights()]
    exact = of_keras()
    exact(x)
    for one in (layer, exact):
        one.set_weights(weights)
    kind = "bfloat16" if "bfloat16" in policy else "float16"
    assert {v.dtype for v in layer.trainable_variables} == {"float16" if policy == "float16" else "float32"}
    assert layer(x).dtype == kind
    tolerance = 16 * float(jnp.finfo(kind).eps)
    np.testing.assert_allclose(np.asarray(layer(x), "f"), exact(x), rtol=tolerance, atol=3 * tolerance)


def test_a_checkpoint_changes_nothing_in_mixed_precision() -> None:
    with zoo.policy("mixed_float16"):
        layer = layers.RecomputationCheckpoint()
    assert layer(SEQUENCES).dtype == "float32"
    assert layer(keras.Input((3,), dtype="int32")).dtype == "int32"
    pair = layer([SEQUENCES, np.arange(3)])
    alike(pair, [jnp.asarray(SEQUENCES), jnp.arange(3)])


def test_large_half_precision_inputs_do_not_overflow() -> None:
    x = np.array([[300.0, -300.0, 100.0, 500.0]], "float16")
    y = layers.GroupNormalization(2, dtype="float16")(x)
    assert y.dtype == "float16"
    np.testing.assert_allclose(y, [[1, -1, -1, 1]], atol=1e-2)  # channels 0 and 2, 1 and 3


# --- groups ----------------------------------------------------------------------------------------------------------


def strided(x: np.ndarray, groups: int, axis: int, epsilon: float, gamma: np.ndarray, beta: np.ndarray) -> np.ndarray:
    moved = np.moveaxis(x.astype("float64"), axis, -1)
    result = np.empty_like(moved)
    for sample in range(len(x)):
        for group in range(groups):
            part = moved[sample, ..., group::groups]
            result[sample, ..., group::groups] = (part - part.mean()) / np.sqrt(part.var() + epsilon)
    return np.moveaxis(result * gamma + beta, -1, axis)


@pytest.mark.parametrize(("groups", "axis", "epsilon"), [(2, -1, 1e-3), (3, 3, 0.5), (2, 1, 1e-3), (1, 2, 1e-3)])
def test_groups_are_strided(groups: int, axis: int, epsilon: float) -> None:
    layer = layers.GroupNormalization(groups, axis, epsilon=epsilon)
    layer(IMAGES)
    gamma, beta = (RNG.normal(size=IMAGES.shape[axis]) for _ in range(2))
    layer.set_weights([gamma, beta])
    np.testing.assert_allclose(layer(IMAGES), strided(IMAGES, groups, axis, epsilon, gamma, beta), atol=1e-5)


def test_gradients_of_strided_groups() -> None:
    """Strided groups of reordered channels are neighbouring groups."""
    order = [0, 2, 4, 1, 3, 5]
    layer, expected = with_weights_of(layers.GroupNormalization(2), keras.layers.GroupNormalization(2), IMAGES)
    expected.set_weights([w[order] for w in layer.get_weights()])

    def score(inputs: Any, reordered: bool) -> Any:
        weight = jnp.arange(IMAGES.size, dtype="float32").reshape(IMAGES.shape)
        y = expected(inputs[..., order]) if reordered else layer(inputs)
        return jnp.sum(y * (weight[..., order] if reordered else weight))

    alike(*(jax.grad(score)(jnp.asarray(IMAGES), reordered) for reordered in (False, True)), 1e-3)


def test_defaults() -> None:
    config = layers.GroupNormalization().get_config()
    assert (config["groups"], config["channels_axis"], config["epsilon"]) == (2, -1, 1e-3)
    assert config["strided_channel_grouping"] is True
    assert layers.LayerNorm().epsilon == 1e-3
    assert (layers.LSTM(3).implementation, layers.GRU(3).reset_after, layers.Dropout().rate) == (2, True, 0.5)
    assert layers.Embedding(4, 2).serialization_factor == 1


# --- dropout ---------------------------------------------------------------------------------------------------------


def test_dropout() -> None:
    x = np.ones((100, 50), "float32")
    first, same, other = (layers.Dropout(0.25, seed=seed)(x, training=True) for seed in ([1, 2], (1, 2), [1, 3]))
    np.testing.assert_array_equal(first, same)
    assert np.any(first != other)
    assert set(np.unique(first)) == {0.0, np.float32(4 / 3)}
    assert np.mean(first) == pytest.approx(1.0, abs=0.05)
    np.testing.assert_array_equal(layers.Dropout(0.25)(x), x)
    np.testing.assert_array_equal(layers.Dropout(0.0, seed=[1, 2])(x, training=True), x)
    rows = np.asarray(layers.Dropout(0.5, (100, 1), seed=-3)(x, training=True))
    assert np.all(rows == rows[:, :1])
    layer = layers.Dropout(0.25, seed=[1, 2])
    assert np.any(layer(x, training=True) != layer(x, training=True))


def test_gradients_of_dropout_are_its_mask() -> None:
    layer = layers.Dropout(0.5, seed=[3, 4])
    state = [v.value for v in layer.variables]

    def run(x: Any) -> Any:
        return layer.stateless_call([], state, x, training=True)[0]

    x = jnp.asarray(SEQUENCES)
    np.testing.assert_allclose(jax.grad(lambda x: run(x).sum())(x), run(x) / x, rtol=1e-5)


# --- recurrent layers ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [layers.LSTM, layers.GRU])
@pytest.mark.parametrize(
    ("sequences", "state"),
    [(True, True), *(pytest.param(*flags, marks=pytest.mark.slow) for flags in [(False, True), (True, False)])],
)
def test_time_first(make: Any, sequences: bool, state: bool) -> None:
    options = {"return_sequences": sequences, "return_state": state}
    late, early = with_weights_of(make(5, **options), make(5, time_major=True, **options), SEQUENCES)
    expected = keras.tree.flatten(late(SEQUENCES))
    got = keras.tree.flatten(early(SEQUENCES.swapaxes(0, 1)))
    if sequences:
        expected[0] = expected[0].swapaxes(0, 1)
    alike(got, expected, 1e-6)
    shapes = keras.tree.flatten(early(keras.Input(batch_shape=(6, None, 8))))
    assert [t.shape for t in shapes] == [tuple(None if n == 4 else n for n in a.shape) for a in expected]


@pytest.mark.parametrize(("make", "of_keras"), [(layers.LSTM, keras.layers.LSTM), (layers.GRU, keras.layers.GRU)])
def test_masks_and_initial_states(make: Any, of_keras: Any) -> None:
    mask = np.arange(6) < np.array([[6], [3], [1], [4]])
    layer, expected = with_weights_of(make(5, return_sequences=True), of_keras(5, return_sequences=True), SEQUENCES)
    alike(layer(SEQUENCES, mask=mask), expected(SEQUENCES, mask=mask))
    early = make(5, return_sequences=True, time_major=True)
    early(SEQUENCES)
    early.set_weights(layer.get_weights())
    swapped = early(SEQUENCES.swapaxes(0, 1), mask=mask.T)
    alike(swapped.swapaxes(0, 1), expected(SEQUENCES, mask=mask))
    states = [np.ones((4, 5), "float32")] * (2 if make is layers.LSTM else 1)
    alike(layer(SEQUENCES, initial_state=states), expected(SEQUENCES, initial_state=states))
    carried = make(5, stateful=True)
    carried(SEQUENCES), carried(SEQUENCES)
    assert np.any(np.asarray(carried.states[0]) != 0)


def test_seeds_of_recurrent_layers() -> None:
    first, same, other = (layers.LSTM(5, seed=seed) for seed in (3, 3, 4))
    for layer in (first, same, other):
        layer(SEQUENCES)
    np.testing.assert_array_equal(first.get_weights()[0], same.get_weights()[0])
    assert np.any(first.get_weights()[0] != other.get_weights()[0])
    keras_own = keras.layers.LSTM(5, kernel_initializer=keras.initializers.GlorotUniform(3))
    keras_own(SEQUENCES)
    np.testing.assert_array_equal(first.get_weights()[0], keras_own.get_weights()[0])

    def dropped(seed: Any) -> Any:
        layer = layers.GRU(5, dropout=0.5, dropout_seed=seed)
        layer(SEQUENCES)
        layer.set_weights([np.ones(w.shape) for w in layer.get_weights()])
        return layer(SEQUENCES, training=True)

    np.testing.assert_array_equal(dropped([1, 2]), dropped((1, 2)))
    assert np.any(dropped([1, 2]) != dropped([1, 3]))


def test_options_of_poplar_have_no_effect(caplog: Any) -> None:
    layers.LSTM(5, options={"availableMemoryProportion": 0.4}, options_bwd={"a": 1}, partials_dtype="float16")
    layers.Embedding(4, 2, serialization_factor=2)
    for name in ("options (XLA", "options_bwd (XLA", "partials_dtype (XLA", "serialization_factor (a lookup"):
        assert name in caplog.text


# --- in models -------------------------------------------------------------------------------------------------------


def text_model() -> keras.Model:
    return keras.Sequential([
        keras.Input((6,), dtype="int32"),
        layers.Embedding(20, 8),
        layers.LSTM(8, return_sequences=True),
        layers.GroupNormalization(2),
        layers.RecomputationCheckpoint(),
        layers.GRU(8, return_sequences=True),
        layers.InstanceNormalization(),
        layers.Dropout(0.25, seed=[5, 6]),
        layers.SerialDense(8, 2, "kernel_rows", activation="relu"),
        layers.LayerNormalization(),
        keras.layers.GlobalAveragePooling1D(),
        keras.layers.Dense(3),
    ])  # fmt: skip


def configure(devices: int, recompute: bool = False) -> None:
    config = ipu.config.IPUConfig()
    config.auto_select_ipus = devices
    config.allow_recompute = recompute
    config.configure_ipu_system()


def compiled(model: keras.Model, per_execution: int = 1) -> keras.Model:
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.1), loss, steps_per_execution=per_execution)
    return model


def text(rows: int = 32) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(1)
    return rng.integers(0, 20, (rows, 6)), rng.integers(0, 3, rows)


@functools.cache
def plain() -> tuple[list[np.ndarray], list[float]]:
    """What plain Keras trains, with 16 samples per update."""
    keras.utils.set_random_seed(5)
    model = compiled(text_model())
    history = model.fit(*text(), batch_size=16, epochs=2, shuffle=False, verbose=0)
    return model.get_weights(), history.history["loss"]


@pytest.mark.parametrize("recompute", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_fit_under_a_strategy_is_that_of_keras(recompute: bool) -> None:
    weights, losses = plain()
    configure(1, recompute)
    keras.utils.set_random_seed(5)
    with ipu.ipu_strategy.IPUStrategy().scope():
        model = compiled(text_model(), 2)
    history = model.fit(*text(), batch_size=16, epochs=2, shuffle=False, verbose=0)
    replication.assert_close(model.get_weights(), weights, 1e-4)
    np.testing.assert_allclose(history.history["loss"], losses, rtol=1e-4)


def test_replicas() -> None:
    configure(2)
    keras.utils.set_random_seed(5)
    with ipu.ipu_strategy.IPUStrategy().scope():
        model = compiled(text_model(), 2)
        model.optimizer.learning_rate = 0.05  # gradients are added up
    model.fit(*text(), batch_size=8, epochs=2, shuffle=False, verbose=0)
    replication.assert_close(model.get_weights(), plain()[0], 1e-4)


STAGES = [0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1]


def test_stages() -> None:
    """Dropout is drawn for each micro-batch, so the reference accumulates the same micro-batches."""
    results = []
    for stages in (None, STAGES):
        configure(2 if stages else 1, recompute=stages is not None)
        keras.utils.set_random_seed(5)
        with ipu.ipu_strategy.IPUStrategy().scope():
            model = compiled(text_model(), 4)
            if stages:
                model.set_pipeline_stage_assignment(stages)
                model.set_pipelining_options(4, pipeline_schedule="Sequential")
            else:
                model.set_gradient_accumulation_options(4)
        model.fit(*text(), batch_size=4, epochs=2, shuffle=False, verbose=0)
        results.append(model.get_weights())
    replication.assert_close(results[1], results[0], 1e-4)


def test_saved_and_loaded(tmp_path: Any) -> None:
    keras.utils.set_random_seed(5)
    model = text_model()
    expected = model(text()[0])
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    np.testing.assert_array_equal(loaded(text()[0]), expected)
    for one, other in zip(model.layers, loaded.layers, strict=True):
        assert type(one) is type(other)
        assert one.get_config() == other.get_config()


CONFIGS: dict[str, Callable[[], Any]] = {
    "lstm": lambda: layers.LSTM(3, dropout=0.25, dropout_seed=[1, 2], seed=4, time_major=True, implementation=1),
    "gru": lambda: layers.GRU(3, dropout_seed=7, reset_after=False, name="mine"),
    "groups": lambda: layers.GroupNorm(3, 1, False, True, 0.1, "ones", "zeros", False, False),
    "instances": lambda: layers.InstanceNorm(1, center=False, dtype="float16"),
    "dense": lambda: layers.SerialDense(4, 2, "kernel_rows", kernel_regularizer="l2"),
    "dropout": lambda: layers.Dropout(0.25, (None, 1), [1, 2]),
    "embedding": lambda: layers.Embedding(6, 3, "zeros", serialization_factor=3),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_configurations(name: str) -> None:
    layer = CONFIGS[name]()
    again = keras.saving.deserialize_keras_object(keras.saving.serialize_keras_object(layer))
    assert type(again) is type(layer)
    assert again.get_config() == layer.get_config()
    seeds = [v for v in layer.variables if v.dtype == "uint32"]
    for a, b in zip(seeds, [v for v in again.variables if v.dtype == "uint32"], strict=True):
        np.testing.assert_array_equal(a, b)


# --- odd sizes and mistakes ------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", [n for n in SAME if n != "dense of a matrix"])
def test_no_samples(name: str) -> None:
    make, of_keras, x = SAME[name]
    layer = make()
    layer(x)
    empty = keras.tree.flatten(layer(x[:0]))
    assert [a.shape[0] for a in empty] == [0] * len(empty)
    assert [a.shape for a in empty] == [a.shape for a in keras.tree.flatten(of_keras()(x[:0]))]


ARGUMENTS: list[tuple[Callable[[], Any], str]] = [
    (lambda: layers.Embedding(10, 2, mask_zero=True), "`mask_zero` is True, but `Embedding` of `ipu.keras.layers`"),
    (lambda: layers.Embedding(10, 2, embeddings_regularizer="l2"), "`embeddings_regularizer` is 'l2'"),
    (lambda: layers.Embedding(10, 2, input_length=3), "`input_length` is 3"),
    (lambda: layers.Embedding(10, 2, serialization_factor=3), "3, which does not divide the 10 rows"),
    (lambda: layers.Embedding(10, 2, serialization_factor=0), "`serialization_factor` is 0"),
    (lambda: layers.Embedding(10, 2)(np.zeros(3, int)), r"got numbers of shape \(3,\)"),
    (lambda: layers.Dropout(1.0), "`rate` is 1.0"),
    (lambda: layers.Dropout(0.5, seed=[1, 2, 3]), "`seed` has 3 numbers"),
    (lambda: layers.Dropout(0.5, seed=[1, 2.5]), r"`seed\[1\]` is 2.5"),
    (lambda: layers.LSTM(3, use_bias=False), "`use_bias` is False, but `LSTM`"),
    (lambda: layers.GRU(3, kernel_constraint="unit_norm"), "`kernel_constraint` is 'unit_norm', but `GRU`"),
    (lambda: layers.LSTM(3, recurrent_dropout=0.5), "`recurrent_dropout` is 0.5"),
    (lambda: layers.LSTM(3, go_backwards=True), "`go_backwards` is True"),
    (lambda: layers.LSTM(3, unroll=True), "`unroll` is True"),
    (lambda: layers.LSTM(3, activity_regularizer="l2"), "`activity_regularizer` is 'l2'"),
    (lambda: layers.LSTM(3, implementation=0), "`implementation` is 0. Give one of 1, 2"),
    (lambda: layers.LSTM(3, partials_dtype="int8"), "`partials_dtype` is 'int8'"),
    (lambda: layers.LSTM(3)(np.zeros((2, 3), "f")), "expected ndim=3"),
    (lambda: layers.GroupNormalization(4)(IMAGES), "has 4 groups, which do not divide 6 channels"),
    (lambda: layers.GroupNormalization(0), "`groups` is 0"),
    (lambda: layers.GroupNormalization(2, 0)(IMAGES), "the first one counts samples"),
    (lambda: layers.GroupNormalization(2, 4)(IMAGES), "its inputs have 4 axes"),
    (lambda: layers.GroupNormalization()(keras.Input((None, None))), "whose channels are not known"),
    (lambda: layers.LayerNormalization(1)(keras.Input((None, 3))), "whose length along it is known"),
    (lambda: layers.SerialDense(4, 2, "rows"), "`serialization_dimension` is 'rows'. Give one of 'input_columns'"),
    (lambda: layers.SerialDense(4, 0, "kernel_rows"), "`serialization_factor` is 0"),
    (lambda: layers.SerialDense(5, 2, "kernel_rows")(SEQUENCES), "into 2 parts, but its size is 5"),
    (lambda: layers.SerialDense(5, 3, "input_columns")(SEQUENCES[:, 0]), "into 3 parts, but its size is 4"),
]


@pytest.mark.parametrize("number", range(len(ARGUMENTS)))
def test_mistakes(number: int) -> None:
    make, words = ARGUMENTS[number]
    with pytest.raises(ValueError, match=words):
        make()


def test_names() -> None:
    assert ipu.keras.layers is layers
    assert layers.LSTM is layers.PopnnLSTM
    assert layers.GRU is layers.PopnnGRU
    assert all(issubclass(getattr(layers, name), keras.Layer) for name in layers.__all__)
