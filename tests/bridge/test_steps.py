"""Steps of a script's own: one compiled program, with the numbers of `jax.value_and_grad`."""

from __future__ import annotations

from typing import Any

import openipu as ipu

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest

from replication import configure_all, strategy

tf: Any = None  # conftest.py puts TensorFlow here
X = np.random.default_rng(0).normal(size=(64, 5)).astype(np.float32)
Y = np.random.default_rng(1).integers(0, 3, 64).astype(np.int32)


@pytest.fixture(autouse=True, scope="module")
def _systems() -> None:
    configure_all()


def make_model() -> keras.Model:
    keras.utils.set_random_seed(7)
    model = keras.Sequential([keras.layers.Dense(8, activation="tanh"), keras.layers.Dense(3)])
    model.build((None, 5))
    return model


def values(model: keras.Model) -> list[np.ndarray]:
    return [np.asarray(v.value) for v in model.trainable_variables]


def by_hand(
    model: keras.Model, batches: list[tuple[np.ndarray, np.ndarray]], rate: float
) -> tuple[list[Any], list[Any]]:
    """The weights and losses of plain gradient descent."""
    weights = [v.value for v in model.trainable_variables]

    def loss(weights, x, y):
        logits, _ = model.stateless_call(weights, [v.value for v in model.non_trainable_variables], x)
        return -jnp.mean(jax.nn.log_softmax(logits)[jnp.arange(len(y)), y])

    losses = []
    for x, y in batches:
        value, slopes = jax.value_and_grad(loss)(weights, x, y)
        losses.append(value)
        weights = [w - rate * g for w, g in zip(weights, slopes, strict=True)]
    return weights, losses


def dataset(batch: int) -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices((X, Y)).batch(batch, drop_remainder=True).repeat()


def train(model: keras.Model, optimizer: keras.optimizers.Optimizer) -> Any:
    @tf.function(jit_compile=True)
    def step(iterator):
        x, y = next(iterator)
        with tf.GradientTape() as tape:
            logits = model(x, training=True)
            loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(y, logits))
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    return step


def test_one_step_equals_the_gradient_by_hand():
    one_replica = strategy(1)
    with one_replica.scope():
        model = make_model()
        expected, (loss,) = by_hand(model, [(X[:32], Y[:32])], 0.5)
        step = train(model, keras.optimizers.SGD(0.5))
        found = one_replica.run(step, args=(iter(dataset(32)),))
    np.testing.assert_allclose(found, loss, rtol=1e-6)
    for one, other in zip(values(model), expected, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-6)


def test_two_replicas_equal_one_with_the_whole_batch():
    def run(replicas: int) -> list[np.ndarray]:
        several = strategy(replicas)
        with several.scope():
            model = make_model()
            optimizer = ipu.optimizers.CrossReplicaOptimizer(keras.optimizers.SGD(0.5))
            step, iterator = train(model, optimizer), iter(dataset(32 // replicas))
            for _ in range(2):
                several.run(step, args=(iterator,))
        return values(model)

    for one, other in zip(run(1), run(2), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-6)


def test_a_loop_with_an_outfeed_is_one_program():
    one_replica = strategy(1)
    with one_replica.scope():
        model = make_model()
        batches = [(X[i : i + 16], Y[i : i + 16]) for i in (0, 16, 32, 48, 0)]
        expected, losses = by_hand(model, batches, 0.1)
        step, outfeed = train(model, keras.optimizers.SGD(0.1)), ipu.ipu_outfeed_queue.IPUOutfeedQueue()

        @tf.function
        def loop(iterator, steps):
            total = 0.0
            for i in tf.range(steps):
                loss = step(iterator)
                outfeed.enqueue((i, loss))
                total += loss
            return total

        total = one_replica.run(loop, args=(iter(dataset(16)), 5))
        numbers, found = outfeed.dequeue()
    assert isinstance(found, tf.Tensor)
    np.testing.assert_array_equal(numbers, range(5))
    np.testing.assert_allclose(found, losses, rtol=1e-5)
    np.testing.assert_allclose(total.numpy(), sum(losses), rtol=1e-5)
    for one, other in zip(values(model), expected, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-6)


def test_dropout_moving_statistics_and_metrics_are_those_of_our_own_programs():
    def make() -> tuple[keras.Model, keras.optimizers.Optimizer, keras.metrics.Metric]:
        keras.utils.set_random_seed(7)
        # A bias before a normalization has no gradient but rounding, which Adam would scale up.
        dense = keras.layers.Dense(8, use_bias=False)
        layers = [dense, keras.layers.BatchNormalization(), keras.layers.Dropout(0.5, seed=1)]
        model = keras.Sequential([*layers, keras.layers.Dense(3)])
        model.build((None, 5))
        return model, keras.optimizers.Adam(0.02), keras.metrics.SparseCategoricalAccuracy()

    def ours(replicas: int) -> list[np.ndarray]:
        with strategy(replicas).scope():
            model, optimizer, accuracy = make()
            feed = ipu.ipu_infeed_queue.IPUInfeedQueue(dataset(16))

            def body(x, y):
                def loss():
                    logits = model(x, training=True)
                    accuracy.update_state(y, logits)
                    return jnp.mean(keras.losses.sparse_categorical_crossentropy(y, logits, from_logits=True))

                ipu.training.minimize(optimizer, loss, model.trainable_variables)

            strategy(replicas).run(lambda: ipu.loops.repeat(4, body, [], feed))
        return [np.asarray(v.value) for v in (*model.variables, *accuracy.variables)]

    def tensorflows(replicas: int) -> list[np.ndarray]:
        with strategy(replicas).scope():
            model, optimizer, accuracy = make()

            @tf.function
            def loop(iterator):
                for _ in tf.range(4):
                    x, y = next(iterator)
                    with tf.GradientTape() as tape:
                        logits = model(x, training=True)
                        loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(y, logits))
                    accuracy.update_state(y, logits)
                    variables = model.trainable_variables
                    optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))

            strategy(replicas).run(loop, args=(iter(dataset(16)),))
        return [np.asarray(v.value) for v in (*model.variables, *accuracy.variables)]

    for replicas in (1, 2):
        for one, other in zip(ours(replicas), tensorflows(replicas), strict=True):
            np.testing.assert_allclose(one, other, atol=1e-5)


