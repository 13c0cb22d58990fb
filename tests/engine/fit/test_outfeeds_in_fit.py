"""Outfeeds that layers, gradient functions and optimizers fill while `fit`, `evaluate` and `predict` run."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import openipu as ipu
from openipu.ipu_outfeed_queue import IPUOutfeedMode, IPUOutfeedQueue
from openipu.optimizers import MapGradientOptimizer

import jax
import keras
import numpy as np
import pytest
from keras import layers, ops

from replication import configure_all, strategy
from zoo import KERAS_WARNINGS

pytestmark = KERAS_WARNINGS

BATCH = 4


@pytest.fixture(autouse=True, scope="module")
def systems() -> None:
    configure_all()


class Peek(layers.Layer):
    """Enqueues what passes through it."""

    def __init__(self, queue: Any, value: Any = lambda x: x) -> None:
        super().__init__()
        self._queue, self._value = queue, value

    def call(self, x: Any) -> Any:
        if self._queue is not None:
            self._queue.enqueue(self._value(x))
        return x


def data(rows: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(3)
    return rng.normal(size=(rows, 3)).astype("float32"), rng.normal(size=(rows, 2)).astype("float32")


def queues(count: int, watched: bool = True, replicas: int = 1, **options: Any) -> list[Any]:
    with strategy(replicas).scope():
        return [IPUOutfeedQueue(**options) if watched else None for _ in range(count)]


def made(seen: list[Any], replicas: int = 1, steps: int = 4, size: int = 1, optimizer: Any = "adam") -> keras.Model:
    """A model that enqueues its inputs and its hidden values. Accumulates `size` micro-batches."""
    keras.utils.set_random_seed(5)
    with strategy(replicas).scope():
        model = keras.Sequential(
            [
                keras.Input((3,)),
                Peek(seen[0], lambda x: {"x": x}),
                layers.Dense(5, "tanh"),
                layers.Dropout(0.2),
                Peek(seen[1]),
                layers.BatchNormalization(),
                layers.Dense(2),
            ]
        )
        model.compile(optimizer, "mse", steps_per_execution=steps)
        model.set_gradient_accumulation_options(size)
    return model


def fit(model: keras.Model, rows: int, epochs: int = 2, **options: Any) -> dict[str, Any]:
    settings = {"batch_size": BATCH, "epochs": epochs, "shuffle": False, "verbose": 0, **options}
    history: dict[str, Any] = model.fit(*data(rows), **settings).history
    return history


def batches(rows: int, replicas: int) -> np.ndarray:
    """The inputs of all steps for which every replica has a full batch: (steps, replicas, samples, 3)."""
    steps = rows // (BATCH * replicas)
    split = data(rows)[0][: steps * BATCH * replicas].reshape(steps, replicas, BATCH, 3)
    return split[:, 0] if replicas == 1 else split


@pytest.mark.parametrize(
    ("replicas", "size", "steps", "rows"),
    [(1, 1, 4, 32), (1, 1, 3, 30), (1, 3, 3, 22), (2, 1, 4, 32), (2, 2, 2, 46)],
    ids=["plain", "partial", "accumulation", "replicas", "all"],
)
def test_layers_in_fit(replicas: int, size: int, steps: int, rows: int) -> None:
    seen = queues(2, True, replicas)
    model, plain = (made(q, replicas, steps, size) for q in (seen, [None, None]))
    assert fit(model, rows) == fit(plain, rows)
    for watched, other in zip(model.get_weights(), plain.get_weights(), strict=True):
        np.testing.assert_array_equal(watched, other)
    np.testing.assert_array_equal(seen[0].dequeue()["x"], np.concatenate([batches(rows, replicas)] * 2))
    hidden = seen[1].dequeue()
    assert len(hidden) == 2 * len(batches(rows, replicas))
    assert hidden.shape[-2:] == (BATCH, 5)
    assert len({h.tobytes() for h in hidden}) == len(hidden), "every step has its own"


def test_hidden_values_are_those_of_the_step() -> None:
    [inputs, hidden] = queues(2)
    model = made([inputs, hidden], steps=2)
    model.layers[2].rate = 0.0
    expected = np.asarray(model.layers[1](data(4)[0]))
    fit(model, 8, epochs=1)
    np.testing.assert_allclose(hidden.dequeue()[0], expected, rtol=1e-5)
    assert inputs.dequeue()["x"].shape == (2, BATCH, 3)


@pytest.mark.parametrize("replicas", [1, 2])
def test_evaluate_and_predict(replicas: int) -> None:
    seen = queues(2, True, replicas)
    model, plain = made(seen, replicas, 2), made([None, None], replicas, 2)
    x, y = data(16)
    assert model.evaluate(x, y, batch_size=BATCH, verbose=0) == plain.evaluate(x, y, batch_size=BATCH, verbose=0)
    np.testing.assert_array_equal(seen[0].dequeue()["x"], batches(16, replicas))
    np.testing.assert_array_equal(
        model.predict(x, batch_size=BATCH, verbose=0), plain.predict(x, batch_size=BATCH, verbose=0)
    )
    np.testing.assert_array_equal(seen[0].dequeue()["x"], batches(16, replicas))
    model.train_on_batch(x[:BATCH], y[:BATCH])
    assert len(seen[0].dequeue()["x"]) == (replicas == 1), "one batch is on one replica only"


def test_a_smaller_last_batch_has_an_element_if_the_shapes_allow_it(caplog: pytest.LogCaptureFixture) -> None:
    [mean, largest] = queues(2)
    with strategy(1).scope():
        model = keras.Sequential([keras.Input((3,)), Peek(mean, ops.mean), Peek(largest), layers.Dense(2)])
        model.compile("sgd", "mse", steps_per_execution=8)
    x, y = data(10)
    model.evaluate(x, y, batch_size=BATCH, verbose=0)
    np.testing.assert_allclose(mean.dequeue(), [x[:4].mean(), x[4:8].mean(), x[8:].mean()], rtol=1e-5)
    assert largest.dequeue().shape == (2, BATCH, 3)
    assert "get no element from the last batches" in caplog.text


def test_the_latest_element() -> None:
    seen = queues(2, outfeed_mode=IPUOutfeedMode.LAST)
    fit(made(seen), 32)
    np.testing.assert_array_equal(seen[0].dequeue()["x"], batches(32, 1)[-1])


def test_recomputed_steps_enqueue_once() -> None:
    config = ipu.config.IPUConfig()
    config.auto_select_ipus, config.allow_recompute = [1, 2, 4, 8], True
    config.configure_ipu_system()
    try:
        seen = queues(2)
        model, plain = made(seen), made([None, None])
        assert fit(model, 32) == fit(plain, 32)
    finally:
        configure_all()
    assert len(seen[0].dequeue()["x"]) == 16


class Watched(keras.optimizers.SGD):
    """Enqueues the gradients of each update."""

    queue: Any = None

    def apply(self, grads: Any, trainable_variables: Any = None) -> Any:
        if self.queue is not None:
            self.queue.enqueue(tuple(grads))
        return super().apply(grads, trainable_variables)


@pytest.mark.parametrize("replicas", [1, 2])
def test_gradient_functions_and_optimizers(replicas: int) -> None:
    def train(each: Any, total: Any) -> list[np.ndarray]:
        def enqueue(gradient: Any, _weight: Any) -> Any:
            if each is not None:
                each.enqueue(gradient)
            return gradient

        keras.utils.set_random_seed(5)
        with strategy(replicas).scope():
            model = keras.Sequential([keras.Input((3,)), layers.Dense(2, use_bias=False)])
            optimizer = Watched(0.1)
            optimizer.queue = total
            model.compile(MapGradientOptimizer(optimizer, enqueue), "mse", steps_per_execution=8)
            model.set_gradient_accumulation_options(4)
        fit(model, 64 * replicas + 4 * replicas, epochs=1)  # the last update has one micro-batch
        weights: list[np.ndarray] = model.get_weights()
        return weights

    each, total = queues(2, True, replicas)
    np.testing.assert_array_equal(train(each, total), train(None, None))
    of_steps, [of_updates] = each.dequeue(), total.dequeue()
    assert (len(of_steps), len(of_updates)) == (17, 5)
    sums = of_steps[:16].reshape(4, 4, replicas, 3, 2).sum((1, 2))
    for replica in np.moveaxis(of_updates.reshape(5, replicas, 3, 2)[:4], 1, 0):
        np.testing.assert_allclose(replica, sums, rtol=1e-4, atol=1e-6)


class Reader(keras.callbacks.Callback):
    """Reads a queue after each batch."""

    def __init__(self, queue: Any) -> None:
        super().__init__()
        self.queue, self.seen, self.during = queue, list[Any](), 0

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        del batch, logs
        new = self.queue.dequeue()["x"]
        self.seen += list(new)
        self.during += len(new) if self.queue._buffer._running else 0


def test_asynchronous_callbacks_read_while_it_runs() -> None:
    seen = queues(2)
    model, reader = made(seen, steps=40), Reader(seen[0])
    model.set_asynchronous_callbacks(True)
    model.set_outfeed_queue_options(buffer_depth=1)  # so the program does not run far ahead of the callbacks
    fit(model, 160, callbacks=[reader])
    assert reader.during > 40, "read before the execution has ended"
    np.testing.assert_array_equal([*reader.seen, *seen[0].dequeue()["x"]], [*batches(160, 1)] * 2)


@pytest.mark.parametrize("replicas", [1, 2])
def test_another_thread_reads_while_it_runs(replicas: int) -> None:
    seen, ended, read = queues(2, True, replicas), threading.Event(), list[Any]()

    def follow() -> None:
        while not ended.is_set():
            read.extend(element["x"] for element in seen[0])

    reader = threading.Thread(target=follow)
    reader.start()
    fit(made(seen, replicas, 20), 80 * replicas)
    ended.set()
    reader.join()
    read.extend(element["x"] for element in seen[0])
    np.testing.assert_array_equal(read, [*batches(80 * replicas, replicas)] * 2)


# --- pipelines -------------------------------------------------------------------------------------------------------


def staged(seen: list[Any], replicas: int, optimizer: Any = "adam", **options: Any) -> keras.Model:
    keras.utils.set_random_seed(5)
    with strategy(2 * replicas).scope():
        x = inputs = keras.Input((3,))
        with ipu.keras.PipelineStage(0):
            x = layers.Dense(5, "tanh")(Peek(seen[0], lambda x: {"x": x})(x))
        with ipu.keras.PipelineStage(1):
            x = layers.Dense(2)(Peek(seen[1])(x))
        model = keras.Model(inputs, x)
        model.compile(optimizer, "mse", steps_per_execution=4)
        model.set_pipelining_options(gradient_accumulation_steps_per_replica=4, **options)
    return model


@pytest.mark.parametrize(
    ("replicas", "rows", "schedule"),
    [pytest.param(1, 40, "Grouped", marks=pytest.mark.slow), (2, 78, "Interleaved")],
    ids=["one", "two"],
)
def test_layers_in_stages(replicas: int, rows: int, schedule: str) -> None:
    seen = queues(2, True, 2 * replicas)
    model, plain = (staged(q, replicas, pipeline_schedule=schedule) for q in (seen, [None, None]))
    assert fit(model, rows) == fit(plain, rows)
    for watched, other in zip(model.get_weights(), plain.get_weights(), strict=True):
        np.testing.assert_array_equal(watched, other)
    np.testing.assert_array_equal(seen[0].dequeue()["x"], np.concatenate([batches(rows, replicas)] * 2))
    hidden = seen[1].dequeue()
    assert len(hidden) == 2 * len(batches(rows, replicas))
    x, y = data(16 * replicas)
    np.testing.assert_array_equal(
        model.predict(x, batch_size=BATCH, verbose=0), plain.predict(x, batch_size=BATCH, verbose=0)
    )
    np.testing.assert_array_equal(seen[0].dequeue()["x"], batches(16 * replicas, replicas))
    model.evaluate(x, y, batch_size=BATCH, verbose=0)
    np.testing.assert_array_equal(seen[0].dequeue()["x"], batches(16 * replicas, replicas))


def test_stages_with_asynchronous_callbacks() -> None:
    seen = queues(2, True, 2)
    model, reader = staged(seen, 1), Reader(seen[0])
    model.set_asynchronous_callbacks(True)
    fit(model, 64, callbacks=[reader])
    np.testing.assert_array_equal([*reader.seen, *seen[0].dequeue()["x"]], [*batches(64, 1)] * 2)


@pytest.mark.parametrize("replicas", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_the_optimizer_of_a_pipeline(replicas: int) -> None:
    """It enqueues all gradients of each update, as it does without stages."""
    [of_stages], [of_one] = queues(1, True, 2 * replicas), queues(1, True, replicas)

    def trained(make: Any, queue: Any) -> keras.Model:
        optimizer = Watched(0.1)
        optimizer.queue = queue
        model = make(optimizer)
        fit(model, 64 * replicas + 8 * replicas, epochs=1)
        return model

    in_stages = trained(lambda optimizer: staged([None, None], replicas, optimizer), of_stages)
    plain = trained(lambda optimizer: staged([None, None], replicas, optimizer), None)
    for watched, other in zip(in_stages.get_weights(), plain.get_weights(), strict=True):
        np.testing.assert_array_equal(watched, other)

    def together(optimizer: Any) -> keras.Model:
        keras.utils.set_random_seed(5)
        with strategy(replicas).scope():
            model = keras.Sequential([keras.Input((3,)), layers.Dense(5, "tanh"), layers.Dense(2)])
            model.compile(optimizer, "mse", steps_per_execution=4)
            model.set_gradient_accumulation_options(4)
        return model

    trained(together, of_one)
    found, expected = of_stages.dequeue(), of_one.dequeue()
    assert len(found) == 4
    assert len(found[0]) == 5, "four whole updates and the rest"
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


def test_optimizers_and_gradient_functions_that_see_only_a_part_are_refused() -> None:
    none, [queue] = [None, None], queues(1, True, 2)

    def enqueue(gradient: Any, _weight: Any) -> Any:
        queue.enqueue(gradient)
        return gradient

    with pytest.raises(RuntimeError, match="gradient function enqueues into an outfeed queue, but the model is"):
        fit(staged(none, 1, MapGradientOptimizer("sgd", enqueue)), 64)
    optimizer = Watched(0.1)
    optimizer.queue = queue
    model = made(none, 2, optimizer=optimizer)
    model.set_gradient_accumulation_options(1, replicated_optimizer_state_sharding=True)
    with pytest.raises(RuntimeError, match="its state is divided over replicas"):
        fit(model, 32)


# --- errors ----------------------------------------------------------------------------------------------------------


def one(layer: layers.Layer) -> keras.Model:
    with strategy(1).scope():
        model = keras.Sequential([keras.Input((3,)), layer, layers.Dense(2)])
        model.compile("sgd", "mse")
    return model


@pytest.fixture
def queue() -> Iterator[Any]:
    [queue] = queues(1)
    return queue


def test_the_same_queue_in_two_layers(queue: Any) -> None:
    with pytest.raises(ValueError, match="into the same outfeed queue twice"):
        fit(made([queue, queue]), 8)
    with pytest.raises(ValueError, match="into the same outfeed queue twice"):
        fit(staged([queue, queue], 1), 64)


def test_the_same_queue_in_a_layer_and_the_optimizer(queue: Any) -> None:
    def make(optimizer: Any, stages: bool) -> keras.Model:
        optimizer.queue = queue
        return staged([queue, None], 1, optimizer) if stages else made([queue, None], optimizer=optimizer)

    for stages in (False, True):
        with pytest.raises(ValueError, match="into the same outfeed queue twice"):
            fit(make(Watched(0.1), stages), 64)


def test_operations_are_counted_without_outfeeds(queue: Any) -> None:
    other = queues(1)[0]
    for model in (made([queue, other]), staged([queue, other], 1)):
        fit(model, 64, epochs=1)
        for outfeed in (queue, other):
            outfeed.dequeue()
        for program in model.train_function.loop.programs.values():
            assert program.operations().operations > 0


def test_inside_a_loop_of_jax(queue: Any) -> None:
    class Scan(layers.Layer):
        def call(self, x: Any) -> Any:
            return jax.lax.map(lambda row: (queue.enqueue(row), row)[1], x)

    with pytest.raises(RuntimeError, match="where the element would be lost"):
        fit(one(Scan()), 8)


def test_symbolic_tensors(queue: Any) -> None:
    with pytest.raises(TypeError, match="Enqueue in the `call` of a layer"):
        queue.enqueue(keras.Input((3,)))


def test_the_call_of_a_model(queue: Any) -> None:
    class Own(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = layers.Dense(3), layers.Dense(2)

        def call(self, x: Any) -> Any:
            queue.enqueue(x)
            return self.second(self.first(x))

    with strategy(1).scope():
        model = Own()
        model.compile("sgd", "mse", steps_per_execution=2)
    fit(model, 16)
    np.testing.assert_array_equal(queue.dequeue(), [*batches(16, 1)] * 2)
    with pytest.raises(ValueError, match="Enqueue in the `call` of a layer"):  # stages hold layers, not `call`
        model.get_pipeline_stage_assignment()


def test_outside_of_programs(queue: Any) -> None:
    layer = Peek(queue)
    with pytest.raises(RuntimeError, match="a layer of a model of the strategy"):
        layer(np.ones((2, 3), "float32"))


def test_waiting_for_the_end_in_a_callback(queue: Any) -> None:
    model = one(Peek(queue))
    model.set_asynchronous_callbacks(True)

    class Wait(keras.callbacks.Callback):
        def on_train_batch_end(self, *_: Any, **__: Any) -> None:
            queue.dequeue(wait_for_completion=True)

    with pytest.raises(RuntimeError, match="was called in a callback while the execution runs"):
        fit(model, 16, callbacks=[Wait()])


def test_validation_data_is_left_out_on_request(queue: Any) -> None:
    class Training(Peek):
        def call(self, x: Any, training: bool = False) -> Any:
            return super().call(x) if training else x

    model = one(Training(queue))
    fit(model, 16, validation_data=data(4), epochs=1)
    np.testing.assert_array_equal(queue.dequeue(), batches(16, 1))


def test_other_shapes_than_those_that_wait(queue: Any) -> None:
    model = one(Peek(queue))
    x, y = data(8)
    model.evaluate(x, y, batch_size=4, verbose=0)
    before = model.get_weights()
    with pytest.raises(ValueError, match=r"2 elements of .* that were not read"):
        model.fit(x, y, batch_size=8, verbose=0)
    for a, b in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(a, b)
    assert queue.dequeue().shape == (2, 4, 3)
    model.fit(x, y, batch_size=8, verbose=0)
    assert queue.dequeue().shape == (1, 8, 3)
