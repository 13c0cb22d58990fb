"""Infeed queues: order, completeness, replicas, ends of data, and every refusal."""

from __future__ import annotations

import gc
import threading
import time
from typing import Any

import openipu as ipu
from openipu.engine.devices.kept_programs import KeptPrograms
from openipu.engine.program import user_program
from openipu.engine.program.infeed import InfeedSource
from openipu.engine.program.user_program import Operation
from openipu.errors import InvalidArgumentError, NotFoundError, OutOfRangeError
from openipu.ipu_infeed_queue import IPUInfeedQueue, IPUIterator, IPUOwnedIterator
from openipu.ipu_outfeed_queue import IPUOutfeedQueue

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest

from replication import SYSTEMS, configure_all, strategy
from zoo import KERAS_WARNINGS

pytestmark = KERAS_WARNINGS


@pytest.fixture(autouse=True, scope="module")
def systems():
    configure_all()


def numbers(count: int) -> list[np.ndarray]:
    return [np.array([i], np.int32) for i in range(count)]


def feeds(dataset: Any, replicas: int = 1, **settings: Any) -> tuple[IPUInfeedQueue, IPUOutfeedQueue]:
    with strategy(replicas).scope():
        return IPUInfeedQueue(dataset, **settings), IPUOutfeedQueue()


def through(infeed: Any, outfeed: Any, count: int) -> None:
    ipu.loops.repeat(count, outfeed.enqueue, [], infeed)


def while_more(infeed: Any, outfeed: Any, count: Any) -> None:
    ipu.loops.while_loop(lambda i: i < count, lambda i, x: (i + 1, outfeed.enqueue(x)), [0], infeed)


def copy_through(infeed: Any, outfeed: Any, count: int, replicas: int = 1) -> np.ndarray:
    """What comes out of a program that enqueues what it dequeues."""
    strategy(replicas).run(through, (infeed, outfeed, count))
    return outfeed.dequeue()


def copy_while(infeed: Any, outfeed: Any, count: int, replicas: int = 1) -> np.ndarray:
    strategy(replicas).run(while_more, (infeed, outfeed, np.int32(count)))
    return outfeed.dequeue()


COPIES = pytest.mark.parametrize("copy", [copy_through, copy_while], ids=["sent", "fetched"])


# --- infeeds ---------------------------------------------------------------------------------------------------------


@COPIES
def test_a_dataset_may_use_the_memory_of_one_element_for_the_next(copy):
    def refilled():
        element = np.empty(1, np.int32)
        for element[0] in range(20):
            yield element

    infeed, outfeed = feeds(refilled)
    assert copy(infeed, outfeed, 16).ravel().tolist() == list(range(16))


@COPIES
@pytest.mark.parametrize("replicas", [1, 2, pytest.param(4, marks=pytest.mark.slow)])
def test_elements_come_in_order_and_programs_go_on_where_the_last_one_stopped(copy, replicas):
    infeed, outfeed = feeds(lambda: numbers(40), replicas)
    shape = (-1,) if replicas == 1 else (-1, replicas)
    for begin, count in ((0, 4), (4, 1), (5, 4)):
        got = copy(infeed, outfeed, count, replicas)
        assert got.shape == (count, *shape[1:], 1)
        expected = np.arange(begin * replicas, (begin + count) * replicas)
        np.testing.assert_array_equal(got.reshape(shape), expected.reshape(shape))


@COPIES
def test_the_end_of_the_data_is_an_error_that_loses_nothing(copy):
    infeed, outfeed = feeds(lambda: numbers(5))
    assert copy(infeed, outfeed, 3).ravel().tolist() == [0, 1, 2]
    with pytest.raises(OutOfRangeError, match=r"2 are left|has taken 2 elements"):
        copy(infeed, outfeed, 3)
    assert isinstance(infeed.initializer, Operation)
    outfeed.dequeue()
    assert copy(infeed, outfeed, 3).ravel().tolist() == [0, 1, 2]