def test_a_loop_runs_over_the_rows_of_an_array():
    @tf.function
    def add(rows):
        total = tf.zeros([5])
        for row in rows:
            total += row
        return total

    np.testing.assert_allclose(strategy(1).run(add, args=(X,)), X.sum(0), atol=1e-5)


def test_conditions_and_loops_on_values_of_the_program():
    @tf.function
    def collatz(n):
        steps, largest = 0, n
        while n != 1:
            if n % 2 == 0:
                n = n // 2
            elif n > 2 and not n == 0:  # noqa: SIM201
                n = 3 * n + 1
            else:
                n = n - 1
            largest = n if n > largest else largest  # noqa: FURB136
            steps += 1
        return steps, largest

    for start, expected in ((6, (8, 16)), (7, (16, 52)), (1, (0, 1))):
        found = strategy(1).run(collatz, args=(np.int32(start),))
        assert tuple(map(int, found)) == expected


def test_a_branch_may_make_a_list():
    @tf.function
    def scaled(x):
        parts = [x, x + 1.0]
        if tf.reduce_sum(x) > 0:
            twice = []
            for part in parts:
                twice.append(2.0 * part)  # noqa: PERF401
            parts = twice
        return parts

    x = np.abs(X[0])
    np.testing.assert_allclose(strategy(1).run(scaled, args=(x,)), [2 * x, 2 * x + 2], rtol=1e-6)
    np.testing.assert_allclose(strategy(1).run(scaled, args=(-x,)), [-x, 1 - x], rtol=1e-6)


def test_a_loop_ends_with_break():
    @tf.function
    def first_above(rows, limit):
        found = -1
        for i in tf.range(tf.shape(rows)[0]):
            if rows[i] > limit:
                found = i
                break
        return found

    assert int(strategy(1).run(first_above, args=(np.arange(9, dtype=np.float32), 4.5))) == 5
    assert int(strategy(1).run(first_above, args=(np.arange(9, dtype=np.float32), 50.0))) == -1


def test_tensorflows_own_functions_for_loops_and_conditions():
    @tf.function
    def power(x, n):
        _, result = tf.while_loop(lambda i, _: i < n, lambda i, total: (i + 1, total * x), (0, 1.0))
        return tf.cond(result > 100.0, lambda: tf.constant(100.0), lambda: result)

    assert float(strategy(1).run(power, args=(2.0, np.int32(5)))) == 32
    assert float(strategy(1).run(power, args=(2.0, np.int32(9)))) == 100


@pytest.mark.parametrize("value", [-1.0, 0.5, 2.0, 7.0])
def test_cases_and_switches_run_the_branch_that_tensorflow_runs(value):
    def chosen(x):
        cases = tf.case([(x > 5.0, lambda: x), (x > 0.0, lambda: -x)], default=lambda: x * 0.0)
        number = tf.cast(x, tf.int32)
        last = tf.switch_case(number, [lambda: x, lambda: x + 1.0, lambda: x + 2.0])
        numbered = tf.switch_case(number, {1: lambda: x * 3.0, 0: lambda: x - 1.0}, default=lambda: x - 2.0)
        return tf.stack([cases, last, numbered])

    expected = chosen(tf.constant(value))
    np.testing.assert_allclose(strategy(1).run(tf.function(chosen), args=(np.float32(value),)), expected)


