"""Outfeed queues: shapes, order, replicas, slow and fast readers in other threads, and every refusal."""

from __future__ import annotations

import threading
import time
from typing import Any

import openipu as ipu
from openipu.engine.host_io import outfeed_buffer
from openipu.engine.program.user_program import Operation
from openipu.errors import FailedPreconditionError
from openipu.ipu_outfeed_queue import IPUOutfeedMode, IPUOutfeedQueue, ScopedIPUOutfeedQueue

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest

from replication import configure_all, strategy
from zoo import KERAS_WARNINGS

pytestmark = KERAS_WARNINGS


@pytest.fixture(autouse=True, scope="module")
def systems():
    configure_all()


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
    with pytest.raises(ValueError, match="enqueue the same shapes"):
        strategy(1).run(lambda: queue.enqueue(np.ones(2, "float32")))
    with pytest.raises(ValueError, match="belongs to system 0"):
        strategy(2).run(lambda: queue.enqueue(np.float32(1)))


def test_only_the_latest_element_takes_memory() -> None:
    """A program may enqueue for days without anybody who dequeues."""
    buffer = outfeed_buffer.HostBuffer(4, only_last=True)
    buffer.begin(range(2), jax.ShapeDtypeStruct((), np.int64))
    for number in range(3):
        for replica in range(2):
            buffer.add(replica, [np.array(10 * number + replica)])
    buffer.end()
    assert [[int(value) for (value,) in element] for element in buffer.take()] == [[20, 21]]