def test_the_end_of_the_data_on_replicas_leaves_no_failure_behind():
    infeed, outfeed = feeds(lambda: numbers(6), 2)
    with pytest.raises(OutOfRangeError, match="has taken 3 elements"):
        copy_while(infeed, outfeed, 4, 2)
    jax.effects_barrier()  # what JAX does at each new configuration and at the end of a process
    assert isinstance(infeed.initializer, Operation)
    outfeed.dequeue()
    assert copy_while(infeed, outfeed, 2, 2).ravel().tolist() == [0, 1, 2, 3]


def test_a_feed_that_ends_takes_nothing_from_the_others():
    long, outfeed = feeds(lambda: numbers(8))
    short, _ = feeds(lambda: numbers(3))

    def both():
        through(long, outfeed, 2)
        ipu.loops.repeat(2, lambda _: None, [], short)

    strategy(1).run(both)
    with pytest.raises(OutOfRangeError, match="takes 2 elements of the infeed queue, but 1 are left"):
        strategy(1).run(both)
    assert isinstance(short.initializer, Operation)
    strategy(1).run(both)
    assert outfeed.dequeue().ravel().tolist() == [0, 1, 2, 3]


def test_elements_left_at_the_end_can_still_be_taken():
    infeed, outfeed = feeds(lambda: numbers(5))
    with pytest.raises(OutOfRangeError, match="takes 6 elements of the infeed queue, but 5 are left"):
        copy_through(infeed, outfeed, 6)
    assert copy_through(infeed, outfeed, 5).ravel().tolist() == [0, 1, 2, 3, 4]


def test_variables_keep_their_values_when_the_data_ends_in_the_midst():
    infeed, _ = feeds(lambda: numbers(3))
    total = keras.Variable(7, dtype="int32")

    def body(i, x):
        total.assign(total + x[0])
        return i + 1

    with pytest.raises(OutOfRangeError, match="Give a dataset that repeats"):
        strategy(1).run(lambda: ipu.loops.while_loop(lambda i: i < 9, body, [0], infeed))
    assert int(total.value) == 7


@COPIES
def test_errors_of_the_dataset_reach_the_user(copy):
    def data():
        yield from numbers(3)
        raise ArithmeticError("the dataset's own")

    infeed, outfeed = feeds(data)
    with pytest.raises(ArithmeticError, match="the dataset's own"):
        copy(infeed, outfeed, 5)


def test_an_element_of_another_shape_is_named():
    infeed, outfeed = feeds(lambda: [np.ones(2, "float32"), np.ones(2, "float32"), np.ones(1, "float32")])
    with pytest.raises(
        ValueError, match=r"Element 2 of the dataset has float32\[1\], but the first one has float32\[2\]"
    ):
        copy_through(infeed, outfeed, 3)


def test_large_slabs_are_fetched_instead(monkeypatch):
    monkeypatch.setattr(user_program, "SLAB_SHARE", 0.0)
    called = []
    original = InfeedSource._block
    monkeypatch.setattr(InfeedSource, "_block", lambda *a: called.append(1) or original(*a))
    infeed, outfeed = feeds(lambda: numbers(20), prefetch_depth=4)
    assert copy_through(infeed, outfeed, 12).ravel().tolist() == list(range(12))
    assert 3 <= len(called) <= 12, "several elements come with one visit"


def test_kinds_of_datasets():
    grain = pytest.importorskip("grain")
    tf = pytest.importorskip("tensorflow")
    pairs = [(np.full((2, 3), i, "float32"), np.full((2,), i, "int32")) for i in range(4)]
    datasets = {
        "callable": lambda: iter(pairs),
        "list": pairs,
        "tf.data": tf.data.Dataset.from_generator(
            lambda: iter(pairs), output_signature=(tf.TensorSpec((2, 3), tf.float32), tf.TensorSpec((2,), tf.int32))
        ),
        "grain": grain.MapDataset.source(pairs),
        "grain iterator": grain.MapDataset.source(pairs).to_iter_dataset(),
    }
    for name, dataset in datasets.items():
        infeed, outfeed = feeds(dataset)
        strategy(1).run(pairs_through, (infeed, outfeed))
        got = outfeed.dequeue()
        assert got["y"][:, 0].tolist() == [0, 1, 2, 3], name
        np.testing.assert_array_equal(got["x"], [x for x, _ in pairs])
        assert infeed.number_of_tuple_elements == 2
        assert infeed.dequeued


