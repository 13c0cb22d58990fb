"""Functions as device programs: what they compute, what they change, how often they are compiled, what they refuse."""

from __future__ import annotations

import contextlib
import logging
from typing import Any

import openipu as ipu

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest

from device_programs import DEVICE, compiled
from replication import configure_all, strategy
from zoo import KERAS_WARNINGS

pytestmark = KERAS_WARNINGS


@pytest.fixture(autouse=True, scope="module")
def systems():
    configure_all()


@pytest.fixture
def one() -> Any:
    return strategy(1)


def batches(count: int, rows: int = 4) -> tuple[np.ndarray, np.ndarray]:
    x = np.random.default_rng(0).normal(size=(count, rows, 3)).astype("float32")
    return x, x.sum(-1, keepdims=True) ** 2


def small_model(dropout: float = 0.0, *, normalized: bool = False) -> Any:
    keras.utils.set_random_seed(3)
    layers = [keras.Input((3,)), keras.layers.Dense(5, activation="tanh"), keras.layers.Dropout(dropout)]
    layers += [keras.layers.BatchNormalization()] if normalized else []
    return keras.Sequential([*layers, keras.layers.Dense(1)])


def mse(model: Any, x: Any, y: Any) -> Any:
    return keras.ops.mean(keras.ops.square(model(x, training=True) - y))


# --- values ----------------------------------------------------------------------------------------------------------


def test_run_gives_what_the_function_gives_and_compiles_once(one):
    def add(a, b=1.0, *, more):
        return {"sum": a + b, "more": [more, (a,)]}

    for value in range(3):
        result = one.run(add, (np.float32(value),), {"b": 2.5, "more": np.ones(2, "int32")})
        assert float(result["sum"]) == value + 2.5
        np.testing.assert_array_equal(result["more"][0], [1, 1])
        assert float(result["more"][1][0]) == value
    assert compiled(add) == 1
    one.run(add, (np.ones(3, "float32"),), {"more": np.ones(2, "int32")})
    assert compiled(add) == 2, "another shape is another program"


def test_whole_numbers_and_objects_are_part_of_the_program(one):
    def power(x, exponent, how):
        return how(x) ** exponent if isinstance(exponent, int) else None

    assert float(one.run(power, (2.0, 3, jnp.negative))) == -8
    assert float(one.run(power, (3.0, 3, jnp.negative))) == -27
    assert compiled(power) == 1
    assert float(one.run(power, (3.0, 2, jnp.negative))) == 9
    assert compiled(power) == 2


@pytest.mark.parametrize("replicas", [1, 2, 4])
def test_replicas_run_one_program_and_the_first_one_answers(replicas):
    def program(x):
        index = ipu.replication_ops.replication_index()
        return index, ipu.cross_replica_ops.cross_replica_sum(x * (1.0 + index))

    index, total = strategy(replicas).run(program, (np.float32(2),))
    assert int(index) == 0
    assert float(total) == 2 * sum(range(1, replicas + 1))


def test_run_inside_run_is_part_of_the_same_program(one):
    def inner(x):
        return 2 * x

    assert float(one.run(lambda x: one.run(inner, (x,)) + 1, (3.0,))) == 7
    assert compiled(inner) == 0


@pytest.mark.parametrize("replicas", [1, 2])
def test_results_and_arrays_on_other_devices_are_arguments(replicas):
    def add(x, y=0.0):
        return x + y + 1

    x = strategy(replicas).run(add, (np.zeros(3, "float32"),))
    x = strategy(replicas).run(add, (x,))
    elsewhere = jax.device_put(np.ones(3, "float32"), jax.devices()[-1])
    x = strategy(replicas).run(add, (elsewhere, x))
    np.testing.assert_array_equal(strategy(replicas).run(add, (x, elsewhere)), [6, 6, 6])


def test_a_python_number_takes_the_dtype_of_what_it_meets_and_others_do_not(one):
    def times(x):
        return x * jnp.ones(1, "bfloat16")

    for value in (1.0, np.float32(1.001), 1.0, np.float32(1.001)):
        found = one.run(times, (value,))
        np.testing.assert_array_equal(found, times(value))
        assert found.dtype == times(value).dtype
    assert compiled(times) == 2


def test_whole_numbers_that_devices_do_not_have_are_refused(one):
    assert int(one.run(lambda x: x[0], (np.array([2**31 - 1, -(2**31)]),))) == 2**31 - 1
    for number in (2**31, -(2**40)):
        with pytest.raises(TypeError, match=f"has the number {number}, but devices compute with whole numbers of 32"):
            one.run(lambda x: x, (np.array([5, number]),))


