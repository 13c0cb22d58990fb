"""Operations over replicas, against numpy: inside programs on four replicas, and with one."""

import openipu as ipu
from openipu.engine.devices.replicas import Replicas
from openipu.engine.devices.systems import system
from openipu.ops import all_to_all_op, cross_replica_ops, reduce_scatter_op, replication_ops, within_replica_ops

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest

R = 4
ROWS = np.random.default_rng(0).normal(size=(R, R, 6)).astype("float32")
"""A matrix for each replica."""
VECTORS = np.random.default_rng(1).normal(size=(R, 6)).astype("float32")
"""A vector for each replica; 6 values do not split evenly over 4 of them."""


@pytest.fixture(scope="module", autouse=True)
def replicas():
    config = ipu.config.IPUConfig()
    config.auto_select_ipus = R
    config.configure_ipu_system()
    return Replicas(tuple(system(0).devices))


@pytest.fixture
def on_all(replicas):
    """Run a function on all replicas as the engine does, each with its row of the values; results are stacked."""

    def run(function, values):
        def one(values):
            return jax.tree.map(lambda a: a[None], function(jax.tree.map(lambda a: a[0], values)))

        return jax.tree.map(np.asarray, jax.jit(replicas.program(one, (0,), 0))(values))

    return run


def repeated(value, times=R):
    return np.broadcast_to(value, (times, *np.shape(value)))