def pairs_through(infeed: Any, outfeed: Any) -> None:
    ipu.loops.repeat(4, lambda x, y: outfeed.enqueue({"x": x, "y": y}), [], infeed)


def test_dicts_become_keyword_arguments_and_dtypes_those_of_devices():
    infeed, outfeed = feeds([{"b": np.arange(2.0), "a": np.arange(3)}])
    assert {k: v.dtype for k, v in infeed.element_spec.items()} == {"a": jnp.int32, "b": jnp.float32}
    strategy(1).run(lambda: ipu.loops.repeat(1, lambda n, a, b: (n + 1, outfeed.enqueue((b, a))), [0], infeed))
    b, a = outfeed.dequeue()
    assert (b.shape, a.shape) == ((1, 2), (1, 3))


def test_iterators():
    data = [np.float32(i) for i in range(9)]
    with strategy(1).scope():
        iterator, queue = IPUIterator(data), IPUInfeedQueue(data)
        owned = IPUOwnedIterator(infeed_spec=queue, element_spec=queue.element_spec)
    assert float(strategy(1).run(lambda it: next(it) + 10 * it.get_next(), (iterator,))) == 10
    assert float(strategy(1).run(lambda it: next(it) + 10 * it.get_next(), (iterator,))) == 32
    total = strategy(1).run(lambda: ipu.loops.repeat(4, lambda t: t + next(owned), [0.0]))
    assert float(total) == 6


def test_reading_stops_when_nobody_needs_the_queue(monkeypatch):
    def readers() -> int:
        return sum(t.name == "openipu-infeed" for t in threading.enumerate())

    gc.collect()
    before = readers()
    monkeypatch.setattr(user_program, "_programs", KeptPrograms(1))
    infeed, outfeed = feeds(lambda: numbers(100))
    copy_through(infeed, outfeed, 1)
    assert readers() == before + 1
    monkeypatch.undo()  # a program keeps the feeds it uses
    del infeed, outfeed
    gc.collect()
    deadline = time.monotonic() + 10
    while readers() > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert readers() <= before


def test_a_queue_reads_no_further_ahead_than_asked():
    read = []

    def data():
        for i in range(1000):
            read.append(i)
            yield np.int32(i)

    infeed, outfeed = feeds(data, prefetch_depth=7)
    copy_through(infeed, outfeed, 2)
    time.sleep(0.2)
    assert 2 <= len(read) <= 2 + 7 + 1


# --- refusals --------------------------------------------------------------------------------------------------------


def test_errors_of_infeed_queues():
    with pytest.raises(ValueError, match="`device_ordinal` is -1"):
        IPUInfeedQueue([1], device_ordinal=-1)
    with pytest.raises(ValueError, match="`device_ordinal` is '0'"):
        IPUInfeedQueue([1], device_ordinal="0")
    for depth in (-1, 0, 256, 1.5, True):
        with pytest.raises(ValueError, match="`prefetch_depth` is"):
            IPUInfeedQueue([1], prefetch_depth=depth)
    with pytest.raises(TypeError, match="has no arguments"):
        IPUInfeedQueue([1], nonsense=2)
    with pytest.raises(ValueError, match="'int' is not a dataset"):
        IPUInfeedQueue(1)
    with pytest.raises(ValueError, match="no element"):
        IPUInfeedQueue([])
    with pytest.raises(ValueError, match="lists inside"):
        IPUInfeedQueue([(np.ones(1), [np.ones(1)])])
    with pytest.raises(InvalidArgumentError, match="a dimension is 0"):
        IPUInfeedQueue([np.ones((0, 2))])
    queue = IPUInfeedQueue([np.float32(1)])
    with pytest.raises(ValueError, match="obsolete"):
        queue.get_next()
    with pytest.raises(NotFoundError, match="has not started"):
        _ = queue.deleter
    with pytest.raises(RuntimeError, match="outside of a device program"):
        queue._dequeue()
    with pytest.raises(ValueError, match="belongs to system 0, but the program runs on system 1"):
        strategy(SYSTEMS[1]).run(lambda: ipu.loops.repeat(1, lambda _: None, [], queue))
    strategy(1).run(lambda: ipu.loops.repeat(1, lambda _: None, [], queue))
    _ = queue.deleter
    with pytest.raises(NotFoundError, match="was deleted"):
        strategy(1).run(lambda: ipu.loops.repeat(1, lambda _: None, [], queue))