def test_a_variable_is_a_result(one):
    weight = keras.Variable(3.0)
    assert float(one.run(lambda: weight)) == 3
    weight.assign(4.0)
    assert float(one.run(lambda: {"weight": weight})["weight"]) == 4


# --- variables -------------------------------------------------------------------------------------------------------


def test_variables_are_read_and_assigned_without_a_new_program(one):
    counter, factor = keras.Variable(0.0), keras.Variable(2.0)

    def count(x):
        counter.assign(counter + factor * x)
        return counter.value

    assert float(one.run(count, (1.0,))) == 2
    assert float(one.run(count, (2.0,))) == float(counter.value) == 6
    factor.assign(10.0)
    assert float(one.run(count, (1.0,))) == 16
    assert compiled(count) == 1


@pytest.mark.parametrize("devices", [1, 2])
def test_variables_that_share_an_array(devices):
    """A program uses up the arrays of the variables that it assigns."""
    with strategy(devices).scope():
        first, second, third = keras.Variable([1.0, 2.0]), keras.Variable([0.0, 0.0]), keras.Variable([0.0, 0.0])
    second.assign(first)
    third.assign(first)

    def step():
        first.assign(first + 1.0)
        second.assign(second * third)

    for _ in range(2):
        strategy(devices).run(step)
    assert [v.numpy().tolist() for v in (first, second, third)] == [[3, 4], [1, 8], [1, 2]]


def test_an_error_while_tracing_leaves_variables_alone(one):
    counter = keras.Variable(1.0)

    def fails():
        counter.assign(5.0)
        raise ArithmeticError("mine")

    with pytest.raises(ArithmeticError, match="mine"):
        one.run(fails)
    assert float(counter.value) == 1


