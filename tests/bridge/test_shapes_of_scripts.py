"""Shapes as scripts read them: tuples with the methods of TensorFlow's."""

from __future__ import annotations

from typing import Any

import openipu  # noqa: F401 - puts Keras on JAX

import jax
import jax.numpy as jnp
import keras
import numpy as np

tf: Any = None  # conftest.py puts TensorFlow here
X = np.ones((2, 3), np.float32)


def check(value: Any, sizes: tuple[int | None, ...]) -> None:
    shape = value.shape
    assert shape == sizes
    assert isinstance(shape, tuple)
    assert shape.as_list() == value.get_shape().as_list() == list(sizes)
    assert shape[1:].as_list() == list(sizes[1:])
    assert shape.rank == shape.ndims == len(sizes)
    assert [d.value for d in shape.dims] == list(sizes)
    assert [tf.compat.dimension_value(d) for d in shape] == list(sizes)
    assert shape.is_fully_defined() == (None not in sizes)
    assert shape.num_elements() == (None if None in sizes else int(np.prod(sizes)))


def test_arrays_tracers_symbolic_tensors_and_variables_have_shapes_of_tensorflow():
    check(jnp.ones((2, 3)), (2, 3))
    check(keras.Input((3,)), (None, 3))
    check(keras.Variable(X), (2, 3))
    jax.eval_shape(lambda x: check(x, (2, 3)), X)
    assert type(keras.ops.shape(jnp.ones(2))) is tuple, "libraries see tuples"


def test_shapes_work_where_scripts_use_them():
    @jax.jit
    def flat(x):
        sizes = x.shape.as_list()
        return tf.reshape(x, [sizes[0] * sizes[1]]) + tf.reshape(x, [-1]) + jnp.zeros(x.shape).reshape(-1)

    np.testing.assert_array_equal(flat(X), np.full(6, 2.0))
    assert flat(X).numpy().sum() == 12


def test_layers_are_built_and_asked_with_such_shapes():
    class Pairs(keras.layers.Layer):
        def build(self, shape):
            self.sizes = [part.as_list() for part in shape]

        def compute_output_shape(self, shape):
            return shape[0].as_list()

        def call(self, inputs):
            return inputs[0] + inputs[1]

    layer = Pairs()
    layer([X, X])
    assert layer.sizes == [[2, 3], [2, 3]]
    assert tuple(layer.compute_output_shape([(2, 3), (2, 3)])) == (2, 3)


def test_the_length_of_an_embeddings_input_is_the_shape_of_a_model():
    model = tf.keras.Sequential([tf.keras.layers.Embedding(10, 4, input_length=6), tf.keras.layers.Flatten()])
    assert model.built
    assert model.output_shape == (None, 24)
    assert model.get_config() == tf.keras.Sequential.from_config(model.get_config()).get_config()