def test_gradients_of_values_and_of_gradients():
    @tf.function
    def slopes(x):
        with tf.GradientTape() as outer:
            outer.watch(x)
            with tf.GradientTape() as inner:
                inner.watch(x)
                y = tf.reduce_sum(x**3 * 2.0)
            first = inner.gradient(y, x)
            total = tf.reduce_sum(first * x)
        return first, outer.gradient(total, x)

    first, second = strategy(1).run(slopes, args=(X[0],))
    np.testing.assert_allclose(first, 6 * X[0] ** 2, rtol=1e-5)
    np.testing.assert_allclose(second, 18 * X[0] ** 2, rtol=1e-5)


def test_a_persistent_tape_weights_and_sources_that_depend_on_each_other():
    @tf.function
    def slopes(x):
        with tf.GradientTape(persistent=True) as tape:
            tape.watch(x)
            y = x * x
            tape.watch(y)
            z = y * x
        return tape.gradient(z, x, output_gradients=2 * x), tape.gradient(z, {"x": x, "y": y}), tape.gradient(y, x)

    weighted, both, last = strategy(1).run(slopes, args=(X[0],))
    np.testing.assert_allclose(weighted, 6 * X[0] ** 3, rtol=1e-5)
    np.testing.assert_allclose(both["x"], 3 * X[0] ** 2, rtol=1e-5)
    np.testing.assert_allclose(both["y"], X[0], rtol=1e-5)
    np.testing.assert_allclose(last, 2 * X[0], rtol=1e-5)


def test_no_gradient_passes_through_an_assignment():
    """An update is no part of what the next tape differentiates, and a tape knows the values that it has seen."""
    one, other = keras.Variable(2.0), keras.Variable(3.0)

    @tf.function
    def slopes():
        with tf.GradientTape(persistent=True) as early:
            first = one * one * other
        other.assign(other - early.gradient(first, other))  # 3 - 2 * 2 = -1
        with tf.GradientTape() as late:
            second = one * other
        one.assign(5.0)
        return late.gradient(second, one), early.gradient(first, [one, other])

    late, early = strategy(1).run(slopes)
    assert float(late) == -1
    assert list(map(float, early)) == [12, 4]


def test_functions_of_functions_share_a_tape():
    @tf.function
    def ask(tape, target, source):
        return tape.gradient(target, source)

    @tf.function
    def square(x):
        return x * x

    @tf.function
    def slope(x):
        with tf.GradientTape() as tape:
            y = square(x) * 2.0
        return ask(tape, y, x)

    np.testing.assert_allclose(strategy(1).run(slope, args=(X[0],)), 4 * X[0], rtol=1e-6)


