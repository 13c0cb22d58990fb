"""Functions of `tf.keras.backend` on values of JAX: equal to what they are for TensorFlow's own tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import openipu  # noqa: F401 - puts Keras on JAX

import jax
import keras
import numpy as np
import pytest

tf: Any = None  # conftest.py puts TensorFlow here
X = np.array([[-1.0, 0.0, 2.0], [3.0, 0.5, -2.0]], np.float32)
CLASSES = np.array([[1], [2]])

FUNCTIONS: dict[str, Callable[[Any, Any], Any]] = {
    "batch_dot": lambda k, x: k.batch_dot(k.reshape(x, (2, 3, 1, 1)), k.reshape(x, (2, 1, 3)), axes=(3, 1)),
    "batch_flatten": lambda k, x: k.batch_flatten(k.reshape(x, (1, 2, 3))),
    "bias_add": lambda k, x: k.bias_add(x, x[0]),
    "cast_to_floatx": lambda k, x: k.cast_to_floatx(x),
    "categorical_crossentropy": lambda k, x: k.categorical_crossentropy(k.sigmoid(x), k.softmax(x)),
    "concatenate": lambda k, x: k.concatenate([x, x]),
    "dot": lambda k, x: k.dot(x, k.transpose(x)),
    "dot of three axes": lambda k, x: k.dot(k.reshape(x, (1, 2, 3)), k.reshape(x, (1, 3, 2))),
    "dtype": lambda k, x: k.cast(k.cast(x, "int32"), k.dtype(x)),
    "eye": lambda k, x: k.dot(x, k.eye(3)) + k.zeros((2, 3)) + k.ones((2, 3)),
    "mean": lambda k, x: k.mean(x, axis=-1, keepdims=True),
    "mean of booleans": lambda k, x: k.mean(k.equal(k.argmax(x), k.constant([2, 1], dtype="int64"))),
    "ndim": lambda k, x: x * k.ndim(x) * k.int_shape(x)[1],
    "repeat": lambda k, x: k.repeat(x, 3),
    "repeat_elements": lambda k, x: k.repeat_elements(x, 2, axis=1),
    "resize_images": lambda k, x: k.resize_images(k.reshape(x, (1, 2, 3, 1)), 2, 2, "channels_last"),
    "softmax": lambda k, x: k.softmax(x),
    "softmax of axes": lambda k, x: k.softmax(x, axis=(0, 1)),
    "sparse_categorical_crossentropy": lambda k, x: k.sparse_categorical_crossentropy(CLASSES, k.softmax(x)),
    "std": lambda k, x: k.std(x, axis=[0, 1]),
    "switch": lambda k, x: k.switch(x > 0, x, x * 2),
    "switch of functions": lambda k, x: k.switch(x[:, 0] > 0, lambda: x[:, 1], lambda: x[:, 2]),
    "switch of more axes": lambda k, x: k.switch(x > 0, k.stack([x, x], -1), k.stack([-x, x], -1)),
    "var": lambda k, x: k.var(x),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_of_the_backend_are_those_of_tensorflow(name):
    backend = tf.keras.backend
    expected = FUNCTIONS[name](backend, tf.constant(X))
    result = jax.jit(lambda x: FUNCTIONS[name](backend, x))(X)
    assert result.dtype == expected.dtype.as_numpy_dtype
    np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-6)


def test_a_condition_selects_more_than_it_has():
    with pytest.raises(ValueError, match="more axes"):
        jax.jit(lambda x: tf.keras.backend.switch(x > 0, x[0], x[1]))(X)


def test_softmax_needs_two_axes():
    with pytest.raises(ValueError, match="1D"):
        jax.jit(tf.keras.backend.softmax)(X[0])


def test_a_loss_and_a_metric_of_the_backend_train():
    backend = tf.keras.backend

    def hits(y, p):
        return backend.mean(backend.equal(backend.round(p), y), axis=-1)

    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1, activation="sigmoid")])
    model.compile("sgd", lambda y, p: backend.mean(backend.square(p - y), axis=-1), metrics=[hits])
    history = model.fit(X, np.array([[0.0], [1.0]]), epochs=3, verbose=0).history
    assert history["loss"][-1] < history["loss"][0]
    assert 0 <= history["hits"][-1] <= 1


def test_a_model_is_built_with_the_backend():
    inputs = keras.Input((3,))
    outputs = keras.layers.Lambda(lambda x: tf.keras.backend.mean(x, axis=-1, keepdims=True))(inputs)
    np.testing.assert_allclose(keras.Model(inputs, outputs).predict_on_batch(X), X.mean(1, keepdims=True), rtol=1e-5)
