"""Infeed and outfeed queues: order, completeness, replicas, other threads, ends of data, and every refusal."""

from __future__ import annotations

import gc
import threading
import time
from typing import Any

import openipu as ipu
from openipu.engine.devices.kept_programs import KeptPrograms
from openipu.engine.host_io import outfeed_buffer
from openipu.engine.program import user_program
from openipu.engine.program.infeed import InfeedSource
from openipu.engine.program.user_program import Operation
from openipu.errors import FailedPreconditionError, InvalidArgumentError, NotFoundError, OutOfRangeError
from openipu.ipu_infeed_queue import IPUInfeedQueue, IPUIterator, IPUOwnedIterator
from openipu.ipu_outfeed_queue import IPUOutfeedMode, IPUOutfeedQueue, ScopedIPUOutfeedQueue

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


# --- outfeeds --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("replicas", [1, 2])
def test_shapes_of_what_is_dequeued(replicas):
    with strategy(replicas).scope():
        everything, latest = IPUOutfeedQueue(), IPUOutfeedQueue(IPUOutfeedMode.LAST)

    def body(i):
        value = {"i": i, "m": jnp.ones((2, 3)) * i}
        return i + 1, everything.enqueue(value), latest.enqueue((i,))

    def run(first):
        ipu.loops.repeat(5, body, [first])

    dimension = () if replicas == 1 else (replicas,)
    for begin in (0, 10):
        strategy(replicas).run(run, (np.int32(begin),))
        got = everything.dequeue()
        assert (got["i"].shape, got["m"].shape) == ((5, *dimension), (5, *dimension, 2, 3))
        assert got["i"].reshape(5, -1)[:, 0].tolist() == list(range(begin, begin + 5))
        (last,) = latest.dequeue()
        assert last.shape == dimension
        assert (last == begin + 4).all()
        assert latest.dequeue()[0].tolist() == last.tolist(), "the latest stays"
    assert everything.dequeue()["m"].shape == (0, *dimension, 2, 3)
    strategy(replicas).run(run, (np.int32(0),))
    elements = list(everything)
    assert [int(np.ravel(e["i"])[0]) for e in elements] == list(range(5))
    assert elements[0]["m"].shape == (*dimension, 2, 3)
    assert list(everything) == []
    strategy(replicas).run(run, (np.int32(0),))
    assert isinstance(everything.deleter, Operation)
    assert everything.dequeue()["i"].shape[0] == 0


def test_shapes_before_the_first_element():
    with strategy(2).scope():
        outfeed = IPUOutfeedQueue()

    def program():
        outfeed.enqueue(jnp.ones(3))
        # Compiled but not launched yet, as another thread may find it.
        shapes.append(outfeed.dequeue().shape if outfeed.enqueued else None)

    shapes: list[Any] = []
    strategy(2).run(program)
    assert shapes[-1] == (0, 2, 3)
    assert outfeed.dequeue().shape == (1, 2, 3)


def test_replicas_enqueue_their_own_values():
    with strategy(4).scope():
        outfeed = IPUOutfeedQueue(buffer_depth=2)

    def body(i):
        outfeed.enqueue(i * 10 + ipu.replication_ops.replication_index())
        return i + 1

    strategy(4).run(lambda: ipu.loops.repeat(7, body, [0]))
    np.testing.assert_array_equal(outfeed.dequeue(), np.arange(7)[:, None] * 10 + np.arange(4))


@pytest.mark.parametrize("mode", IPUOutfeedMode)
def test_replicas_that_enqueue_unequally_often_are_an_error(mode):
    with strategy(2).scope():
        outfeed, counter = IPUOutfeedQueue(mode), keras.Variable(0, dtype="int32")

    def body(i):
        counter.assign_add(1)
        first = ipu.replication_ops.replication_index() == 0
        ipu.loops.cond(first | (i == 3), lambda: outfeed.enqueue(i))
        return i + 1

    with pytest.raises(ValueError, match=r"different numbers .* \[5, 1\], by replica"):
        strategy(2).run(lambda: ipu.loops.repeat(5, body, [0]))
    assert int(counter.value) == 5, "the program did run"
    strategy(2).run(lambda: ipu.loops.repeat(2, lambda i: (i + 1, outfeed.enqueue(i)), [7]))
    assert outfeed.dequeue()[-1].tolist() == ([8, 8] if mode is IPUOutfeedMode.ALL else 8)


