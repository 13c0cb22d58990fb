"""Losses over a sample of the classes: the numbers and gradients of TensorFlow, and the sampler."""

from __future__ import annotations

from typing import Any

import openipu as ipu
from openipu.ops._sampled_losses import drawn

import jax
import jax.numpy as jnp
import numpy as np
import pytest

tf: Any = None  # conftest.py puts TensorFlow here
CLASSES, SAMPLED, WIDTH, ROWS = 50, 12, 4, 6
rng = np.random.default_rng(0)
WEIGHTS = rng.normal(size=(CLASSES, WIDTH)).astype(np.float32)
BIASES = rng.normal(size=CLASSES).astype(np.float32)
INPUTS = rng.normal(size=(ROWS, WIDTH)).astype(np.float32)


def sample(columns: int) -> tuple[np.ndarray, tuple[np.ndarray, ...]]:
    """Labels, some of which are in the sample, and the sample."""
    labels = rng.integers(0, CLASSES, (ROWS, columns))
    classes = np.unique(np.concatenate([labels[:3, 0], np.arange(CLASSES)]))[:SAMPLED]
    values = classes, rng.uniform(0.1, 1, labels.shape), rng.uniform(0.1, 1, SAMPLED)
    return labels, tuple(np.asarray(v, np.float32 if v.dtype == float else v.dtype) for v in values)


@pytest.mark.parametrize("name", ["nce_loss", "sampled_softmax_loss"])
@pytest.mark.parametrize("columns", [1, 3])
@pytest.mark.parametrize("hits", [True, False])
def test_a_loss_and_its_gradients_are_those_of_tensorflow(name, columns, hits):
    labels, values = sample(columns)
    options = {"num_sampled": SAMPLED, "num_classes": CLASSES, "num_true": columns, "remove_accidental_hits": hits}

    def ours(weights, biases, inputs):
        return getattr(ipu.nn_ops, name)(weights, biases, labels, inputs, sampled_values=values, **options)

    found = ours(WEIGHTS, BIASES, INPUTS)
    slopes = jax.grad(lambda *args: jnp.sum(ours(*args)), argnums=(0, 1, 2))(WEIGHTS, BIASES, INPUTS)
    variables = [tf.Variable(a) for a in (WEIGHTS, BIASES, INPUTS)]
    with tf.GradientTape() as tape:
        given = tuple(map(tf.constant, values))
        weights, biases, inputs = variables
        expected = getattr(tf.nn, name)(weights, biases, labels, inputs, sampled_values=given, **options)
        total = tf.reduce_sum(expected)
    assert found.shape == (ROWS,)
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    for one, other in zip(slopes, tape.gradient(total, variables), strict=True):
        np.testing.assert_allclose(one, tf.convert_to_tensor(other), atol=1e-5)


def test_small_numbers_are_drawn_more_often_as_they_are_expected_to_be():
    keys = jax.random.split(jax.random.key(1), 4000)
    draw = jax.vmap(lambda key: drawn(key, SAMPLED, CLASSES, jnp.arange(CLASSES)))
    classes, expected, _ = draw(keys)
    assert all(len(set(row)) == SAMPLED for row in np.asarray(classes[:50]))
    often = np.bincount(np.asarray(classes).ravel(), minlength=CLASSES) / len(keys)
    # Expected numbers are conditional on when a sample was complete, and TensorFlow's are too.
    np.testing.assert_allclose(often, np.asarray(expected).mean(0), atol=0.05)
    assert often[0] > 4 * often[-1]


def test_a_seed_decides_about_the_classes_and_is_needed_outside_of_programs():
    labels, _ = sample(1)

    def loss(**options):
        return ipu.nn_ops.sampled_softmax_loss(WEIGHTS, BIASES, labels, INPUTS, SAMPLED, CLASSES, **options)

    np.testing.assert_array_equal(loss(seed=(1, 2)), loss(seed=(1, 2)))
    assert not np.array_equal(loss(seed=(1, 2)), loss(seed=(1, 3)))
    with pytest.raises(ValueError, match=r"got no seed outside of a program .* Give `sampled_values`"):
        loss()
    with pytest.raises(ValueError, match=r"Give the shape \(6, 2\)"):
        loss(num_true=2, seed=(1, 2))
    with pytest.raises(ValueError, match="num_sampled"):
        ipu.nn_ops.nce_loss(WEIGHTS, BIASES, labels, INPUTS, CLASSES + 1, CLASSES)
