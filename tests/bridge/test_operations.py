"""TensorFlow's operations on values of JAX: equal to TensorFlow's own results, under jit, gradients included."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import openipu  # noqa: F401 - puts Keras on JAX

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest

tf: Any = None  # conftest.py puts TensorFlow here
X = np.random.default_rng(0).uniform(0.1, 0.9, (4, 6)).astype(np.float32)
Y = np.random.default_rng(1).uniform(0.1, 0.9, (4, 6)).astype(np.float32)
IMAGE = np.random.default_rng(2).uniform(0.1, 0.9, (2, 6, 6, 3)).astype(np.float32)
KERNEL = np.random.default_rng(3).uniform(-0.5, 0.5, (3, 3, 3, 4)).astype(np.float32)
LABELS = np.array([1, 0, 5, 2], np.int32)

SMOOTH: dict[str, Callable[[Any, Any], Any]] = {
    "abs": lambda x, y: tf.abs(x - y),
    "add_n": lambda x, y: tf.add_n([x, y, x]),
    "arithmetic": lambda x, y: (x + y) * x / y - x**2,
    "avg_pool": lambda x, y: tf.nn.avg_pool(tf.reshape(x, [1, 4, 6, 1]), 2, 2, "SAME") * tf.reduce_sum(y),
    "bias_add": lambda x, y: tf.nn.bias_add(x, y[0]),
    "broadcast_to": lambda x, y: tf.broadcast_to(x[:, :1], [4, 6]) * y,
    "cast": lambda x, y: tf.cast(tf.cast(x, tf.float16), tf.float32) + y,
    "clip_by_global_norm": lambda x, y: tf.clip_by_global_norm([x, y], 0.5)[0][0],
    "clip_by_norm": lambda x, y: tf.clip_by_norm(x, 0.5) * y,
    "clip_by_value": lambda x, y: tf.clip_by_value(x, 0.2, 0.7) * y,
    "concat": lambda x, y: tf.concat([x, y], axis=-1),
    "constants": lambda x, y: x * tf.constant([1.0, 2, 3, 4, 5, 6]) + y,
    "cos": lambda x, y: tf.cos(x) * tf.math.sin(y),
    "cross entropy": lambda x, y: tf.nn.softmax_cross_entropy_with_logits(tf.nn.softmax(y), x),
    "cumsum": lambda x, y: tf.cumsum(x, axis=1, exclusive=True, reverse=True) * y,
    "divide_no_nan": lambda x, y: tf.math.divide_no_nan(x, tf.maximum(y - 0.5, 0.0)),
    "einsum": lambda x, y: tf.einsum("ij,kj->ik", x, y),
    "elu": lambda x, y: tf.nn.elu(x - y),
    "erf": lambda x, y: tf.math.erf(x) + tf.math.lgamma(y),
    "exp": lambda x, y: tf.exp(x) - tf.math.expm1(y),
    "expand_dims": lambda x, y: tf.expand_dims(x, 1) * tf.expand_dims(y, axis=0),
    "gather": lambda x, y: tf.gather(x, [2, 0, 2]) * tf.gather(y, [1, 1, 0], axis=0),
    "gelu": lambda x, y: tf.nn.gelu(x - y) + tf.nn.gelu(x, approximate=True),
    "identity": lambda x, y: tf.identity(x) * tf.stop_gradient(y),
    "l2_loss": lambda x, y: tf.nn.l2_loss(x) + tf.norm(y),
    "l2_normalize": lambda x, y: tf.math.l2_normalize(x, axis=-1) * y,
    "leaky_relu": lambda x, y: tf.nn.leaky_relu(x - y),
    "log": lambda x, y: tf.math.log(x) + tf.math.log1p(y),
    "log_softmax": lambda x, y: tf.nn.log_softmax(x) * y,
    "logsumexp": lambda x, y: tf.reduce_logsumexp(x * y, axis=1),
    "matmul": lambda x, y: tf.matmul(x, y, transpose_b=True),
    "matmul transposed": lambda x, y: tf.linalg.matmul(x, y, transpose_a=True),
    "max_pool": lambda x, y: tf.nn.max_pool2d(tf.reshape(x, [1, 4, 6, 1]), [2, 2], [2, 2], "VALID") * y[0, 0],
    "maximum": lambda x, y: tf.maximum(x, y) + tf.minimum(x, 0.5),
    "moments": lambda x, y: tf.stack(tf.nn.moments(x * y, axes=[0])),
    "norm": lambda x, y: tf.norm(x, axis=1) + tf.linalg.norm(y, ord=1, axis=1),
    "one_hot": lambda x, y: tf.one_hot([1, 0, 5, 2], 6, on_value=2.0, off_value=-1.0) * x * y,
    "pad": lambda x, y: tf.pad(x * y, [[1, 0], [0, 2]], constant_values=1.0),
    "pow": lambda x, y: tf.pow(x, y + 1),
    "reduce_max": lambda x, y: tf.reduce_max(x, axis=1) * tf.reduce_min(y),
    "reduce_mean": lambda x, y: tf.reduce_mean(x * y, axis=[0, 1], keepdims=True),
    "reduce_prod": lambda x, y: tf.reduce_prod(x, axis=1) * tf.reduce_sum(y, 1),
    "reduce_std": lambda x, y: tf.math.reduce_std(x, axis=0) + tf.math.reduce_variance(y, axis=0),
    "relu": lambda x, y: tf.nn.relu(x - y) + tf.nn.relu6(y),
    "reshape": lambda x, y: tf.reshape(x * y, [tf.shape(x)[0] * 2, -1]),
    "rsqrt": lambda x, y: tf.math.rsqrt(x) + tf.sqrt(y),
    "selu": lambda x, y: tf.nn.selu(x - y),
    "sigmoid": lambda x, y: tf.sigmoid(x) * tf.tanh(y),
    "sigmoid cross entropy": lambda x, y: tf.nn.sigmoid_cross_entropy_with_logits(labels=y, logits=x),
    "slice": lambda x, y: tf.slice(x, [1, 2], [2, -1]) * y[1:3, 2:],
    "softmax": lambda x, y: tf.nn.softmax(x, axis=0) * y,
    "softplus": lambda x, y: tf.nn.softplus(x) + tf.nn.softsign(y),
    "sparse cross entropy": lambda x, y: tf.nn.sparse_softmax_cross_entropy_with_logits(LABELS, x * y),
    "split": lambda x, y: tf.split(x, 3, axis=1)[1] * tf.split(y, [1, 2, -1], axis=1)[1],
    "square": lambda x, y: tf.square(x) + tf.math.squared_difference(x, y),
    "squeeze": lambda x, y: tf.squeeze(tf.expand_dims(x, 0), axis=[0]) * y,
    "stack": lambda x, y: tf.stack([x, y], axis=1),
    "swish": lambda x, y: tf.nn.swish(x) * y,
    "tensordot": lambda x, y: tf.tensordot(x, y, [[0], [0]]),
    "tile": lambda x, y: tf.tile(x * y, [2, 1]),
    "top_k": lambda x, y: tf.math.top_k(x * y, k=2)[0],
    "transpose": lambda x, y: tf.transpose(x, perm=[1, 0]) @ y,
    "unstack": lambda x, y: tf.unstack(x, axis=1)[2] * tf.unstack(y, axis=1)[1],
    "where": lambda x, y: tf.where(x > y, x, y * 2),
    "zeros_like": lambda x, y: tf.zeros_like(x) + tf.ones_like(y) * x + tf.zeros([4, 6]) + tf.fill([4, 6], 2.0) * y,
    # Not in the table: TensorFlow compiles them.
    "igamma (TensorFlow)": lambda x, y: tf.math.igamma(tf.stop_gradient(x), y * 2),
    "band_part (TensorFlow)": lambda x, y: tf.linalg.band_part(x, 0, 1) * y,
    "scatter (TensorFlow)": lambda x, y: tf.tensor_scatter_nd_add(x, [[1], [3]], y[:2]),
}


@pytest.mark.parametrize("name", SMOOTH)
def test_results_and_gradients_are_tensorflows(name):
    function = SMOOTH[name]
    with tf.GradientTape() as tape:
        tensors = tf.constant(X), tf.constant(Y)
        tape.watch(tensors)
        expected = function(*tensors)
        total = tf.reduce_sum(expected * tf.cast(tf.size(expected), tf.float32))
    assert isinstance(expected, tf.Tensor)
    slopes = tape.gradient(total, tensors, unconnected_gradients="zero")

    def summed(x, y):
        result = function(x, y)
        assert isinstance(result, jax.Array)
        return jnp.sum(result) * result.size, result

    (_, result), found = jax.jit(jax.value_and_grad(summed, (0, 1), has_aux=True))(X, Y)
    assert result.dtype == expected.dtype.as_numpy_dtype
    np.testing.assert_allclose(result, expected, rtol=2e-5, atol=2e-6)
    for one, other in zip(found, slopes, strict=True):
        np.testing.assert_allclose(one, tf.convert_to_tensor(other), rtol=2e-4, atol=2e-4)


EXACT: dict[str, Callable[[Any, Any], Any]] = {
    "mean of large numbers": lambda x, _: tf.reduce_mean(tf.cast(x * 1e9, tf.int32) - 3, axis=[0, 1]),
    "mean of bytes": lambda x, y: tf.reduce_mean(tf.cast((y - x) * 99, tf.int8), axis=0),
    "argmax": lambda x, _: tf.argmax(input=x, axis=-1, output_type=tf.int32),
    "argmin": lambda x, _: tf.math.argmin(x, axis=0, output_type=tf.int32),
    "argmax without axis": lambda x, _: tf.argmax(x, output_type=tf.int32),
    "ceil": lambda x, y: tf.math.ceil(x * 3) + tf.floor(y * 3) + tf.round(x * 5),
    "comparisons": lambda x, y: tf.stack([x < y, tf.less_equal(x, y), tf.greater(x, y), tf.not_equal(x, y)]),
    "equal": lambda x, y: tf.equal(tf.cast(x * 3, tf.int32), tf.cast(y * 3, tf.int32)),
    "floormod": lambda x, y: tf.math.floormod(tf.cast(x * 9, tf.int32), 4) + tf.cast(y * 9, tf.int32) // 2,
    "in_top_k": lambda x, _: tf.math.in_top_k(LABELS, x, 2),
    "is_finite": lambda x, y: tf.logical_and(tf.math.is_finite(x), tf.logical_not(tf.math.is_nan(y))),
    "mean of whole numbers": lambda x, _: tf.reduce_mean(tf.cast(x * 9, tf.int32)),
    "one_hot": lambda x, _: tf.one_hot(tf.cast(x[:, 0] * 5, tf.int32), 5),
    "range": lambda x, _: tf.cast(tf.range(3, 9, 2), tf.float32) * x[0, :3],
    "reduce_all": lambda x, y: tf.stack([tf.reduce_all(x < y), tf.reduce_any(x < y)]),
    "reverse": lambda x, _: tf.reverse(x, axis=[1]),
    "shape": lambda x, _: tf.reduce_sum(x) * 0 + tf.cast(tf.size(x) + tf.rank(x) + tf.shape(x)[1], tf.float32),
    "sign": lambda x, y: tf.sign(x - y) - tf.negative(y),
}


@pytest.mark.parametrize("name", EXACT)
def test_results_without_gradients_are_tensorflows(name):
    expected = EXACT[name](tf.constant(X), tf.constant(Y))
    result = jax.jit(EXACT[name])(X, Y)
    assert result.dtype == expected.dtype.as_numpy_dtype
    np.testing.assert_allclose(result, expected, rtol=1e-6)


@pytest.mark.parametrize("padding", ["SAME", "VALID"])
@pytest.mark.parametrize("strides", [1, [1, 2, 2, 1]])
def test_convolutions_are_tensorflows(padding, strides):
    expected = tf.nn.conv2d(IMAGE, KERNEL, strides, padding)
    result = jax.jit(lambda x, k: tf.nn.conv2d(x, k, strides=strides, padding=padding))(IMAGE, KERNEL)
    np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-5)


def test_tensors_and_arrays_meet_in_arithmetic_on_either_side():
    tensor, array = tf.constant([1.0, 2.0]), jnp.array([3.0, 4.0])
    for result in (tensor + array, array + tensor):
        np.testing.assert_array_equal(result, [4, 6])
    np.testing.assert_array_equal(tensor - array, [-2, -2])
    np.testing.assert_array_equal(tensor < array, [True, True])
    np.testing.assert_array_equal(array.numpy(), [3, 4])


def test_tensorflow_alone_is_tensorflow():
    @tf.function
    def double(x):
        total = x
        for _ in tf.range(3):
            total += x
        return tf.reduce_sum(total)

    assert isinstance(tf.reduce_sum(tf.ones(3)), tf.Tensor)
    assert float(double(tf.ones(2))) == 8
    assert isinstance(next(iter(tf.data.Dataset.range(3).map(lambda x: tf.cast(x, tf.float32) * 2))), tf.Tensor)


def test_an_operation_on_symbolic_tensors_is_part_of_the_model():
    inputs = keras.Input((6,))
    outputs = tf.reduce_sum(tf.nn.softmax(tf.square(inputs)) * 2.0, axis=1, keepdims=True)
    model = keras.Model(inputs, outputs)
    assert model.output_shape == (None, 1)
    np.testing.assert_allclose(model.predict_on_batch(X), np.full((4, 1), 2.0), rtol=1e-5)


def test_a_layer_with_tensorflows_operations_trains():
    class Scale(keras.layers.Layer):
        def build(self, shape):
            self.kernel = self.add_weight("kernel", shape=[shape[-1], 1], initializer="ones")

        def call(self, x):
            return tf.nn.relu(tf.matmul(tf.cast(x, tf.float32), self.kernel))

    model = keras.Sequential([keras.layers.InputLayer(shape=(6)), Scale()])
    model.compile(keras.optimizers.SGD(lr=0.1), lambda y, p: tf.reduce_mean(tf.square(y - p)))
    before = np.asarray(model.weights[0].value)
    losses = model.fit(X, Y[:, :1], epochs=3, verbose=0).history["loss"]
    assert losses[-1] < losses[0]
    assert not np.array_equal(before, model.weights[0].value)


def test_a_function_in_a_layer_is_part_of_the_layer():
    class Shift(keras.layers.Layer):
        @tf.function
        def call(self, x):
            return tf.nn.relu(x) + shift(x)

    @tf.function
    def shift(x):
        return tf.reduce_mean(x, axis=-1, keepdims=True)

    layer = Shift()
    np.testing.assert_allclose(layer(X), X + X.mean(1, keepdims=True), rtol=1e-5)
    model = keras.Sequential([keras.layers.Input((6,)), layer, keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    assert np.isfinite(model.fit(X, Y[:, :1], verbose=0).history["loss"]).all()


def test_what_tensorflow_compiles_is_named_once(caplog):
    caplog.set_level(logging.INFO, "openipu")
    for _ in range(2):
        jax.jit(tf.math.bessel_i0e)(X)
    assert caplog.text.count("tf.math.bessel_i0e is computed by TensorFlow inside the program") == 1


@pytest.mark.parametrize("operation", ["strings.as_string", "unique", "raw_ops.Where"])
def test_what_cannot_be_compiled_is_named_with_its_line(operation):
    function = tf
    for part in operation.split("."):
        function = getattr(function, part)
    message = rf"tf\.{operation} cannot be part of a program \(.*test_operations\.py:\d+\)"
    with pytest.raises(NotImplementedError, match=message):
        jax.jit(lambda x: function(condition=x > 0) if "Where" in operation else function(x))(jnp.ones(2))


def test_checks_of_values_say_that_they_are_not_made(caplog):
    caplog.set_level(logging.INFO, "openipu")
    jax.jit(tf.debugging.assert_non_negative)(jnp.ones(2))
    assert "tf.debugging.assert_non_negative has no effect" in caplog.text


def test_random_numbers_in_a_layer_are_refused_with_the_remedy():
    with pytest.raises(NotImplementedError, match=r"keras\.random\.SeedGenerator"):
        jax.jit(lambda x: x + tf.random.normal([2]))(jnp.ones(2))