@pytest.mark.parametrize("replicas", [1, 2])
def test_training_equals_fit(replicas):
    x, y = batches(12 * replicas)
    with strategy(replicas).scope():
        model, optimizer = small_model(0.3, normalized=False), keras.optimizers.Adam(0.01)
        optimizer = ipu.optimizers.CrossReplicaOptimizer(optimizer)
        infeed = ipu.ipu_infeed_queue.IPUInfeedQueue(lambda: zip(x, y, strict=True))
    metric = keras.metrics.Mean()

    def step(x, y):
        loss = ipu.training.minimize(optimizer, lambda: mse(model, x, y), model.trainable_variables)
        metric.update_state(loss)

    def train(steps):
        ipu.loops.repeat(steps, step, [], infeed)

    for _ in range(2):
        strategy(replicas).run(train, (6,))
    assert compiled(train, replicas) == 1

    plain = small_model(0.3)
    plain.compile(keras.optimizers.Adam(0.01), "mse")
    history = plain.fit(x.reshape(-1, 3), y.reshape(-1, 1), batch_size=4 * replicas, shuffle=False, verbose=0)
    for a, b in zip(model.get_weights(), plain.get_weights(), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(metric.result(), history.history["loss"][0], rtol=1e-5)
    assert int(optimizer.iterations.value) == 12


def test_layers_that_are_frozen_between_two_runs(one):
    x, y = (part[0] for part in batches(1))
    with one.scope():
        model, optimizer = small_model(), keras.optimizers.SGD(0.1)
    optimizer.build(model.trainable_variables)

    def step():
        ipu.training.minimize(optimizer, lambda: mse(model, x, y), model.trainable_variables)

    def changed():
        before = model.get_weights()
        one.run(step)
        return [not np.array_equal(a, b) for a, b in zip(before, model.get_weights(), strict=True)]

    assert changed() == [True] * 4
    model.layers[0].trainable = False
    assert changed() == [False, False, True, True]
    model.layers[0].trainable = True
    assert changed() == [True] * 4
    assert compiled(step) == 1, "a program that is out of date is not kept"


def test_counts_that_differ_between_replicas_are_mentioned(caplog):
    calls, rows = (keras.Variable(0, dtype="int32", trainable=False, name=name) for name in ("calls", "rows"))

    def count():
        calls.assign_add(1)
        rows.assign_add(1 + ipu.replication_ops.replication_index())

    with caplog.at_level(logging.WARNING, "openipu"):
        strategy(2).run(count)
    assert (int(calls), int(rows)) == (1, 1)
    assert "The state 'rows' consists of whole numbers and differs between replicas" in caplog.text
    assert "'calls'" not in caplog.text


def test_gradients_of_gradients(one):
    v, w = keras.Variable(2.0), keras.Variable(3.0)

    def slope():
        return ipu.training.gradients(lambda: v * w * w, [v])[0]

    def second():
        return ipu.training.gradients(slope, [w])[0]

    assert float(second()) == float(one.run(second)) == 6

    def with_w(x):
        with keras.StatelessScope([(w, x)]):
            return slope()

    assert (float(with_w(5.0)), float(jax.grad(with_w)(5.0))) == (25, 10)
    assert list(map(float, ipu.training.gradients(lambda: w * w, [w, w]))) == [6, 6]


class Slope(keras.layers.Layer):
    """The slope of the sum of x @ w when x is scaled."""

    def build(self, shape):
        self.w = self.add_weight((shape[-1], 1), "ones")
        self.scale = self.add_weight((), "ones", trainable=False)

    def call(self, x):
        def total():
            return keras.ops.sum(keras.ops.matmul(x * self.scale, self.w))

        return ipu.training.gradients(total, [self.scale])[0] + 0 * keras.ops.matmul(x, self.w)


@pytest.mark.parametrize("place", ["plain Keras", "a strategy"])
def test_gradients_in_a_layer(place):
    """The loss is (4 rows * 2 columns * w)^2 for equal weights w; its gradient in each weight is 64 w."""
    with strategy(1).scope() if place == "a strategy" else contextlib.nullcontext():
        model = keras.Sequential([keras.Input((2,)), Slope()])
        model.compile(keras.optimizers.SGD(0.001), "mse")
    model.fit(np.ones((4, 2), "float32"), np.zeros((4, 1), "float32"), batch_size=4, epochs=3, verbose=0)
    np.testing.assert_allclose(model.layers[0].w.numpy().ravel(), (1 - 0.064) ** 3, rtol=1e-5)


def test_moving_statistics_and_metrics_agree_over_replicas():
    x, y = batches(8)
    with strategy(2).scope():
        model = small_model(normalized=True)
        infeed = ipu.ipu_infeed_queue.IPUInfeedQueue(lambda: zip(x, y, strict=True))
    metric, begun = keras.metrics.Sum(), keras.metrics.Sum()
    begun.update_state(100.0)

    def step(x, y):
        model(x, training=True)
        metric.update_state(y)
        begun.update_state(1.0)

    strategy(2).run(lambda: ipu.loops.repeat(4, step, [], infeed))
    np.testing.assert_allclose(metric.result(), y.sum(), rtol=1e-5)
    assert float(begun.result()) == 100 + 8
    # Each replica saw every other batch; a moving mean is linear in what it sees.
    first = small_model(normalized=True)
    second = small_model(normalized=True)
    for i in range(0, 8, 2):
        first(x[i], training=True)
        second(x[i + 1], training=True)
    for mine, a, b in zip(
        model.layers[2].non_trainable_variables,
        first.layers[2].non_trainable_variables,
        second.layers[2].non_trainable_variables,
        strict=True,
    ):
        np.testing.assert_allclose(mine.value, (a.value + b.value) / 2, rtol=1e-5, atol=1e-6)


def test_infinite_weights_that_are_not_trained_stay_infinite():
    with strategy(2).scope():
        limit = keras.Variable([-np.inf, 1.0], trainable=False)

    def step(total):
        limit.assign(limit + 0.0)
        return total + limit[1]

    strategy(2).run(lambda: ipu.loops.repeat(2, step, [0.0]))
    assert limit.numpy().tolist() == [-np.inf, 1.0]


def test_gradients_are_summed_over_replicas_as_in_fit():
    def train(replicas):
        weight = keras.Variable(1.0)
        optimizer = keras.optimizers.SGD(0.1)

        def step():
            [slope] = ipu.training.gradients(lambda: 3.0 * weight, [weight])
            optimizer.apply_gradients([(slope, weight)])

        strategy(replicas).run(step)
        return float(weight.value)

    assert train(1) == pytest.approx(0.7)
    assert train(4) == pytest.approx(1 - 4 * 0.3)


def test_what_is_built_inside_the_function_is_built_once(one):
    model, optimizer = keras.Sequential([keras.layers.Dense(2)]), keras.optimizers.Adam()

    def step(x):
        return ipu.training.minimize(optimizer, lambda: keras.ops.sum(model(x)), lambda_variables(model, x))

    def lambda_variables(model, x):
        model(x)
        return model.trainable_variables

    first = one.run(step, (np.ones((2, 3), "float32"),))
    second = one.run(step, (np.ones((2, 3), "float32"),))
    assert float(second) < float(first)
    assert model.built
    assert compiled(step) == 1


def test_jax_gradients_over_stateless_calls_work_too(one):
    x, y = batches(1)
    model, optimizer = small_model(), keras.optimizers.SGD(0.1)
    optimizer.build(model.trainable_variables)

    def step(x, y):
        def loss(trainable):
            outputs, _ = model.stateless_call(trainable, [v.value for v in model.non_trainable_variables], x)
            return jnp.mean((outputs - y) ** 2)

        value, slopes = jax.value_and_grad(loss)([v.value for v in model.trainable_variables])
        optimizer.apply(slopes)
        return value

    values = [float(one.run(step, (x[0], y[0]))) for _ in range(3)]
    assert values[2] < values[1] < values[0]


def test_a_scaled_loss_is_applied_unscaled_and_overflow_is_skipped(one):
    weight = keras.Variable(1.0)
    optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.5), initial_scale=1024.0)

    def step(slope):
        return ipu.training.minimize(optimizer, lambda: weight * slope, [weight])

    assert float(one.run(step, (0.5,))) == 0.5
    assert float(weight.value) == pytest.approx(0.75)
    one.run(step, (float("inf"),))
    assert float(weight.value) == pytest.approx(0.75)
    assert float(optimizer.dynamic_scale.value) == 512