def scattered(vector):
    """A vector padded and cut for R replicas."""
    part = -(-len(vector) // R)
    return np.pad(vector, (0, part * R - len(vector))).reshape(R, part)


def by_pairs(values, reduce):
    return np.repeat(reduce(values.reshape(2, 2, *values.shape[1:]), 1), 2, axis=0)


COLLECTIVES = {
    "sum": (cross_replica_ops.cross_replica_sum, lambda x: repeated(x.sum(0))),
    "mean": (cross_replica_ops.cross_replica_mean, lambda x: repeated(x.mean(0))),
    "sum of pairs": (lambda x: cross_replica_ops.cross_replica_sum(x, 2), lambda x: by_pairs(x, np.sum)),
    "mean of pairs": (lambda x: cross_replica_ops.cross_replica_mean(x, 2), lambda x: by_pairs(x, np.mean)),
    "sum of one": (lambda x: cross_replica_ops.cross_replica_sum(x, 1), lambda x: x),
    "equal": (cross_replica_ops.assume_equal_across_replicas, lambda x: x),
    "gather": (lambda x: all_to_all_op.all_gather(x, R), repeated),
    "exchange 0 1": (
        lambda x: all_to_all_op.all_to_all(x, 0, 1, R),
        lambda x: np.stack([np.concatenate([x[s, i : i + 1] for s in range(R)], 1) for i in range(R)]),
    ),
    "exchange 0 0": (lambda x: all_to_all_op.all_to_all(x, 0, -2, R), lambda x: x.transpose(1, 0, 2)),
}


@pytest.mark.parametrize("name", COLLECTIVES)
def test_collectives(on_all, name):
    function, expected = COLLECTIVES[name]
    np.testing.assert_allclose(on_all(function, ROWS), expected(ROWS), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", COLLECTIVES)
def test_the_gradient_is_that_of_the_sum_of_all_losses(on_all, name):
    function, expected = COLLECTIVES[name]
    weights = np.random.default_rng(2).normal(size=expected(ROWS).shape).astype("float32")
    got = on_all(lambda pair: jax.grad(lambda x: (function(x) * pair[1]).sum())(pair[0]), (ROWS, weights))
    # Every collective here is linear, so its derivative in one direction is its value there.
    direction = np.random.default_rng(3).normal(size=ROWS.shape)
    np.testing.assert_allclose((got * direction).sum(), (expected(direction) * weights).sum(), rtol=1e-4)


OPERATORS = {
    "ADD": lambda x: x.sum(0),
    "MUL": lambda x: x.prod(0),
    "MIN": lambda x: x.min(0),
    "MAX": lambda x: x.max(0),
    "SQUARE_ADD": lambda x: (x * x).sum(0),
    "MEAN": lambda x: x.mean(0),
}


@pytest.mark.parametrize("name", OPERATORS)
def test_reduce_scatter(on_all, name):
    def part(x):
        return reduce_scatter_op.reduce_scatter(x, R, f"COLLECTIVE_OP_{name}")

    np.testing.assert_allclose(on_all(part, VECTORS), scattered(OPERATORS[name](VECTORS)), rtol=1e-5)
    got = on_all(jax.grad(lambda x: (part(x) * jnp.arange(1.0, 3.0)).sum()), VECTORS)
    whole = jax.grad(lambda x: (jnp.pad(OPERATORS[name](x), (0, 2)) * jnp.tile(jnp.arange(1.0, 3.0), R)).sum())
    np.testing.assert_allclose(got, whole(jnp.asarray(VECTORS)), rtol=1e-4, atol=1e-6)


def test_reduce_scatter_of_own_values_and_of_booleans(on_all):
    local = on_all(lambda x: reduce_scatter_op.reduce_scatter(x, R, "COLLECTIVE_OP_LOCAL"), VECTORS)
    np.testing.assert_array_equal(local, np.stack([scattered(VECTORS[r])[r] for r in range(R)]))
    truth = VECTORS > -0.3
    for name, expected in (("AND", truth.all(0)), ("OR", truth.any(0))):
        got = on_all(lambda x, n=name: reduce_scatter_op.reduce_scatter(x, R, f"COLLECTIVE_OP_LOGICAL_{n}"), truth)
        np.testing.assert_array_equal(got, scattered(expected))


def test_integers_and_trees(on_all):
    numbers = np.arange(8, dtype="int32").reshape(R, 2)
    total = on_all(cross_replica_ops.cross_replica_sum, {"a": numbers, "b": (VECTORS,)})
    np.testing.assert_array_equal(total["a"], repeated(numbers.sum(0)))
    np.testing.assert_allclose(total["b"][0], repeated(VECTORS.sum(0)), rtol=1e-5)
    mean = on_all(cross_replica_ops.cross_replica_mean, numbers + 1)
    assert cross_replica_ops.cross_replica_mean(numbers[0]).dtype == "float32", "on one replica, too"
    np.testing.assert_allclose(mean, repeated(numbers.mean(0) + 1))


def test_lists_give_lists_and_a_list_of_one_an_array(on_all):
    both = on_all(lambda x: all_to_all_op.all_gather([x, 2 * x], R), VECTORS)
    assert isinstance(both, list)
    np.testing.assert_allclose(both[1], 2 * both[0])
    assert on_all(lambda x: all_to_all_op.all_gather([x], R), VECTORS).shape == (R, R, 6)
    assert on_all(lambda x: reduce_scatter_op.reduce_scatter((x,), R), VECTORS).shape == (R, 2)
    assert len(on_all(lambda x: reduce_scatter_op.reduce_scatter((x, x), R), VECTORS)) == 2


def test_replication_index(on_all):
    index = on_all(lambda x: replication_ops.replication_index() + 0 * x, np.zeros(R, "int32"))
    np.testing.assert_array_equal(index, range(R))
    assert replication_ops.replication_index().dtype == "int32"


@pytest.mark.parametrize("compiled", [False, True])
def test_one_replica_has_no_axis(compiled):
    def run(function, x):
        return np.asarray((jax.jit(function) if compiled else function)(x))

    for name in ("sum", "mean", "sum of one", "equal"):
        np.testing.assert_array_equal(run(COLLECTIVES[name][0], ROWS[0]), ROWS[0])
    np.testing.assert_array_equal(run(lambda x: all_to_all_op.all_to_all(x, 0, 1, 1), ROWS[0]), ROWS[0])
    np.testing.assert_array_equal(run(lambda x: all_to_all_op.all_gather(x, 1), ROWS[0]), ROWS[:1])
    for name in (*OPERATORS, "LOCAL"):
        got = run(lambda x, n=name: reduce_scatter_op.reduce_scatter(x, 1, f"COLLECTIVE_OP_{n}"), VECTORS[0])
        np.testing.assert_allclose(got, VECTORS[0] ** 2 if name == "SQUARE_ADD" else VECTORS[0])
    assert run(lambda x: replication_ops.replication_index() + 0 * x, 0) == 0


@pytest.mark.parametrize("value", [keras.Variable([1.0, 2.0]), np.array([1.0, 2.0]), [1.0, 2.0]])
def test_variables_and_host_values_are_taken(value):
    np.testing.assert_array_equal(np.asarray(cross_replica_ops.cross_replica_sum(value)), [1.0, 2.0])


@pytest.mark.parametrize("size", [3, 8])
def test_a_group_size_that_does_not_divide(on_all, size):
    with pytest.raises(ValueError, match=f"`replica_group_size` is {size}, but the number of replicas here is 4"):
        on_all(lambda x: cross_replica_ops.cross_replica_sum(x, size), VECTORS)


@pytest.mark.parametrize("size", [0, -2, 1.5, True])
def test_a_group_size_that_is_no_count(size):
    with pytest.raises(ValueError, match="`replica_group_size` is"):
        cross_replica_ops.cross_replica_mean(VECTORS[0], size)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: all_to_all_op.all_gather(x, 3),
        lambda x: all_to_all_op.all_to_all(x, 0, 0, 3),
        lambda x: reduce_scatter_op.reduce_scatter(x, 3),
    ],
)
def test_a_replication_factor_that_is_not_the_number_of_replicas(on_all, function):
    with pytest.raises(ValueError, match="`replication_factor` is 3, but the number of replicas here is 4"):
        on_all(function, VECTORS)
    with pytest.raises(ValueError, match="`replication_factor` is 3, but the number of replicas here is 1"):
        function(VECTORS[0])


