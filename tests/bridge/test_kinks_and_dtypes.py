"""Gradients of TensorFlow's operations where they have kinks or ties, and dtypes of results: as in TensorFlow."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import openipu  # noqa: F401 - puts Keras on JAX

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest

tf: Any = None  # conftest.py puts TensorFlow here
X = np.array([[-1.0, 0.0, 2.0, 6.0], [3.0, 0.5, -2.0, 0.0]], np.float32)
Y = np.array([[0.0, 0.0, 2.0, 1.0], [3.0, 1.0, -3.0, 1.0]], np.float32)
NAN, INF = np.nan, np.inf

AT_KINKS: dict[str, Callable[[Any, Any], Any]] = {
    "abs": lambda x, _: tf.abs(x),
    "clip_by_norm of axes": lambda x, _: tf.clip_by_norm(x, 0.5, axes=[1]),
    "clip_by_norm of zeros": lambda x, _: tf.clip_by_norm(x * 0, 1.0),
    "clip_by_value": lambda x, _: tf.clip_by_value(x, 0.0, 2.0),
    "clip_by_value with lists": lambda x, _: tf.clip_by_value(x, [0.0, 0, 0, 0], [1.0, 2, 2, 9]),
    "clip_by_value with swapped bounds": lambda x, _: tf.clip_by_value(x, 2.0, 0.0),
    "cumsum": lambda x, _: tf.cumsum(x, axis=1, exclusive=True),
    "cumsum of rows": lambda x, _: tf.cumsum(x, axis=-2, exclusive=True, reverse=True),
    "elu": lambda x, _: tf.nn.elu(x),
    "leaky_relu": lambda x, _: tf.nn.leaky_relu(x),
    "list minus value": lambda x, y: [1.0, 2.0, 3.0, 4.0] - x * y,
    "maximum": lambda x, y: tf.maximum(x, y) * 2.0,
    "maximum of a broadcast value": lambda x, y: tf.maximum(x, y[:, :1]),
    "maximum of a number": lambda x, y: tf.maximum(0.0, x) + tf.maximum(y, 0.0),
    "minimum": lambda x, y: tf.minimum(x, y) * tf.minimum(x, 6.0),
    "relu": lambda x, _: tf.nn.relu(x) + tf.nn.relu6(x),
    "selu": lambda x, _: tf.nn.selu(x),
    "sigmoid cross entropy": lambda x, y: tf.nn.sigmoid_cross_entropy_with_logits(labels=y, logits=x),
    "softmax cross entropy": lambda x, _: tf.nn.softmax_cross_entropy_with_logits([[0.0, 0, 1, 0]] * 2, x),
    "sparse cross entropy": lambda x, _: tf.nn.sparse_softmax_cross_entropy_with_logits(labels=[1, 3], logits=x),
    "split": lambda x, _: tf.split(x, np.prod([2, 1]), axis=1)[1],
    "value in arithmetic with lists": lambda x, y: (x - [1.0, 2, 3, 4]) * (1.0, 2.0, 1.0, 2.0) / [[1], [2]] + y,
}


def both(function, *values):
    """The results and gradients of TensorFlow and of a program."""
    with tf.GradientTape() as tape:
        tensors = [tf.constant(value) for value in values]
        tape.watch(tensors)
        expected = function(*tensors)
        total = tf.reduce_sum(expected * weights(expected.shape))
    slopes = tape.gradient(total, tensors, unconnected_gradients="zero")

    def summed(*arrays):
        result = function(*arrays)
        return jnp.sum(result * weights(result.shape)), result

    places = tuple(range(len(values)))
    (_, result), found = jax.jit(jax.value_and_grad(summed, places, has_aux=True))(*values)
    return (expected, *map(tf.convert_to_tensor, slopes)), (result, *found)


def weights(shape):
    return np.arange(1, np.prod(shape) + 1, dtype=np.float32).reshape(shape)


@pytest.mark.parametrize("name", AT_KINKS)
def test_gradients_at_kinks_and_ties_are_tensorflows(name):
    expected, found = both(AT_KINKS[name], X, Y)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


VALUES: dict[str, Callable[[Any], Any]] = {
    "clip_by_value": lambda x: tf.clip_by_value(x, -1.0, 1.0),
    "cumsum": lambda x: tf.cumsum(x, exclusive=True),
    "cumsum reversed": lambda x: tf.cumsum(x, exclusive=True, reverse=True),
    "maximum": lambda x: tf.stack([tf.maximum(x, 1.0), tf.maximum(1.0, x), tf.maximum(x, x[::-1])]),
    "minimum": lambda x: tf.stack([tf.minimum(x, 1.0), tf.minimum(1.0, x), tf.minimum(x, x[::-1])]),
    "others": lambda x: tf.stack([tf.abs(x), tf.nn.leaky_relu(x), tf.nn.selu(x)]),
}


@pytest.mark.parametrize("name", VALUES)
def test_results_for_infinities_and_nan_are_tensorflows(name):
    values = np.array([1.0, -INF, 2.0, INF, 3.0, NAN, 4.0], np.float32)
    np.testing.assert_allclose(jax.jit(VALUES[name])(values), VALUES[name](tf.constant(values)), rtol=1e-6)


DTYPES: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "maximum with a list": ("float16", lambda x: tf.maximum(x, [0.5])),
    "minimum with a number": ("float16", lambda x: tf.minimum(0.5, x)),
    "where with a list": ("float16", lambda x: tf.where(x > 1, x, [0.5])),
    "list of numbers minus value": ("float16", lambda x: [0.5, 1, 2] - x),
    "list of whole numbers": ("uint8", lambda x: x * [1, 2, 3]),
    "selu": ("float16", lambda x: tf.nn.selu(x) + tf.nn.leaky_relu(x)),
    "sum of bytes": ("int8", lambda x: tf.reduce_sum(x, axis=0)),
    "product of bytes": ("int8", lambda x: tf.reduce_prod(x, axis=0)),
    "abs of bytes": ("int8", lambda x: tf.abs(-x)),
}


@pytest.mark.parametrize("name", DTYPES)
def test_dtypes_of_results_are_tensorflows(name):
    dtype, function = DTYPES[name]
    values = np.array([0, 1, 2], dtype)
    expected, result = function(tf.constant(values)), jax.jit(function)(values)
    assert result.dtype == expected.dtype.as_numpy_dtype == np.dtype(dtype)
    np.testing.assert_allclose(result, expected, rtol=1e-3)


COMPLEX: dict[str, Callable[[Any], Any]] = {
    "abs": lambda x: tf.abs(tf.complex(x, x * 2.0) * tf.complex(1.0, 2.0)),
    "angle": lambda x: tf.math.angle(tf.complex(x + 5.0, x)),
    "conj": lambda x: tf.math.imag(tf.math.conj(tf.complex(x, x * x))),
    "fft": lambda x: tf.abs(tf.signal.fft(tf.cast(x, tf.complex64))),
    "fft2d": lambda x: tf.math.real(tf.signal.ifft(tf.signal.fft2d(tf.cast(x, tf.complex64)))),
    "imag": lambda x: tf.math.imag(tf.signal.rfft(x)),
    "irfft": lambda x: tf.signal.irfft(tf.signal.rfft(x) * tf.complex([1.0, 2.0, 3.0], [0.5, 1.0, 0.0]), [4]),
    "rfft": lambda x: tf.abs(tf.signal.rfft(x)),
    "spectrum": lambda x: tf.math.log(tf.abs(tf.signal.rfft(x)) ** 2 + 1e-3),
    "stft": lambda x: tf.abs(tf.signal.stft(tf.reshape(x, [-1]), 4, 2)),
}


@pytest.mark.parametrize("name", COMPLEX)
def test_gradients_through_complex_values_are_tensorflows(name):
    expected, found = both(COMPLEX[name], X + 0.25 * Y**2)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-4)


def test_integers_next_to_complex_values_have_no_gradient():
    index = jnp.array([[0, 1], [1, 2]])
    found = jax.jit(jax.grad(lambda x, i: jnp.sum(tf.math.real(tf.gather_nd(tf.complex(x, x), i)))))(X, index)
    np.testing.assert_array_equal(found, [[0, 1, 0, 0], [0, 0, 1, 0]])


def test_lists_meet_symbolic_tensors_in_arithmetic():
    inputs = keras.Input((4,))
    model = keras.Model(inputs, [1.0, 2, 3, 4] - inputs * [2.0, 2, 2, 2])
    np.testing.assert_allclose(model.predict_on_batch(X), [1.0, 2, 3, 4] - X * 2, rtol=1e-6)


def test_shapes_may_be_tensors():
    def wide(x):
        return tf.image.resize(
            tf.reshape(tf.tile(x, tf.constant([1, 2])), tf.stack([1, 4, -1, 1])), tf.constant([8, 8])
        )

    np.testing.assert_allclose(jax.jit(wide)(X), wide(tf.constant(X)), rtol=1e-5, atol=1e-6)


SLICES: dict[str, Callable[[Any], Any]] = {
    "known begin": lambda x: tf.slice(x, [1, 2], [-1, -1]),
    "computed begin": lambda x: tf.slice(x, [tf.cast(x[1, 0], tf.int32) - 2, 1], [1, -1]),
    "computed vector": lambda x: tf.slice(x, tf.cast(x[1, :2], tf.int32) - [2, 0], [1, 3]),
}


@pytest.mark.parametrize("name", SLICES)
def test_slices_begin_where_they_are_told(name):
    np.testing.assert_array_equal(jax.jit(SLICES[name])(X), SLICES[name](tf.constant(X)))


@pytest.mark.parametrize("begin", ["list", "vector"])
def test_a_slice_to_the_end_from_a_computed_begin_is_refused(begin):
    def rest(x):
        first = tf.cast(x[1, 0], tf.int32)
        return tf.slice(x, [first, 0] if begin == "list" else tf.stack([first, 0]), [-1, 4])

    with pytest.raises(NotImplementedError, match=r"size of -1 for axis 0.*test_kinks_and_dtypes\.py:\d+"):
        jax.jit(rest)(X)


@pytest.mark.parametrize("layout", ["NHWC", "NCHW"])
def test_convolutions_with_explicit_paddings_are_tensorflows(layout):
    generator = np.random.default_rng(2)
    image = generator.normal(size=(2, 6, 5, 3)).astype(np.float32)
    kernel = generator.normal(size=(3, 3, 3, 4)).astype(np.float32)
    paddings = [[0, 0], [1, 1], [1, 0], [0, 0]]
    expected = tf.nn.conv2d(image, kernel, 2, paddings)
    if layout == "NCHW":
        image, paddings = np.moveaxis(image, 3, 1), [paddings[i] for i in (0, 3, 1, 2)]
    found = jax.jit(lambda x, k: tf.nn.conv2d(x, k, 2, paddings, data_format=layout))(image, kernel)
    found = found if layout == "NHWC" else np.moveaxis(found, 1, 3)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