def test_training_helpers_work_outside_of_programs():
    weight, seen = keras.Variable(3.0), keras.Variable(0.0)

    def loss():
        seen.assign(seen + 1.0)
        return weight * weight

    (value, extra), [slope] = ipu.training.value_and_gradients(lambda: (loss(), {"x": 2}), [weight], has_aux=True)
    assert (float(value), int(extra["x"]), float(slope)) == (9, 2, 6)
    assert [float(g) for g in ipu.training.gradients(loss, [weight])] == [6]
    assert float(ipu.training.minimize(keras.optimizers.SGD(0.5), loss, [weight])) == 9
    assert float(weight.value) == 0
    assert float(seen.value) == 3


def test_convolutions_in_a_loop_with_feeds(one):
    x = np.random.default_rng(1).normal(size=(3, 2, 6, 6, 1)).astype("float32")
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [keras.Input((6, 6, 1)), keras.layers.Conv2D(4, 3), keras.layers.MaxPooling2D(), keras.layers.Flatten()]
    )
    plain = keras.models.clone_model(model)
    plain.set_weights(model.get_weights())
    optimizer = keras.optimizers.SGD(0.1)
    with one.scope():
        infeed, outfeed = ipu.ipu_infeed_queue.IPUInfeedQueue(x), ipu.ipu_outfeed_queue.IPUOutfeedQueue()

    def step(x):
        loss = ipu.training.minimize(
            optimizer, lambda: keras.ops.mean(keras.ops.square(model(x))), model.trainable_variables
        )
        outfeed.enqueue(loss)

    one.run(lambda: ipu.loops.repeat(3, step, [], infeed))
    plain.compile(keras.optimizers.SGD(0.1), "mse")
    expected = [plain.train_on_batch(batch, np.zeros((2, 16), "float32")) for batch in x]
    got = outfeed.dequeue()
    np.testing.assert_allclose(got[0], expected[0], rtol=1e-5)
    for a, b in zip(model.get_weights(), plain.get_weights(), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


# --- compile ---------------------------------------------------------------------------------------------------------


def test_compile_conventions():
    with ipu.scopes.ipu_scope(DEVICE):
        (single,) = ipu.ipu_compiler.compile(lambda x: x + 1, [2.0])
        assert float(single) == 3
        pair = ipu.ipu_compiler.compile(lambda x, y: [x, y], [1.0, 2.0])
        assert tuple(map(float, pair)) == (1, 2)
        assert jax.tree.leaves(ipu.ipu_compiler.compile(lambda: None)) == []
        outfeed = ipu.ipu_outfeed_queue.IPUOutfeedQueue()
        (value,) = ipu.ipu_compiler.compile(lambda x: (x, outfeed.enqueue(x)), [4.0])
        assert float(value) == 4
        np.testing.assert_array_equal(outfeed.dequeue(), [4])


def test_compile_compiles_once():
    traced = []

    def computation(x):
        traced.append(1)
        return x * 2

    with ipu.scopes.ipu_scope("/device:IPU:1"):
        for value in range(3):
            (result,) = ipu.ipu_compiler.compile(computation, [np.float32(value)])
            assert float(result) == 2 * value
    assert len(traced) == 2, "once to discover, once to build"


# --- errors ----------------------------------------------------------------------------------------------------------


class EstimatorSpec:
    """Stands for what a `model_fn` returns."""


def test_errors_of_run(one):
    with pytest.raises(TypeError, match=r"shape \(2,\) has dtype float64"):
        one.run(lambda x: x, (np.ones(2),))
    with pytest.raises(TypeError, match=r"`fn` is an int. Give a function"):
        one.run(3)
    for given in (jnp.ones(2), np.ones(2, np.float32), None, 1.0):
        with pytest.raises(TypeError, match=r"`args` is .* Give a list or tuple, even for a single one"):
            one.run(lambda *_: 0, given)
    with pytest.raises(TypeError, match=r"`kwargs` is a list. Give a dict with strings as keys"):
        one.run(lambda: 0, kwargs=[1])
    with pytest.raises(RuntimeError, match="old name of `run`"):
        one.experimental_run_v2(lambda: 0)
    with pytest.raises(ValueError, match="`options`"):
        one.run(lambda: 0, options={})


def test_errors_of_compile():
    with pytest.raises(Exception, match="compiled outside of all scopes") as caught:
        ipu.ipu_compiler.compile(lambda: 0)
    assert type(caught.value) is Exception
    with pytest.raises(Exception, match="compiled outside of all scopes"):
        ipu.loops.repeat(1, lambda: None)
    with ipu.scopes.ipu_scope(DEVICE):
        with pytest.raises(ValueError, match="EstimatorSpec"):
            ipu.ipu_compiler.compile(EstimatorSpec)
        with pytest.raises(ValueError, match="operation before a value"):
            ipu.ipu_compiler.compile(lambda: [None, jnp.ones(())])


def test_variables_made_in_the_function_are_refused(one):
    def step(x):
        return keras.layers.Dense(2)(x)

    with pytest.raises(ValueError, match="creates again each time it is traced"):
        one.run(step, (np.ones((1, 2), "float32"),))


def test_a_model_without_variables_is_refused(one):
    with one.scope():
        model, optimizer = keras.Sequential([keras.layers.Dense(3)]), keras.optimizers.SGD()

    def loss(x):
        return keras.ops.mean(model(x))

    def minimize(x):
        return ipu.training.minimize(optimizer, lambda: loss(x), model.trainable_variables)

    def apply(x):
        gradients = ipu.training.gradients(lambda: loss(x), model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

    def nothing():
        optimizer.apply([], model.trainable_variables)

    x = np.ones((2, 4), "float32")
    for function, args in ((minimize, (x,)), (apply, (x,)), (nothing, ())):
        with pytest.raises(ValueError, match="has not been built has no `trainable_variables`"):
            one.run(function, args)
    model.build((None, 4))
    before = model.get_weights()[0]
    one.run(minimize, (x,))
    assert (model.get_weights()[0] != before).any(), "it can be built and trained afterwards"


def test_accumulating_optimizers_are_refused(one):
    weight = keras.Variable(1.0)
    optimizer = ipu.optimizers.GradientAccumulationOptimizerV2(keras.optimizers.SGD(), 4)
    with pytest.raises(RuntimeError, match="accumulates 4 micro-batches"):
        one.run(lambda: ipu.training.minimize(optimizer, lambda: weight * 1.0, [weight]))


def test_scopes(caplog):
    with pytest.raises(ValueError, match="is not a device name"), ipu.scopes.ipu_scope("/cpu:0"):
        pass
    with pytest.raises(ValueError, match="cannot be of type float64"), ipu.scopes.partials_type(np.float64):
        pass
    with pytest.raises(ValueError, match="outside of a program"), ipu.scopes.outside_compilation_scope():
        pass
    with ipu.scopes.ipu_scope(DEVICE), pytest.raises(ValueError, match="inside a program"):
        ipu.ipu_compiler.compile(lambda: ipu.scopes.outside_compilation_scope().__enter__())
    hints = (
        ipu.scopes.ipu_shard(1), ipu.scopes.ipu_jit_scope(0), ipu.scopes.frontend_attribute("a", "b"),
        ipu.scopes.stochastic_rounding(True), ipu.scopes.partials_type(np.float16),
    )  # fmt: skip
    for hint, name in zip(hints, ("ipu_shard", "ipu_jit", "frontend", "stochastic", "partials"), strict=True):
        caplog.clear()
        with hint:
            assert name in caplog.text