def test_a_dataset_without_shapes_is_refused():
    tf = pytest.importorskip("tensorflow")
    with pytest.raises(ValueError, match=r"not fully defined.*drop_remainder=True"):
        IPUInfeedQueue(tf.data.Dataset.range(10).batch(3))


def test_text_and_objects_are_refused():
    tf = pytest.importorskip("tensorflow")
    for element in ("text", b"text", np.array(["a", "b"]), {"x": np.float32(1), "name": "text"}, object()):
        with pytest.raises(ValueError, match=r"have dtype (str|bytes|object)\w*, but devices compute with numbers"):
            IPUInfeedQueue([element] * 4)
    with pytest.raises(ValueError, match=r"have dtype object.*TextVectorization"):
        IPUInfeedQueue(tf.data.Dataset.from_tensors("text"))


def test_feeds_in_a_stage_are_refused():
    infeed, outfeed = feeds([np.ones(2, np.float32)] * 4)
    iterator = IPUIterator([np.float32(1)] * 4)

    def run(first: Any) -> None:
        ipu.pipelining_ops.pipeline([first, lambda x: x], gradient_accumulation_count=4, infeed_queue=infeed,
                                    outfeed_queue=IPUOutfeedQueue(), device_mapping=[0, 0])  # fmt: skip

    with pytest.raises(RuntimeError, match=r"stage of a pipeline.*`outfeed_queue=`.*from the last stage"):
        strategy(1).run(run, (lambda x: (outfeed.enqueue(x), x)[1],))
    with pytest.raises(RuntimeError, match=r"stage of a pipeline.*`infeed_queue=`"):
        strategy(1).run(run, (lambda x: x + next(iterator),))
    with pytest.raises(RuntimeError, match="outside of a device program"):
        outfeed.enqueue(1.0)


def test_errors_of_iterators():
    with pytest.raises(ValueError, match="either a `dataset`, or both"):
        IPUIterator()
    with pytest.raises(ValueError, match="either a `dataset`, or both"):
        IPUIterator([1], element_spec=1)
    iterator = IPUIterator([np.float32(1)])
    with pytest.raises(RuntimeError, match="outside of a device program"):
        next(iterator)
    with pytest.raises(NotImplementedError, match="end of the data"):
        iterator.get_next_as_optional()
    with pytest.raises(NotImplementedError, match="cannot be saved"):
        iterator._serialize_to_tensors()


def test_options_without_effect_are_named(caplog):
    IPUInfeedQueue([1], optimise_latency=True)
    IPUOutfeedQueue(optimise_latency=True)
    assert caplog.text.count("optimise_latency") == 2


@pytest.mark.parametrize("kind", ["infeed", "while", "iterator", "outfeed"])
def test_feeds_made_in_the_function_are_refused(kind):
    def body(total, *element):
        return total + sum(e.sum() for e in element) + 1

    def program():
        if kind == "iterator":
            return next(IPUIterator(rows(4)))
        if kind == "outfeed":
            outfeed = IPUOutfeedQueue()
            return ipu.loops.repeat(2, lambda i: (i + 1, outfeed.enqueue(i)), [0])
        if kind == "while":
            return ipu.loops.while_loop(lambda total: total < 3, body, [0.0], IPUInfeedQueue(rows(4)))
        return ipu.loops.repeat(2, body, [0.0], IPUInfeedQueue(rows(4)))

    with pytest.raises(ValueError, match=r"creates again each time it is traced\. Create it outside"):
        strategy(1).run(program)


def rows(count):
    return [np.full(3, i, "float32") for i in range(count)]
