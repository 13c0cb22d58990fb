"""Loops and conditionals in device programs: results, variables and feeds in them, and their errors."""

from __future__ import annotations

import threading
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


def test_results_of_loops(one):
    assert float(one.run(lambda: ipu.loops.repeat(5, lambda x: 2 * x, [1.0]))) == 32
    assert float(one.run(lambda: ipu.loops.repeat(5, lambda x: 2 * x, 1.0))) == 32
    a, b = one.run(lambda: ipu.loops.repeat(5, lambda x, n: (x * n, n + 1), [1.0, np.int32(1)]))
    assert (float(a), int(b)) == (120, 6)
    plain = [jnp.float16(2), np.float32(2), np.uint8(2)]
    assert [a.dtype.name for a in one.run(lambda: ipu.loops.repeat(2, lambda *_: (0.5, 1, 3), plain))] == [
        "float16",
        "float32",
        "uint8",
    ], "Python's numbers take the dtype of what went in"
    nothing = one.run(lambda: ipu.loops.repeat(2, lambda: None))
    assert jax.tree.leaves(nothing) == []
    tree = one.run(lambda: ipu.loops.repeat(3, lambda d: {"n": d["n"] + 1}, [{"n": np.int32(0)}]))
    assert int(tree["n"]) == 3


def test_a_loop_of_computed_length(one):
    def program(n):
        return ipu.loops.repeat(n, lambda x: x + 1, [0])

    assert [int(one.run(program, (np.int32(n),))) for n in (0, 3, 7)] == [0, 3, 7]
    assert compiled(program) == 1


def test_while_loops(one):
    def program(limit):
        return ipu.loops.while_loop(lambda x, _: x < limit, lambda x, n: (2 * x, n + 1), [1.0, np.int32(0)])

    assert list(map(float, one.run(program, (100.0,)))) == [128, 7]
    assert list(map(float, one.run(program, (0.0,)))) == [1, 0]
    assert compiled(program) == 1
    at_most = one.run(lambda: ipu.loops.while_loop(lambda x: x > 0, lambda x: x + 1, [1], maximum_iterations=4))
    assert int(at_most) == 5


def test_loops_in_loops_carry_variables(one):
    inner, outer = keras.Variable(0, dtype="int32"), keras.Variable(0, dtype="int32")

    def turn(x):
        inner.assign(inner + 1)
        return x + inner.value

    def body(x):
        outer.assign(outer + 1)
        x = ipu.loops.repeat(3, turn, [x])
        return ipu.loops.while_loop(lambda x: x % 2 == 1, lambda x: x + outer.value * 0 + 1, [x])

    result = one.run(lambda: ipu.loops.repeat(2, body, [np.int32(0)]))
    expected = 0
    for i in range(6):
        expected += i + 1
        if i % 3 == 2:
            expected += expected % 2
    assert (int(result), int(inner.value), int(outer.value)) == (expected, 6, 2)


def test_conditionals_carry_variables_and_feeds(one):
    even, turns = keras.Variable(0, dtype="int32"), keras.Variable(0, dtype="int32")
    with one.scope():
        outfeed = ipu.ipu_outfeed_queue.IPUOutfeedQueue()

    def hit(x):
        even.assign(even + 1)
        return ipu.loops.repeat(2, lambda y: y + 1, [x]), outfeed.enqueue(x)

    def miss(x):
        turns.assign(turns + 100)
        return ipu.loops.repeat(3, lambda y: y + 10, [x])

    def bonus():
        even.assign(even + 1000)

    def body(i, x):
        turns.assign(turns + 1)
        x = ipu.loops.cond(i % 2 == 0, hit, miss, [x])
        ipu.loops.cond(i == 4, bonus)
        return i + 1, x

    _, x = one.run(lambda: ipu.loops.repeat(5, body, [0, 0]))
    assert int(x) == 3 * 2 + 2 * 30
    assert (int(even.value), int(turns.value)) == (1003, 205)
    assert outfeed.dequeue().tolist() == [0, 32, 64]
    with one.scope():
        infeed = ipu.ipu_infeed_queue.IPUIterator([np.float32(1)] * 3)
        assert int(ipu.loops.cond(True, lambda x: x + 1, inputs=1)) == 2
    with pytest.raises(ValueError, match="A branch of a conditional takes an element"):
        one.run(lambda: ipu.loops.cond(True, lambda: [next(infeed)][:0]))
    with pytest.raises(TypeError, match=r"shape \(\) and dtype float32"):
        one.run(lambda: ipu.loops.cond(1.0, lambda: None))
    with pytest.raises(TypeError, match=r"branch .* cannot be called"):
        one.run(lambda: ipu.loops.cond(True, lambda x: x))


