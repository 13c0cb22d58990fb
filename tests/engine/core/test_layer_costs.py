"""The costs of layers, against counts made by hand. `b` is the number of samples; all numbers are float32."""

from __future__ import annotations

from collections.abc import Sequence

import openipu  # noqa: F401  (chooses Keras' backend)
from openipu.engine.core.layer_costs import counted, joined, scaled, without
from openipu.engine.core.operation_count import operations
from openipu.engine.facts.costs import Cost, Counted

import jax
import jax.numpy as jnp
import keras
import pytest
from jax import lax

B = 8


def traced(
    layer: keras.Layer, shape: Sequence[int], *, inputs: int = 1, gradients: bool = False, training: bool = False
) -> tuple[Counted, float]:
    """The costs of a layer, or of a layer and the gradients of the sum of its outputs, and its operations.

    The layer reads its only input as often as `inputs` says.
    """
    x = keras.Input(batch_shape=shape)
    model = keras.Model(x, layer(*[x] * inputs))
    weights = [v.value for v in model.trainable_variables]
    others = [v.value for v in model.non_trainable_variables]

    def call(weights: list[jax.Array], x: jax.Array) -> tuple[jax.Array, list[jax.Array]]:
        return model.stateless_call(weights, others, x, training=training)

    def loss(weights: list[jax.Array], x: jax.Array) -> jax.Array:
        return jnp.sum(call(weights, x)[0])

    program = jax.make_jaxpr(jax.grad(loss, (0, 1)) if gradients else call)(weights, jnp.zeros(shape))
    names = [f"weight{i}" for i in range(len(weights))]
    return counted(program, names), operations(program)


def cost(found: Counted, layer: str, part: str = "forward") -> Cost:
    [one] = [cost for cost in found.costs if (cost.layer, cost.part) == (layer, part)]
    return one


def test_a_dense_layer():
    found, _ = traced(keras.layers.Dense(5, name="d"), (B, 3))
    assert found.costs == (Cost("d", "forward", 2 * B * 3 * 5 + B * 5, 4 * (B * 3 + 3 * 5 + 5 + B * 5)),)
    assert found.owners == {"weight0": "d", "weight1": "d"}
    assert (found.dtype, found.top[0].name, found.top[0].shapes) == (
        "float32", "dot_general", f"float32[{B},3] x float32[3,5]"
    )  # fmt: skip


def test_the_gradients_of_a_dense_layer():
    found, _ = traced(keras.layers.Dense(5, name="d"), (B, 3), gradients=True)
    # Gradients of the weights, of the inputs, and of the bias: a sum over the batch, and over an axis of length one.
    assert cost(found, "d", "backward").operations == 2 * (2 * B * 3 * 5) + B * 5 + 5
    # It reads inputs and weights, and writes three gradients. That of the output is a constant here.
    assert cost(found, "d", "backward").bytes == 4 * (B * 3 + 3 * 5 + 3 * 5 + 5 + B * 3)


def test_a_convolution():
    found, _ = traced(keras.layers.Conv2D(4, 3, name="c"), (B, 10, 10, 2))
    out = B * 8 * 8 * 4
    assert found.costs == (
        Cost("c", "forward", 2 * out * 3 * 3 * 2 + out, 4 * (B * 10 * 10 * 2 + 3 * 3 * 2 * 4 + 4 + out)),
    )


def test_the_matrix_products_of_a_recurrent_layer_count_once_per_step():
    steps, features, units = 7, 3, 5
    found, _ = traced(keras.layers.LSTM(units, name="l", use_bias=False), (B, steps, features))
    products = sum(top.operations for top in found.top if top.name == "dot_general")
    assert products == steps * 2 * B * (features + units) * 4 * units
    assert sum(top.times for top in found.top if top.name == "dot_general") in (2 * steps, steps + 1)


def test_the_matrix_products_of_attention():
    time, width, heads, size = 6, 16, 2, 4
    layer = keras.layers.MultiHeadAttention(heads, size, name="a", use_bias=False, flash_attention=False)
    found, _ = traced(layer, (B, time, width), inputs=2)
    projections = 4 * 2 * B * time * width * heads * size
    scores = 2 * (2 * B * heads * time * time * size)
    assert sum(top.operations for top in found.top if top.name == "dot_general") == projections + scores
    assert cost(found, "a/query").operations == projections / 4


def test_batch_normalization():
    found, _ = traced(keras.layers.BatchNormalization(name="n"), (B, 6))
    # y = x * scale + offset for each element, and a few operations for each of the 6 features.
    per_feature = cost(found, "n").operations - 2 * B * 6
    assert per_feature % 6 == 0
    assert 0 < per_feature <= 6 * 8
    # It reads inputs, scale, offset, mean and variance, and writes outputs.
    assert cost(found, "n").bytes == 4 * (B * 6 + 4 * 6 + B * 6)
    training, _ = traced(keras.layers.BatchNormalization(name="n"), (B, 6), training=True)
    assert cost(training, "n").operations > cost(found, "n").operations + 2 * B * 6, "mean and variance of the batch"


@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (keras.layers.Dense(5, activation="gelu"), (B, 3)),
        (keras.layers.LSTM(4), (B, 5, 3)),
        (keras.layers.Bidirectional(keras.layers.GRU(3)), (B, 5, 3)),
        (keras.layers.Conv2D(4, 3, activation="relu"), (B, 8, 8, 2)),
        (keras.layers.LayerNormalization(), (B, 6)),
        (keras.layers.MaxPooling2D(), (B, 8, 8, 2)),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_layers_add_up_to_the_whole(layer, shape, gradients):
    found, whole = traced(layer, shape, gradients=gradients)
    assert sum(cost.operations for cost in found.costs) == found.operations == whole > 0


def test_a_branch_counts_if_it_is_the_most_expensive_and_a_loop_as_often_as_it_runs():
    def program(x: jax.Array) -> jax.Array:
        x = lax.cond(x[0, 0] > 0, lambda a: a @ a, lambda a: a + 1, x)
        return lax.scan(lambda carry, _: (carry @ carry, None), x, length=10)[0]

    assert operations(jax.make_jaxpr(program)(jnp.zeros((4, 4)))) == 11 * 2 * 4**3 + 1


def test_what_no_result_needs_does_not_count():
    def program(x: jax.Array) -> jax.Array:
        x @ x
        return x + 1

    assert operations(jax.make_jaxpr(program)(jnp.zeros((4, 4)))) == 16


def test_a_layer_that_reads_a_part_of_an_array_does_not_read_all_of_it():
    found, _ = traced(keras.layers.Embedding(1000, 4, name="e"), (B,))
    assert cost(found, "e").bytes < 4 * 1000


def test_costs_are_added_scaled_and_taken_away():
    a = Counted(3.0, (Cost("x", "forward", 1.0, 8.0), Cost("y", "backward", 2.0, 4.0)), (), "float32", {})
    b = Counted(1.0, (Cost("x", "forward", 1.0, 8.0),), (), "", {})
    whole = joined(a, b)
    assert (whole.operations, whole.costs[0]) == (4.0, Cost("x", "forward", 2.0, 16.0))
    assert without(whole, b).costs == a.costs
    assert without(whole, b).operations == 3.0
    assert scaled(a, 0.5).costs[1] == Cost("y", "backward", 1.0, 2.0)
