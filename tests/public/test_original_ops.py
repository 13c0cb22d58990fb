"""Operations of the original on CPUs and GPUs: the numbers that NumPy gives, in programs and in models."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import openipu as ipu

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest

import replication
from zoo import KERAS_WARNINGS

pytestmark = KERAS_WARNINGS

RNG = np.random.default_rng(8)
A = RNG.normal(size=(6, 8)).astype(np.float32)
B = RNG.normal(size=(8, 4)).astype(np.float32)
LOGITS = RNG.normal(size=(7, 3, 5)).astype(np.float32)
"""(time, batch, classes)"""


def close(found: Any, expected: Any, tolerance: float = 1e-5) -> None:
    np.testing.assert_allclose(np.asarray(found), expected, rtol=tolerance, atol=tolerance)


# --- nn_ops ----------------------------------------------------------------------------------------------------------


def test_activations():
    close(ipu.nn_ops.gelu(A), jax.nn.gelu(A, approximate=True))
    close(ipu.nn_ops.gelu(A, approximate=False), jax.nn.gelu(A, approximate=False))
    close(ipu.nn_ops.swish(A), A / (1 + np.exp(-A)))
    close(ipu.nn_ops.hard_sigmoid([-3.0, -1.0, 0.0, 1.0, 3.0]), [0.0, 0.3, 0.5, 0.7, 1.0])
    close(ipu.nn_ops.hard_sigmoid([-3, 0, 1]), [0.0, 0.5, 0.7])
    close(ipu.nn_ops.softmax([[1.0, 2.0], [300.0, 0.0]]), [[1 / (1 + np.e), np.e / (1 + np.e)], [1, 0]])
    assert ipu.nn_ops.gelu(A.astype("float16")).dtype == ipu.nn_ops.hard_sigmoid(A.astype("float16")).dtype == "float16"


def test_several_convolutions_are_a_function():
    @ipu.nn_ops.multi_conv
    def one(x):
        return x + 1

    assert one(1) == 2
    assert ipu.nn_ops.multi_conv(options={})(one) is one


def alignments(log_probs: np.ndarray, label: tuple[int, ...], blank: int) -> float:
    """The logarithm of the probability of a label, over all paths of classes."""
    total = -np.inf
    steps, classes = log_probs.shape
    for path in np.ndindex(*[classes] * steps):
        merged = [c for i, c in enumerate(path) if i == 0 or c != path[i - 1]]
        if tuple(c for c in merged if c != blank) == label:
            total = np.logaddexp(total, sum(log_probs[i, c] for i, c in enumerate(path)))
    return total


@pytest.mark.parametrize("blank", [0, -1])
def test_ctc_loss(blank):
    logits = LOGITS[:4, :2, :3]
    labels, lengths, times = [[1, 1], [1, 0]], [2, 1], [4, 3]
    log_probs = np.asarray(jax.nn.log_softmax(logits))
    expected = [
        -alignments(log_probs[:t, i], tuple(labels[i][:n]), blank % 3)
        for i, n, t in zip((0, 1), lengths, times, strict=True)
    ]
    close(ipu.nn_ops.ctc_loss_v2(labels, logits, lengths, times, blank), expected, 1e-4)
    close(ipu.nn_ops.ctc_loss_with_log_probs(labels, log_probs, lengths, times, blank_index=blank), expected, 1e-4)


@pytest.mark.slow
def test_ctc_decoding():
    logits = LOGITS[:4, :2, :3]
    scores, lengths, labels = ipu.nn_ops.ctc_beam_search_decoder(logits, [4, 4], beam_width=30, top_paths=2)
    assert scores.shape == lengths.shape == (2, 2)
    assert labels.shape == (2, 2, 4)
    log_probs = np.asarray(jax.nn.log_softmax(logits))
    for sample, path in np.ndindex(2, 2):
        size = int(lengths[sample, path])
        label = tuple(int(c) for c in labels[sample, path, :size])
        close(scores[sample, path], -alignments(log_probs[:, sample], label, 2), 1e-4)
        assert (np.asarray(labels[sample, path, size:]) == 2).all(), "blanks follow"
    assert (np.diff(scores) >= 0).all()


@pytest.mark.slow
def test_ctc_layers():
    layers = ipu.keras.layers
    labels, lengths, times = [[1, 1], [2, 3], [4, 0]], [2, 2, 1], [7, 6, 5]
    loss = layers.CTCLoss(from_logits=True)(*map(jnp.asarray, (labels, LOGITS, lengths, times)))
    close(loss, ipu.nn_ops.ctc_loss_v2(labels, LOGITS, lengths, times, 0))
    options = {"beam_width": 6, "from_logits": True}
    scores, _, found = layers.CTCInferenceLayer(top_paths=2, **options)(jnp.asarray(LOGITS), jnp.asarray(times))
    assert scores.shape == (3, 2)
    best = layers.CTCPredictionsLayer(**options)
    np.testing.assert_array_equal(best(jnp.asarray(LOGITS), jnp.asarray(times)), found[:, 0])
    assert layers.CTCPredictionsLayer.from_config(best.get_config()).get_config() == best.get_config()


# --- math, tables, images, statistics --------------------------------------------------------------------------------


@pytest.mark.parametrize("dimension", ["a_columns", "a_rows_b_columns", "b_rows"])
@pytest.mark.parametrize("transposed", [(False, False), (True, False), (False, True), (True, True)])
def test_serialized_products(dimension, transposed):
    a, b = (x.T if t else x for x, t in zip((A, B), transposed, strict=True))
    product = functools.partial(
        ipu.math_ops.serialized_matmul, serialization_factor=2, serialization_dimension=dimension
    )
    close(product(a, b, transpose_a=transposed[0], transpose_b=transposed[1]), A @ B)
    several = np.stack([B, 2 * B])
    close(product(A, several), A @ several)


def test_segments():
    close(ipu.math_ops.segment_sum(A, [0, 0, 1, 1, 1, 3], 4)[:, 0], [A[:2, 0].sum(), A[2:5, 0].sum(), 0, A[5, 0]])


def test_lookups():
    ids = np.array([[0, 3], [5, 5]])
    np.testing.assert_array_equal(ipu.embedding_ops.embedding_lookup(A, ids, serialization_factor=2), A[ids])
    found = ipu.embedding_ops.embedding_lookup(A, [-1, 6, 5])
    assert np.isnan(found[:2]).all(), "the table has no such rows"
    np.testing.assert_array_equal(found[2], A[5])


def test_images():
    image = RNG.integers(0, 256, (2, 3, 4, 3)).astype(np.uint8)
    offsets, scales = np.array([0.1, 0.2, 0.3], np.float32), np.array([2.0, 3.0, 4.0], np.float32)
    found = ipu.image_ops.normalise_image(image, offsets, scales, scale=1 / 255)
    assert (found.shape, found.dtype) == ((2, 3, 4, 4), "float16")
    close(found[..., :3], (image / 255 - offsets) * scales, 2e-3)
    assert not found[..., 3].any()
    assert ipu.image_ops.normalise_image(image.astype("float32"), offsets, scales).dtype == "float32"


def test_histograms():
    levels = [-1.0, 0.0, 1.0]
    expected = [np.sum(A < -1), np.sum((A >= -1) & (A < 0)), np.sum((A >= 0) & (A < 1)), np.sum(A >= 1)]
    found = ipu.statistics_ops.histogram(A, levels)
    np.testing.assert_array_equal(found, expected)
    np.testing.assert_array_equal(ipu.statistics_ops.histogram_update(found, A, levels), 2 * np.array(expected))
    close(ipu.statistics_ops.histogram_normalize(found), np.array(expected) / A.size)
    np.testing.assert_array_equal(
        ipu.statistics_ops.histogram(-A, [0.5], absolute_of_input=True)[1], np.sum(abs(A) > 0.5)
    )
    np.testing.assert_array_equal(ipu.statistics_ops.histogram([-0.5, 0.5, 1.5], levels=[0, 1]), [1, 1, 1])
    np.testing.assert_array_equal(ipu.statistics_ops.histogram([0.49999], np.float16([0.5])), [1, 0])
    edges = ipu.statistics_ops.fixed_width_bins(A, 5)
    close(edges, np.linspace(A.min(), A.max(), 6)[1:-1])


def test_dropout():
    x = np.ones((400, 50), np.float32)
    found = np.asarray(ipu.rand_ops.dropout(x, 0.25, seed=[3, 4]))
    assert set(np.unique(found)) == {np.float32(0), np.float32(1 / 0.75)}
    assert abs(found.mean() - 1) < 0.02
    np.testing.assert_array_equal(found, ipu.rand_ops.dropout(x, 0.25, seed=[3, 4]))
    assert (found != ipu.rand_ops.dropout(x, 0.25, seed=[3, 5])).any()
    shared = np.asarray(ipu.rand_ops.dropout(x, noise_shape=(400, 1), seed=[1, 2]))
    assert (shared == shared[:, :1]).all()


def test_dropout_without_a_seed_differs_from_launch_to_launch():
    strategy = ipu.ipu_strategy.IPUStrategy()
    found = [np.asarray(strategy.run(ipu.rand_ops.dropout, args=(jnp.ones(64),))) for _ in range(2)]
    assert (found[0] != found[1]).any()


def test_dropout_on_replicas_is_that_of_one_device():
    rows = np.ones((2, 4, 64), np.float32)  # two steps of four samples

    def dropped(replicas):
        with replication.strategy(replicas).scope():
            infeed = ipu.ipu_infeed_queue.IPUInfeedQueue([part for step in rows for part in np.split(step, replicas)])
            outfeed = ipu.ipu_outfeed_queue.IPUOutfeedQueue()

        def body(x):
            return outfeed.enqueue(ipu.rand_ops.dropout(x, seed=[3, 4]))

        replication.strategy(replicas).run(lambda: ipu.loops.repeat(2, body, [], infeed))
        return outfeed.dequeue().reshape(rows.shape)

    replication.configure_all()
    one = dropped(1)
    assert len(np.unique(one[0], axis=0)) == 4
    for replicas in (2, 4):
        np.testing.assert_array_equal(dropped(replicas), one)


# --- functions and programs ------------------------------------------------------------------------------------------


def test_barriers_and_outlined_functions_change_nothing():
    @ipu.outlined_function(name="square")
    def square(x):
        return x * x

    def through(x, both):
        first, second = ipu.control_flow_ops.barrier([square(x), 3 * x], insert_barrier_for_gradients=both)
        return jnp.sum(first + second)

    for both in (False, True):
        value, gradient = jax.jit(jax.value_and_grad(functools.partial(through, both=both)))(jnp.arange(3.0))
        assert value == 14
        np.testing.assert_array_equal(gradient, [3, 5, 7])
    assert ipu.outlined_function is ipu.functional_ops.outlined_function
    with pytest.raises(ValueError, match="'nothing' returns nothing"):
        ipu.outlined_function(lambda _: None, name="nothing")(1)


def test_expressions_and_layouts():
    close(ipu.custom_ops.codelet_expression_op(lambda x, y: x * y + 1, A, 2.0), 2 * A + 1)
    for same in (ipu.internal_ops.remap, ipu.internal_ops.remap_deduce):
        np.testing.assert_array_equal(same(A), A)


def test_printed_tensors(capfd):
    np.testing.assert_array_equal(
        jax.jit(lambda x: ipu.internal_ops.print_tensor(x, "values") * 2)(jnp.arange(2)), [0, 2]
    )
    jax.effects_barrier()
    assert capfd.readouterr().err == "values: [0 1]\n"


def test_operations_of_functional_models_are_saved_with_them(tmp_path):
    inputs = keras.Input((8,))
    hidden = ipu.nn_ops.gelu(keras.layers.Dense(8)(inputs), approximate=False)
    hidden = ipu.normalization_ops.group_norm(hidden, groups=2, scope="groups")
    model = keras.Model(inputs, ipu.math_ops.serialized_matmul(hidden, B, 2, "a_rows_b_columns"))
    expected = model.predict(A, verbose=0)
    assert expected.shape == (6, 4)
    model.save(tmp_path / "model.keras")
    close(keras.models.load_model(tmp_path / "model.keras").predict(A, verbose=0), expected)


# --- normalization ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("normalize", "groups"),
    [
        (functools.partial(ipu.normalization_ops.group_norm, groups=2), [[0, 2, 4, 6], [1, 3, 5, 7]]),
        (
            functools.partial(ipu.normalization_ops.group_norm, groups=2, strided_channel_grouping=False),
            [[0, 1, 2, 3], [4, 5, 6, 7]],
        ),
        (ipu.normalization_ops.layer_norm, [list(range(8))]),
        (ipu.normalization_ops.instance_norm, [[i] for i in range(8)]),
    ],
    ids=["group", "runs", "layer", "instance"],
)
def test_normalization(normalize: Callable[..., Any], groups: list[list[int]]):
    x = RNG.normal(3, 2, (2, 5, 8)).astype(np.float32)
    found = np.asarray(normalize(jnp.asarray(x)))
    for group in groups:
        part = x[..., group]
        mean, variance = (f(part, axis=(1, 2), keepdims=True) for f in (np.mean, np.var))
        close(found[..., group], (part - mean) / np.sqrt(variance + 1.53e-5), 1e-4)


MISTAKES: list[tuple[Callable[[], Any], str]] = [
    (lambda: ipu.math_ops.serialized_matmul(A, B, 5, "b_rows"), "is 5, but the size of 'b_rows' is 4"),
    (lambda: ipu.math_ops.serialized_matmul(A, B, 2, "rows"), "`serialization_dimension` is 'rows'"),
    (lambda: ipu.math_ops.serialized_matmul(A, A, 2, "b_rows"), "8 columns meet 6 rows"),
    (lambda: ipu.math_ops.segment_sum(A, [0, 1], 2), "Give one for each row"),
    (lambda: ipu.embedding_ops.embedding_lookup(A, [0], serialization_factor=4), "does not divide the 6 rows"),
    (lambda: ipu.embedding_ops.embedding_lookup(A, [0], serialization_factor=0), "`serialization_factor` is 0"),
    (lambda: ipu.rand_ops.dropout(A, 1.0), "`rate` is 1.0"),
    (lambda: ipu.rand_ops.dropout(A), r"Use `ipu\.keras\.layers\.Dropout`"),
    (lambda: ipu.rand_ops.dropout(A, seed=[1]), "Give two whole numbers"),
    (lambda: ipu.rand_ops.dropout([1, 2], seed=[1, 2]), "dtype int32, in which .* cannot be scaled"),
    (lambda: ipu.image_ops.normalise_image(A, [0, 0, 0], [1, 1, 1]), r"`image` has channels of shape \(8,\)"),
    (lambda: ipu.nn_ops.ctc_loss_v2([[1]], LOGITS[0], [1], [1], 0), r"Give them as \(longest time, batch, classes\)"),
    (lambda: ipu.nn_ops.ctc_loss_v2([[1]], LOGITS, [1], [1], 5), "`blank_index` is 5"),
    (lambda: ipu.nn_ops.ctc_beam_search_decoder(LOGITS, [1], 3, 4), "`top_paths` is 4"),
    (lambda: ipu.statistics_ops.histogram_update([1.0], A, [0.0]), "one more bin than levels"),
    (lambda: ipu.normalization_ops.group_norm(A, reuse=True), "`reuse` is True"),
    (lambda: ipu.normalization_ops.group_norm(A, param_initializers={"b": "zeros"}), "one of 'beta', 'gamma'"),
]


@pytest.mark.parametrize("number", range(len(MISTAKES)))
def test_mistakes(number):
    make, words = MISTAKES[number]
    with pytest.raises(ValueError, match=words):
        make()