def test_enqueue_inside_a_loss():
    weight, optimizer = keras.Variable(2.0), keras.optimizers.SGD(0.25)
    with strategy(1).scope():
        outfeed = IPUOutfeedQueue()

    def loss():
        outfeed.enqueue(weight * 1.0)
        return weight * weight

    def body():
        ipu.training.minimize(optimizer, loss, [weight])

    strategy(1).run(lambda: ipu.loops.repeat(3, body))
    assert outfeed.dequeue().tolist() == [2, 1, 0.5]
    assert float(weight.value) == 0.25


def counting(outfeed: Any, count: int, size: int, replicas: int = 1) -> None:
    def body(i):
        outfeed.enqueue((i, jnp.zeros(size) + i))
        return i + 1

    strategy(replicas).run(lambda: ipu.loops.repeat(count, body, [0]))


def read_while_running(outfeed: Any, run: Any, pause: float = 0.0, since: int = 0) -> tuple[list[int], int, int]:
    """What another thread reads, how much of it before the program ended, and the most that waited `since` then."""
    seen: list[int] = []
    most, ended = 0, threading.Event()

    def read() -> None:
        nonlocal most
        while True:
            last = ended.is_set()
            for number, values in outfeed:
                assert (values == number).all()
                seen.append(int(np.ravel(number)[0]))
                most = max(most, len(outfeed._buffer._ready)) if len(seen) > since else 0
                if pause:
                    time.sleep(pause)
            if last:
                return
            time.sleep(0.0002)

    reader = threading.Thread(target=read)
    reader.start()
    run()
    early = len(seen)
    ended.set()
    reader.join()
    return seen, early, most


@pytest.mark.parametrize(("replicas", "depth", "size"), [(1, 2, 300_000), (2, 3, 1)])
def test_a_slow_reader_gets_everything_in_order_and_holds_the_program_up(replicas, depth, size):
    with strategy(replicas).scope():
        outfeed = IPUOutfeedQueue(buffer_depth=depth)
    count = 1000 if size == 1 else 40
    # A reader is known from its first read on. What has come until then is kept, and from then on the program waits.
    seen, early, most = read_while_running(
        outfeed, lambda: counting(outfeed, count, size, replicas), pause=0.001, since=3 * count // 4
    )
    assert seen == list(range(count))
    assert early >= count // 2, "the program waited for the reader"
    assert most <= depth


def test_load_of_a_fast_program():
    with strategy(1).scope():
        outfeed = IPUOutfeedQueue(buffer_depth=64)
    seen, early, _ = read_while_running(outfeed, lambda: counting(outfeed, 30_000, 1))
    assert seen == list(range(30_000))
    assert early > 15_000, "read while the program ran"


@pytest.mark.slow
@pytest.mark.parametrize("replicas", [1, 2])
def test_load_of_100_000(replicas):
    with strategy(replicas).scope():
        outfeed = IPUOutfeedQueue(buffer_depth=64)
    seen, _, most = read_while_running(outfeed, lambda: counting(outfeed, 100_000, 1, replicas), since=50_000)
    assert seen == list(range(100_000))
    assert most <= 64


def test_without_a_reader_everything_is_kept_for_the_thread_that_runs():
    with strategy(1).scope():
        outfeed = IPUOutfeedQueue(buffer_depth=1)
    counting(outfeed, 500, 1)
    assert outfeed.dequeue()[0].tolist() == list(range(500))