def test_bad_shapes_and_operators(on_all):
    with pytest.raises(ValueError, match=r"Dimension 1 of a tensor of shape \(4, 6\) cannot be split over 4"):
        on_all(lambda x: all_to_all_op.all_to_all(x, 1, 0, R), ROWS)
    with pytest.raises(ValueError, match="`split_dimension` is 2, but the tensor has 2 dimensions"):
        all_to_all_op.all_to_all(ROWS[0], 2, 0, 1)
    with pytest.raises(ValueError, match="`concat_dimension` is 'x'"):
        all_to_all_op.all_to_all(ROWS[0], 0, "x", 1)
    with pytest.raises(ValueError, match=r"takes vectors, but a tensor has shape \(4, 6\)"):
        reduce_scatter_op.reduce_scatter(ROWS[0], 1)
    with pytest.raises(ValueError, match=r"`op` is 'ADD'\. Give one of 'COLLECTIVE_OP_ADD', "):
        reduce_scatter_op.reduce_scatter(VECTORS[0], 1, "ADD")
    with pytest.raises(ValueError, match="takes booleans, but the values are float32"):
        reduce_scatter_op.reduce_scatter(VECTORS[0], 1, "COLLECTIVE_OP_LOGICAL_OR")
    with pytest.raises(ValueError, match="takes numbers, but the values are bool"):
        reduce_scatter_op.reduce_scatter(VECTORS[0] > 0, 1)
    with pytest.raises(ValueError, match="symbolic tensor"):
        cross_replica_ops.cross_replica_sum(keras.Input((2,)))


class Exchange(keras.layers.Layer):
    """Every operation whose result has another shape than its argument, or a group."""

    def call(self, x):
        mean = cross_replica_ops.cross_replica_mean(x, 2)
        gathered = all_to_all_op.all_gather(x, R)
        part = reduce_scatter_op.reduce_scatter(keras.ops.sum(x, 0), R)
        exchanged = all_to_all_op.all_to_all(x, 1, 0, R)
        return mean + keras.ops.max(gathered, 0) + keras.ops.sum(part), gathered, part, exchanged


def test_keras_infers_shapes_before_there_are_replicas():
    _, gathered, part, exchanged = Exchange()(keras.Input((8,)))
    assert gathered.shape == (R, None, 8)
    assert part.shape == (2,)
    assert exchanged.shape == (None, 2)
    assert Exchange()(keras.Input(batch_shape=(3, 8)))[3].shape == (12, 2)
    with pytest.raises(ValueError, match="the number of replicas here is 1"):
        Exchange()(np.ones((3, 8), "float32"))