def test_gradients_of_the_scripts_own():
    @tf.custom_gradient
    def twice_the_slope(x):
        return tf.square(x), lambda above: above * 4.0 * x

    @tf.function
    def slope(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = tf.reduce_sum(twice_the_slope(x) * 3.0)
        return y, tape.gradient(y, x)

    value, found = strategy(1).run(slope, args=(X[0],))
    np.testing.assert_allclose(value, 3 * (X[0] ** 2).sum(), rtol=1e-5)
    np.testing.assert_allclose(found, 12 * X[0], rtol=1e-5)
    with tf.GradientTape() as tape:
        x = tf.constant(2.0)
        tape.watch(x)
        y = twice_the_slope(x)
    assert float(tape.gradient(y, x)) == 8


def test_a_source_without_connection_has_a_gradient_of_zeros():
    @tf.function
    def slopes(x, y):
        with tf.GradientTape() as tape:
            z = tf.reduce_sum(x * 2.0)
        return tape.gradient(z, [x, y])

    one, other = strategy(1).run(slopes, args=(X[0], Y[:3].astype(np.float32)))
    np.testing.assert_array_equal(one, np.full(5, 2.0))
    np.testing.assert_array_equal(other, np.zeros(3))


def test_random_numbers_go_on_from_launch_to_launch():
    @tf.function
    def draw():
        return tf.random.normal([4]), tf.random.uniform([4], 0, 10, tf.int32)

    one, other = strategy(1).run(draw), strategy(1).run(draw)
    assert not np.array_equal(one[0], other[0])
    assert ((one[1] >= 0) & (one[1] < 10)).all()


def test_the_name_of_a_function_is_that_of_its_graph():
    names = []

    @tf.function
    def my_step(x):
        names.append(tf.compat.v1.get_default_graph().name)
        return x

    strategy(1).run(my_step, args=(1.0,))
    assert set(names) == {"my_step"}


@pytest.mark.parametrize("known", [True, False], ids=["sent", "fetched"])
def test_a_new_iterator_uses_the_program_of_the_last_one(known):
    traced = []

    @tf.function
    def total(iterator, steps):
        traced.append(None)
        result = tf.zeros([5])
        if known:
            for _ in tf.range(2):
                result += tf.reduce_sum(next(iterator)[0], 0)
        else:
            while steps > 0:
                result += tf.reduce_sum(next(iterator)[0], 0)
                steps -= 1
        return result

    with strategy(1).scope():
        for first in (0, 16, 32):
            data = tf.data.Dataset.from_tensor_slices((X[first:], Y[first:])).batch(8, drop_remainder=True)
            found = strategy(1).run(total, args=(iter(data), np.int32(2)))
            np.testing.assert_allclose(found, X[first : first + 16].sum(0), atol=1e-5)
        assert len(traced) == 2
        iterator = iter(dataset(8))
        for first in (0, 16):  # an iterator goes on where it was
            found = strategy(1).run(total, args=(iterator, np.int32(2)))
            np.testing.assert_allclose(found, X[first : first + 16].sum(0), atol=1e-5)
        assert len(traced) == 2
        strategy(1).run(total, args=(iter(dataset(4)), np.int32(2)))
    assert len(traced) == 4, "another shape is another program"


def test_an_iterator_is_an_argument_or_a_variable_and_not_both():
    @tf.function
    def twice(given):
        return next(given)[0] + next(iterator)[0]

    with strategy(1).scope():
        iterator = iter(dataset(8))
        with pytest.raises(ValueError, match="Use it as an argument only"):
            strategy(1).run(twice, args=(iterator,))
        np.testing.assert_allclose(strategy(1).run(twice, args=(iter(dataset(8)),)), 2 * X[:8], atol=1e-6)


def test_an_iterator_in_a_scope_serves_the_host_as_well():
    with strategy(1).scope():
        iterator = iter(dataset(8))
        np.testing.assert_array_equal(next(iterator)[0], X[:8])
        assert [int(x) for x in tf.data.Dataset.range(3)] == [0, 1, 2]


def test_training_and_tapes_of_tensorflow_itself_still_work():
    variable = tf.Variable(3.0)
    with tf.GradientTape() as tape:
        loss = variable**2
    assert float(tape.gradient(loss, variable)) == 6
    variable.assign_add(1.0)
    assert float(variable) == 4


def test_what_a_program_cannot_do_is_refused_with_the_remedy():
    counter = tf.Variable(0.0)

    @tf.function
    def counts(x):
        counter.assign_add(1.0)
        return x

    @tf.function
    def changes_its_shape(x):
        for _ in tf.range(3):
            x = tf.concat([x, x], 0)
        return x

    @tf.function
    def differs(x):
        if tf.reduce_sum(x) > 0:  # noqa: SIM108
            y = x
        else:
            y = x[:2]
        return y

    @tf.function
    def keeps_a_list(x):
        found = []
        for i in tf.range(3):
            found.append(x * tf.cast(i, tf.float32))  # noqa: PERF401
        return tf.stack(found)

    @tf.function
    def loops_for_ever(iterator):
        total = 0.0
        for x, _ in iterator:
            total += tf.reduce_sum(x)
        return total

    with pytest.raises(RuntimeError, match="A program does not carry lists that grow"):
        strategy(1).run(keeps_a_list, args=(X[0],))
    with strategy(1).scope(), pytest.raises(RuntimeError, match=r"call `next\(iterator\)` in the loop"):
        strategy(1).run(loops_for_ever, args=(iter(dataset(8)),))
    with pytest.raises(NotImplementedError, match=r"`assign_add` of the tf.Variable .*keras.Variable"):
        strategy(1).run(counts, args=(1.0,))
    with pytest.raises(TypeError, match=r"A loop changes `x` from float32\[5\] to float32\[10\]"):
        strategy(1).run(changes_its_shape, args=(X[0],))
    with pytest.raises(TypeError, match="Give each of them a value of one shape and dtype in both branches"):
        strategy(1).run(differs, args=(X[0],))

    @tf.function
    def across_a_loop(x):
        with tf.GradientTape() as tape:
            y = x * x
        slope = tf.zeros_like(x)
        for _ in tf.range(2):
            slope = tape.gradient(y * y, x)
        return slope

    with pytest.raises(RuntimeError, match="Do both on the same side"):
        strategy(1).run(across_a_loop, args=(X[0],))

    def plain(x):
        with tf.GradientTape() as tape:
            y = x * x
        return tape.gradient(y, x)

    with pytest.raises(RuntimeError, match=r"Decorate the function .* with `@tf.function`"):
        strategy(1).run(plain, args=(X[0],))
    with pytest.raises(RuntimeError, match="outside of a program"):
        plain(jnp.ones(3))
