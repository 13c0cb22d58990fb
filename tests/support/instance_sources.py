"""A script for several instances: models and data sources of many kinds.

    python tests/support/instance_sources.py FOLDER DEVICES SHARD CASE...

What each instance ends with goes to FOLDER/CASE-SHARD-INSTANCE.npz.
"""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openipu as ipu
from openipu import popdist

import keras
import numpy as np
from keras import layers

import instances

BATCH = 4
RNG = np.random.default_rng(0)
X, Y, Z = RNG.random((43, 6), np.float32), RNG.integers(0, 3, 43), RNG.random((43, 1), np.float32)
LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def compiled(model: Any, optimizer: Callable[[Any], Any] = lambda inner: inner, loss: Any = LOSS) -> Any:
    # Gradients are averaged over the replicas of instances, and summed over those of a single process.
    rate = 0.05 / (2 if sys.argv[3] == "one" else 1)
    model.compile(optimizer(keras.optimizers.SGD(rate)), loss, steps_per_execution=4)
    return model


def sequential(*hidden: Any) -> Any:
    with instances.strategy(sys.argv[3]).scope():
        return compiled(keras.Sequential([keras.Input((6,)), *hidden, layers.Dense(3)]))


def dictionaries() -> Any:
    """Inputs, outputs and weights of samples by name, and a part of the data to validate on."""
    with instances.strategy(sys.argv[3]).scope():
        a, b = keras.Input((6,), name="a"), keras.Input((1,), name="b")
        hidden = layers.Dense(4, "relu")(layers.Concatenate()([a, b]))
        outputs = {"p": layers.Dense(3, name="p")(hidden), "q": layers.Dense(1, name="q")(hidden)}
        model = compiled(keras.Model({"a": a, "b": b}, outputs), loss={"p": LOSS, "q": "mse"})
    weights = {"p": Z[:, 0], "q": 1 - Z[:, 0]}
    data = {"a": X, "b": Z}, {"p": Y, "q": Z}
    model.fit(*data, BATCH, epochs=2, verbose=0, validation_split=0.3, sample_weight=weights)
    return model


def normalised() -> Any:
    model = sequential(layers.Dense(8), layers.BatchNormalization(), layers.ReLU(), layers.Dropout(0.3))
    model.fit(X[:40], Y[:40], BATCH, epochs=2, verbose=0, class_weight={0: 1.0, 1: 3.0, 2: 0.5})
    return model


def scaled() -> Any:
    """Half precision, with a loss scale that grows and shrinks."""
    with instances.strategy(sys.argv[3]).scope():
        model = keras.Sequential([keras.Input((6,)), layers.Dense(8, "relu", dtype="mixed_float16"), layers.Dense(3)])
    compiled(model, lambda inner: keras.optimizers.LossScaleOptimizer(inner, 2.0**17, dynamic_growth_steps=3))
    model.fit(X, Y, BATCH, epochs=2, verbose=0)
    return model


def terminated() -> Any:
    """A loss that is not a number ends all of them after the same execution."""
    model = sequential()
    rows = np.where(np.arange(43)[:, None] == 21, np.nan, X)
    model.fit(rows, Y, BATCH, 3, verbose=0, shuffle=False, callbacks=[keras.callbacks.TerminateOnNaN()])
    return model


def generator() -> Any:
    def batches() -> Iterator[tuple[np.ndarray, np.ndarray]]:
        while True:
            yield from ((X[k : k + BATCH], Y[k : k + BATCH]) for k in range(0, 40, BATCH))

    model = sequential()
    model.fit(batches(), steps_per_epoch=7, epochs=2, verbose=0)
    return model


class Batches(keras.utils.PyDataset):
    """The last batch is smaller."""

    def __len__(self) -> int:
        return 11

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        rows = slice(BATCH * index, BATCH * (index + 1))
        return X[rows], Y[rows]


def dataset() -> Any:
    model = sequential()
    model.fit(Batches(workers=2), epochs=2, verbose=0, shuffle=True, validation_data=Batches())
    return model


CASES = {make.__name__: make for make in (dictionaries, normalised, scaled, terminated, generator, dataset)}


def main(folder: str, devices: int, shard: str, *cases: str) -> None:
    config = ipu.config.IPUConfig()
    config.auto_select_ipus = devices
    config.configure_ipu_system()
    for case in cases:
        keras.utils.set_random_seed(1)
        model = CASES[case]()
        logs = {f"history {name}": np.asarray(row) for name, row in model.history.history.items()}
        weights = {f"weight {i}": w for i, w in enumerate(model.get_weights())}
        np.savez(Path(folder) / f"{case}-{shard}-{popdist.getInstanceIndex()}.npz", **logs, **weights)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), *sys.argv[3:])