def test_threads_trace_one_after_the_other(one):
    weights = [keras.Variable(0.0) for _ in range(4)]
    optimizers = [keras.optimizers.SGD(1.0) for _ in range(4)]

    def train(number):
        def step():
            return ipu.training.minimize(
                optimizers[number], lambda: weights[number] * (1.0 + number), [weights[number]]
            )

        one.run(step)

    threads = [threading.Thread(target=train, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [float(w.value) for w in weights] == [-1, -2, -3, -4]
    assert not hasattr(keras.optimizers.Optimizer.apply, "__wrapped__"), "Keras is as it was"


def test_a_program_that_is_only_compiled_changes_nothing():
    counter = keras.Variable(3.0)

    def program(x):
        counter.assign(counter + 1.0)
        return {"sum": x + counter.value}

    config = ipu.config.IPUConfig()
    config.auto_select_ipus = 1
    config.device_connection.type = ipu.config.DeviceConnectionType.PRE_COMPILE
    config.device_connection.version = "ipu2"
    config.configure_ipu_system()
    try:
        result = ipu.ipu_strategy.IPUStrategy().run(program, (np.ones(2, "float32"),))
    finally:
        configure_all()
    np.testing.assert_array_equal(result["sum"], [0, 0])
    assert float(counter.value) == 3


def test_a_loop_is_a_program_of_its_own_inside_a_scope(one):
    with one.scope():
        assert float(ipu.loops.repeat(3, lambda x: x * 3, [1.0])) == 27
    with ipu.scopes.ipu_scope(DEVICE):
        assert int(ipu.loops.while_loop(lambda x: x < 3, lambda x: x + 1, [0])) == 3


def test_errors_of_loops(one):
    def run(*args, **kwargs):
        return one.run(lambda: ipu.loops.repeat(*args, **kwargs))

    with pytest.raises(TypeError, match=r"body .* cannot be called with 1 input: "):
        run(2, lambda: None, [1.0])
    with pytest.raises(TypeError, match=r"condition .* cannot be called with 1 input: "):
        one.run(lambda: ipu.loops.while_loop(lambda: True, lambda x: x, [1.0]))
    with one.scope():
        infeed = ipu.ipu_infeed_queue.IPUInfeedQueue([(np.ones(2), np.ones(2))] * 2)
    with pytest.raises(TypeError, match=r"1 input and 2 from the infeed queue"):
        run(2, lambda x, _: x, [1.0], infeed)
    with pytest.raises(ValueError, match="operation before a value"):
        run(2, lambda x: (None, x), [1.0])
    with pytest.raises(TypeError, match=r"returned int32\[\] for a value that went in as float32\[\]"):
        run(2, lambda x: x.astype("int32"), [1.0])
    for first, body in ((1, lambda x: x + 0.5), (np.int32(1), lambda _: 0.7), (True, lambda _: 2)):
        with pytest.raises(TypeError, match=r"returned \w+\[\] for a value that went in as (int32|bool)\[\]. Return"):
            run(2, body, [first])
    with pytest.raises(TypeError, match=r"returned float32\[2\] for a value that went in as float32\[\]"):
        run(2, lambda x: jnp.stack([x, x]), [1.0])
    with pytest.raises(TypeError, match=r"returned 2 values, but `inputs` has 1"):
        run(2, lambda x: (x, x), [1.0])
    with pytest.raises(ValueError, match="`n` is -1"):
        run(-1, lambda: None)
    with pytest.raises(TypeError, match=r"`n` is 1\.5"):
        run(1.5, lambda: None)
    with pytest.raises(TypeError, match="Give an `IPUInfeedQueue`"):
        run(1, lambda: None, [], [1])
    with pytest.raises(TypeError, match="Give one boolean"):
        one.run(lambda: ipu.loops.while_loop(lambda x: x, lambda x: x, [1.0]))
    counter = keras.Variable(0.0)
    with pytest.raises(ValueError, match="condition of a loop changes variables"):
        one.run(lambda: ipu.loops.while_loop(lambda x: counter.assign(x) is None, lambda x: x, [1.0]))


def test_assigning_inside_a_jax_loop_is_explained(one):
    counter = keras.Variable(0.0)

    def body(_, x):
        counter.assign(counter + x)
        return x

    with pytest.raises(RuntimeError, match=r"variable .* is assigned inside one of JAX's own loops"):
        one.run(lambda: jax.lax.fori_loop(0, 3, body, 1.0))
    with one.scope():
        outfeed = ipu.ipu_outfeed_queue.IPUOutfeedQueue()
    with pytest.raises(RuntimeError, match=r"A feed is used inside one of JAX's own loops"):
        one.run(lambda: jax.lax.cond(True, lambda: outfeed.enqueue(1), lambda: None))
    assert float(counter.value) == 0
