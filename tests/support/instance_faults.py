"""Instances that go wrong, or that train until somebody kills one of them.

python tests/support/instance_faults.py WHAT [FOLDER [EPOCHS]]
"""

import hashlib
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

if sys.argv[1:] == ["never comes"] and os.environ["OPENIPU_INSTANCE"] == "1":
    time.sleep(60)

import openipu as ipu
from openipu import popdist
from openipu.engine.devices import standing

import keras
import numpy as np


def strategy(devices: int = 1) -> ipu.distributed.popdist_strategy.PopDistStrategy:
    config = ipu.config.IPUConfig()
    config.auto_select_ipus = devices
    config.configure_ipu_system()
    return ipu.distributed.popdist_strategy.PopDistStrategy(shard="auto")


class Begun(keras.callbacks.Callback):
    """Says when training is under way, and may fail."""

    def __init__(self, fails: bool) -> None:
        super().__init__()
        self._fails = fails

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        del logs
        print(f"epoch {epoch}", flush=True)
        if self._fails and epoch == 1:
            raise ZeroDivisionError("on purpose")


def data(rows: int = 403, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    return rng.random((rows, 16), np.float32), rng.integers(0, 4, rows)


def batches(fails: bool) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    for number in range(40):
        if fails and number == 30:
            raise ZeroDivisionError("a bad batch")
        yield data(8)


class Looks(keras.callbacks.Callback):
    """Reads the optimizer's state after the first batches of each execution."""

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        del logs
        if batch % 20 < 2:
            [np.asarray(variable.value) for variable in self.model.optimizer.variables]


def by_signal(act: Callable[[], object]) -> None:
    """Do something in the last instance, in a handler of a signal, when some more programs have been launched."""
    before = standing.here().launched

    def handle(*_: object) -> None:
        if standing.here().launched > before + 5:
            signal.setitimer(signal.ITIMER_REAL, 0)
            act()

    if is_last():
        signal.signal(signal.SIGALRM, handle)
        signal.setitimer(signal.ITIMER_REAL, 0.1, 0.1)


def is_last() -> bool:
    return popdist.getInstanceIndex() == popdist.getNumInstances() - 1


def long_epoch() -> None:
    """An epoch that lasts for minutes unless a signal ends it, without any callback that could do so."""
    with strategy().scope():
        model = keras.Sequential([keras.Input((16,)), keras.layers.Dense(4)])
    model.compile("sgd", "sparse_categorical_crossentropy", steps_per_execution=10)
    x, y = data(400_000)
    model.fit(x, y, 1, steps_per_epoch=40, verbose=0)  # so that nothing is left to compile
    if sys.argv[1] == "exits in an epoch":
        by_signal(lambda: sys.exit(0))
    else:
        by_signal(lambda: setattr(model, "stop_training", True))
    model.fit(x, y, 1, verbose=0)
    digest = hashlib.sha256(b"".join(np.asarray(weight.value).tobytes() for weight in model.weights))
    steps = int(model.optimizer.iterations)
    assert steps < len(x) // 4, "the signal came too late"
    print(f"ended {steps} {digest.hexdigest()}", flush=True)


def look() -> None:
    """Callbacks of the last instance look at a model in parts, while an execution of two programs runs."""
    with strategy().scope():
        model = keras.Sequential([keras.Input((16,)), keras.layers.Dense(8, "relu"), keras.layers.Dense(4)])
        model.set_gradient_accumulation_options(3, "mean", replicated_optimizer_state_sharding=True)
        model.set_asynchronous_callbacks(True)
    model.compile("adam", "sparse_categorical_crossentropy", steps_per_execution=9)
    model.fit(*data(), 8, epochs=2, verbose=0, callbacks=[Looks()] if is_last() else None)
    print("ended", flush=True)


def train(folder: str | None, fails: bool = False, epochs: int = 60, width: int = 64, source: Any = None) -> None:
    keras.utils.set_random_seed(5)
    x, y, batch = (*(source or data()), 8) if source is None or isinstance(source, tuple) else (source, None, None)
    with strategy().scope():
        model = keras.Sequential([keras.Input((16,)), keras.layers.Dense(width, "relu"), keras.layers.Dropout(0.2)])
        model.add(keras.layers.Dense(4))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("adam", loss, metrics=["accuracy"], steps_per_execution=10)
    saved = [ipu.callbacks.Checkpoint(folder, keep=2, max_share=1)] if folder else []
    history = model.fit(x, y, batch, epochs=epochs, verbose=0, callbacks=[*saved, Begun(fails)])
    digest = hashlib.sha256(repr(history.history).encode())
    for variable in [*model.weights, *model.optimizer.variables]:
        digest.update(np.ascontiguousarray(variable.value).tobytes())
    print(f"ended {digest.hexdigest()}", flush=True)


def main(what: str, folder: str | None = None, epochs: str = "60") -> None:
    last = is_last()
    if what == "raises":
        train(None, fails=last)
    elif what == "differs":
        with strategy(1 + last).scope():
            pass
    elif what == "other model":
        train(None, width=64 + last)
    elif what == "other calls":
        popdist_ops = ipu.distributed
        popdist_ops.allreduce(np.ones(2)) if last else popdist_ops.broadcast(np.ones(2))
    elif what == "other data":
        train(None, source=data(seed=int(last)))
    elif what == "more data":
        train(None, source=data(403 + 40 * last))
    elif what == "bad batch":
        train(None, source=batches(last))
    elif what == "exits":
        train(None, epochs=1)
        if last:
            sys.exit(3)
        train(None, epochs=1)
    elif what in ("exits in an epoch", "stops in an epoch"):
        long_epoch()
    elif what == "looks":
        look()
    elif what == "leaves":
        train(None, epochs=1)
        if not last:
            train(None, epochs=1)
    else:
        train(folder, epochs=int(epochs))


if __name__ == "__main__":
    main(*sys.argv[1:])
