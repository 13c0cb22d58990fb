"""A script for several instances: programs with feeds, a pipeline of functions, asynchronous callbacks.

    python tests/support/instance_programs.py FOLDER DEVICES SHARD CASE...

SHARD is "auto" or "off" for instances of `openipu launch`, or "one" for a single process with as many devices. What
each instance ends with goes to FOLDER/CASE-SHARD-INSTANCE.npz.
"""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openipu as ipu
from openipu import popdist

import keras
import numpy as np

import instances

ELEMENTS = 16
"""Elements of the dataset, over all replicas."""


def elements(shard: str, steps: int) -> Iterator[np.ndarray]:
    """Those of this instance: with "off", each has what its own replicas take in so many steps."""
    for number in range(ELEMENTS):
        if shard != "off" or is_own(number, ELEMENTS // steps):
            yield np.full((2,), number, np.float32)


def is_own(number: int, replicas: int) -> bool:
    """Whether the batch with this number goes to a replica of this instance."""
    return number % replicas * popdist.getNumInstances() // replicas == popdist.getInstanceIndex()


def repeated(shard: str, steps: int) -> dict[str, Any]:
    """A loop whose elements are sent ahead."""
    with instances.strategy(shard).scope() as strategy:
        infeed = ipu.ipu_infeed_queue.IPUInfeedQueue(lambda: elements(shard, steps))
        outfeed = ipu.ipu_outfeed_queue.IPUOutfeedQueue()

        def body(total: Any, x: Any) -> Any:
            outfeed.enqueue({"x": x, "total": total})
            return total + x

        def program() -> Any:
            total = ipu.loops.repeat(steps, body, [np.zeros(2, np.float32)], infeed)
            return ipu.cross_replica_ops.cross_replica_sum(total)

        total = strategy.run(program)
    return {"sum": total, **outfeed.dequeue()}


def fetched(shard: str, steps: int) -> dict[str, Any]:
    """Two loops whose elements are fetched while they run; the second one goes on where the first one has ended."""
    with instances.strategy(shard).scope() as strategy:
        infeed = ipu.ipu_infeed_queue.IPUInfeedQueue(lambda: elements(shard, steps), prefetch_depth=2)
        outfeed = ipu.ipu_outfeed_queue.IPUOutfeedQueue()
        latest = ipu.ipu_outfeed_queue.IPUOutfeedQueue(ipu.ipu_outfeed_queue.IPUOutfeedMode.LAST)

        def body(count: Any, x: Any) -> Any:
            return count + 1, outfeed.enqueue(x), latest.enqueue(x)

        def program(most: Any) -> Any:
            return ipu.loops.while_loop(lambda count: count < most, body, [np.int32(0)], infeed)

        for most in (1, steps - 1):
            strategy.run(program, [np.int32(most)])
    return {"x": outfeed.dequeue(), "latest": latest.dequeue()}


def staged(shard: str, steps: int) -> dict[str, Any]:
    """A pipeline of functions."""
    keras.utils.set_random_seed(3 + popdist.getInstanceIndex())
    with instances.strategy(shard).scope() as strategy:
        first, second = keras.layers.Dense(4), keras.layers.Dense(1)
        first.build((None, 2)), second.build((None, 4))
        infeed = ipu.ipu_infeed_queue.IPUInfeedQueue(lambda: (e[None] / ELEMENTS for e in elements(shard, steps)))
        outfeed = ipu.ipu_outfeed_queue.IPUOutfeedQueue()
        optimizer = keras.optimizers.SGD(0.1 if shard != "one" else 0.05)  # 2 replicas, summed over

        def program() -> Any:
            return ipu.pipelining_ops.pipeline(
                [first, lambda x: keras.ops.mean(second(x) ** 2)],
                gradient_accumulation_count=steps,
                infeed_queue=infeed,
                outfeed_queue=outfeed,
                optimizer_function=lambda loss: ipu.pipelining_ops.OptimizerFunctionOutput(optimizer, loss),
                outfeed_loss=True,
                reduction_method="mean",
            )

        strategy.run(program)
    weights = {f"weight {i}": np.asarray(v.value) for i, v in enumerate([*first.weights, *second.weights])}
    return {"loss by step": outfeed.dequeue(), **weights}


def live(shard: str, steps: int) -> dict[str, Any]:
    """A fit with asynchronous callbacks: every instance hears of every step."""
    keras.utils.set_random_seed(3 + popdist.getInstanceIndex())
    heard: list[tuple[int, float]] = []

    class Hears(keras.callbacks.Callback):
        async_safe = True

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            heard.append((batch, float(logs["loss"])))

    model = instances.make("plain", shard)
    model.set_asynchronous_callbacks(True)
    x, y = own_data(shard, steps)
    history = model.fit(x, y, instances.BATCH, epochs=2, shuffle=False, verbose=0, callbacks=[Hears()]).history
    weights = {f"weight {i}": w for i, w in enumerate(model.get_weights())}
    return {"heard": np.array(heard), "loss": np.array(history["loss"]), **weights}


def own_data(shard: str, steps: int) -> tuple[np.ndarray, np.ndarray]:
    """The samples of this instance: with "off", the batches that go to its own replicas."""
    x, y = instances.data(64)
    if shard == "off":
        x, y = (a.reshape(-1, instances.BATCH, *a.shape[1:]) for a in (x, y))
        mine = [number for number in range(len(x)) if is_own(number, ELEMENTS // steps)]
        x, y = (a[mine].reshape(-1, *a.shape[2:]) for a in (x, y))
    return x, y


def watched(shard: str, steps: int) -> dict[str, Any]:
    """A fit in which a layer enqueues its input."""
    keras.utils.set_random_seed(3)
    with instances.strategy(shard).scope():
        outfeed = ipu.ipu_outfeed_queue.IPUOutfeedQueue()

        class Peek(keras.layers.Layer):
            def call(self, x: Any) -> Any:
                outfeed.enqueue(x)
                return x

        x, y = own_data(shard, steps)
        model = keras.Sequential([keras.Input(x.shape[1:]), Peek(), keras.layers.Dense(3, "softmax")])
        model.compile("sgd", "sparse_categorical_crossentropy", steps_per_execution=2)
    model.fit(x, y, instances.BATCH, epochs=2, shuffle=False, verbose=0)
    return {"x": outfeed.dequeue()}


def short(shard: str, steps: int) -> dict[str, Any]:
    """A loop for which instance 1 has too little data."""
    del steps
    with instances.strategy(shard).scope() as strategy:
        infeed = ipu.ipu_infeed_queue.IPUInfeedQueue([np.zeros(1, np.float32)] * (3 - popdist.getInstanceIndex()))
        try:
            strategy.run(lambda: ipu.loops.repeat(3, lambda total, x: total + x, [np.zeros(1, np.float32)], infeed))
        except ipu.errors.OutOfRangeError as error:
            print(error)
    return {}


CASES = {"repeated": repeated, "fetched": fetched, "staged": staged, "live": live, "watched": watched}


def own_replicas(replicas: int) -> np.ndarray:
    """The replicas that have devices in this instance. Two stages may be in two instances."""
    first, count = popdist.getInstanceIndex(), popdist.getNumInstances()
    return np.arange(first * replicas // count, ((first + 1) * replicas - 1) // count + 1)


def main(folder: str, devices: int, shard: str, *cases: str) -> None:
    config = ipu.config.IPUConfig()
    config.auto_select_ipus = devices
    config.configure_ipu_system()
    for case in cases:
        replicas = (devices * popdist.getNumInstances()) // (2 if case == "staged" else 1)
        values = {"short": short, **CASES}[case](shard, ELEMENTS // replicas)
        values["own"] = own_replicas(replicas)
        np.savez(Path(folder) / f"{case}-{shard}-{popdist.getInstanceIndex()}.npz", **values)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), *sys.argv[3:])