def test_a_reader_that_stops_reading_does_not_stop_the_program(monkeypatch, caplog):
    monkeypatch.setattr(outfeed_buffer, "PATIENCE", 0.3)
    with strategy(1).scope():
        outfeed = IPUOutfeedQueue(buffer_depth=2)
    counting(outfeed, 1, 1)
    outfeed.dequeue()
    release = threading.Event()

    def read_once() -> None:
        while not len(outfeed.dequeue()[0]):
            time.sleep(0.001)
        release.wait(30)

    reader = threading.Thread(target=read_once)
    reader.start()
    counting(outfeed, 20_000, 1)  # long enough for the reader to come in between
    release.set()
    reader.join()
    assert "nobody has read an outfeed" in caplog.text
    assert outfeed.dequeue()[0].tolist()[-1] == 19_999


def test_waiting_for_completion_from_another_thread():
    with strategy(1).scope():
        outfeed = IPUOutfeedQueue(buffer_depth=1)
    got: list[Any] = []

    def read() -> None:
        while not outfeed._buffer._running:
            time.sleep(0.001)
        got.append(outfeed.dequeue(wait_for_completion=True)[0])

    reader = threading.Thread(target=read)
    reader.start()
    counting(outfeed, 20_000, 1)
    reader.join()
    assert got[0].tolist() == list(range(20_000))


@pytest.mark.parametrize("replicas", [1, 2])
def test_the_latest_element_while_the_program_runs(replicas):
    with strategy(replicas).scope():
        outfeed = IPUOutfeedQueue(IPUOutfeedMode.LAST)
    seen: list[list[int]] = []
    ended = threading.Event()

    def read() -> None:
        while not ended.is_set():
            latest = outfeed._buffer.latest()
            if latest is not None:
                seen.append(np.ravel(outfeed.dequeue()[0]).tolist())
            time.sleep(0.001)

    reader = threading.Thread(target=read)
    reader.start()
    counting(outfeed, 200_000, 1, replicas)
    ended.set()
    reader.join()
    assert seen == sorted(seen)
    assert all(len(set(step)) == 1 for step in seen), "all replicas are at the same step"
    assert len({step[0] for step in seen}) > 2, "it moved while the program ran"
    assert np.ravel(outfeed.dequeue()[0]).tolist() == [199_999] * replicas


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


def test_errors_of_outfeed_queues():
    with pytest.raises(ValueError, match="`outfeed_mode` is 'all'"):
        IPUOutfeedQueue("all")
    with pytest.raises(ValueError, match=r"`device_ordinal` is 1\.0"):
        IPUOutfeedQueue(device_ordinal=1.0)
    for depth in (0, -1, 2.5):
        with pytest.raises(ValueError, match="`buffer_depth` is"):
            IPUOutfeedQueue(buffer_depth=depth)
    queue, latest = IPUOutfeedQueue(), ScopedIPUOutfeedQueue(IPUOutfeedMode.LAST)
    with pytest.raises(ValueError, match="Nothing has been enqueued yet"):
        queue.dequeue()
    others: list[Any] = []
    thread = threading.Thread(target=lambda: others.append(queue.dequeue()))
    thread.start()
    thread.join()
    assert others == [[]]
    with pytest.raises(RuntimeError, match="outside of a device program"):
        queue.enqueue(1)
    with pytest.raises(RuntimeError, match="mode ALL"):
        iter(latest)

    def twice():
        queue.enqueue(1)
        queue.enqueue(2)

    with pytest.raises(ValueError, match="into the same outfeed queue twice"):
        strategy(1).run(twice)
    strategy(1).run(lambda: ipu.loops.repeat(0, lambda: latest.enqueue(1)))
    with pytest.raises(FailedPreconditionError, match="no latest element yet"):
        latest.dequeue()
    strategy(1).run(lambda: queue.enqueue(np.float32(1)))
    with pytest.raises(ValueError, match="Enqueue the same shapes"):
        strategy(1).run(lambda: queue.enqueue(np.ones(2, "float32")))
    with pytest.raises(ValueError, match="belongs to system 0"):
        strategy(2).run(lambda: queue.enqueue(np.float32(1)))


def test_options_without_effect_are_named(caplog):
    IPUInfeedQueue([1], optimise_latency=True)
    IPUOutfeedQueue(optimise_latency=True)
    assert caplog.text.count("optimise_latency") == 2