def test_a_layer_trains_on_four_replicas():
    class Center(keras.layers.Layer):
        def call(self, x):
            return x - cross_replica_ops.cross_replica_mean(keras.ops.mean(x, 0))

    x = np.random.default_rng(4).normal(size=(16, 3)).astype("float32")
    with ipu.ipu_strategy.IPUStrategy().scope():
        model = keras.Sequential([keras.Input((3,)), Center(), keras.layers.Dense(1, kernel_initializer="ones")])
        model.compile("sgd", "mse", steps_per_execution=1)
    got = model.predict(x, batch_size=4, verbose=0)
    np.testing.assert_allclose(got, (x - x.mean(0)).sum(1, keepdims=True), atol=1e-5)
    model.fit(x, got + 1, batch_size=4, shuffle=False, verbose=0)
    # The gradient of the bias is -2 on each replica, and they are added up.
    np.testing.assert_allclose(model.layers[-1].bias, [0.01 * 2 * R], rtol=1e-4)


# --- within a replica ------------------------------------------------------------------------------------------------


def test_shards_are_reduced_and_gathered():
    shards = [np.array([1.0, 2.0, 3.0], "float32"), np.array([4.0, 5.0], "float32"), np.array([6.0], "float32")]
    padded = np.array([[1, 2, 3], [4, 5, 0], [6, 0, 0]], "float32")
    for name, reduce in OPERATORS.items():
        for got in within_replica_ops.all_reduce(shards, f"COLLECTIVE_OP_{name}"):
            np.testing.assert_allclose(got, reduce(padded), rtol=1e-6)
    for i, got in enumerate(within_replica_ops.all_reduce(shards, "COLLECTIVE_OP_LOCAL")):
        np.testing.assert_array_equal(got, padded[i])
    gathered = within_replica_ops.all_gather(shards)
    assert len(gathered) == 3
    np.testing.assert_array_equal(gathered[2], [1, 2, 3, 4, 5, 6])


def test_reduced_shards_are_scattered_in_order():
    four = [np.arange(3, dtype="float32") + i for i in range(4)]
    parts = within_replica_ops.reduce_scatter(four, "COLLECTIVE_OP_ADD")
    np.testing.assert_array_equal(np.stack(parts), [[6], [10], [14], [0]])
    local = within_replica_ops.reduce_scatter(four, "COLLECTIVE_OP_LOCAL")
    np.testing.assert_array_equal(np.stack(local), [[0], [2], [4], [0]])
    scalars = [jnp.float32(2), jnp.float32(3)]
    np.testing.assert_array_equal(np.stack(within_replica_ops.reduce_scatter(scalars, "COLLECTIVE_OP_MUL")), [[6], [0]])
    assert within_replica_ops.all_reduce(scalars, "COLLECTIVE_OP_MUL")[1] == 6


def test_bad_shards():
    vector = np.ones(2, "float32")
    with pytest.raises(ValueError, match="given for several of the 2 shards"):
        within_replica_ops.all_gather([vector, vector])
    with pytest.raises(ValueError, match=r"different dtypes: \['float32', 'int32'\]"):
        within_replica_ops.all_gather([vector, np.ones(2, "int32")])
    with pytest.raises(ValueError, match=r"different ranks: \[1, 2\]"):
        within_replica_ops.all_reduce([vector, np.ones((2, 2), "float32")], "COLLECTIVE_OP_ADD")
    with pytest.raises(ValueError, match="these have 2 dimensions"):
        within_replica_ops.reduce_scatter([np.ones((2, 2))], "COLLECTIVE_OP_ADD")
    with pytest.raises(ValueError, match="Give a list with one tensor per shard"):
        within_replica_ops.all_gather([])
    with pytest.raises(ValueError, match="`axis` is 1, but the tensor has 1 dimensions"):
        within_replica_ops.all_gather([vector], axis=1)
