"""A script for several instances: trains models and saves what they end with.

    python tests/support/instances.py FOLDER DEVICES SHARD CASE...

SHARD is "auto" or "off" for instances of `openipu launch`, or "one" for a single process with as many devices.
"""

import os
import sys
from pathlib import Path
from typing import Any

import openipu as ipu
from openipu import popdist
from openipu.engine.devices import program_cache

import keras
import numpy as np

BATCH, FEATURES = 4, 8
SIZES = (42, 61)
"""Rows of each of two instances that have data of their own."""
FEW = (BATCH, 3 * BATCH)
"""Rows that are not enough for all replicas in each step."""


def strategy(shard: str) -> ipu.ipu_strategy.IPUStrategy:
    if shard == "one":
        return ipu.ipu_strategy.IPUStrategy()
    return ipu.distributed.popdist_strategy.PopDistStrategy(shard=shard)


@keras.saving.register_keras_serializable("tests")
class Counted(keras.metrics.Metric):
    """How many samples were seen."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.count = self.add_weight(name="count", initializer="zeros")

    def update_state(self, y: Any, outputs: Any, sample_weight: Any = None) -> None:
        del outputs, sample_weight
        self.count.assign_add(keras.ops.cast(keras.ops.shape(y)[0], "float32"))

    def result(self) -> Any:
        return self.count + 0


def make(case: str, shard: str) -> Any:
    with strategy(shard).scope():
        model = keras.Sequential([
            keras.Input((FEATURES,)), keras.layers.Dense(16, "relu"), keras.layers.Dropout(0.2), keras.layers.Dense(3),
        ])  # fmt: skip
        if case == "accumulated":
            model.set_gradient_accumulation_options(3, "mean")
        if case == "sharded":
            model.set_gradient_accumulation_options(2, "mean", replicated_optimizer_state_sharding=True)
        if case == "pipeline":
            model.set_pipeline_stage_assignment([0, 0, 1])
            model.set_pipelining_options(gradient_accumulation_steps_per_replica=4)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    # Gradients are averaged over the replicas of instances, and summed over those of a single process.
    rate = 0.05 if shard != "one" else 0.05 / (2 if case == "pipeline" else 4)
    model.compile(
        keras.optimizers.SGD(rate),
        loss,
        metrics=["accuracy", Counted(name="count")],
        steps_per_execution=2 if case == "plain" else 12,
    )
    return model


def data(rows: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    return rng.random((rows, FEATURES), np.float32), rng.integers(0, 3, rows)


def train(case: str, shard: str, folder: Path) -> dict[str, Any]:
    """What a case ends with."""
    keras.utils.set_random_seed(1 + popdist.getInstanceIndex())  # instance 0's weights are those of all
    model = make(case, shard)
    x, y = data(103) if shard != "off" else data(SIZES[popdist.getInstanceIndex()], popdist.getInstanceIndex())
    callbacks = [keras.callbacks.CSVLogger(folder / f"{case}-{popdist.getInstanceIndex()}.csv"), StopsAlone()]
    history = model.fit(x, y, BATCH, epochs=3, verbose=2, validation_data=(x[:30], y[:30]), callbacks=callbacks).history
    evaluated = model.evaluate(x, y, BATCH, verbose=0, return_dict=True)
    outputs = model.predict(x, BATCH, verbose=0)
    few = [model.evaluate(x[:n], y[:n], BATCH, verbose=0, return_dict=True)["count"] for n in FEW]
    values = {f"history {name}": np.asarray(row) for name, row in history.items()}
    values |= {f"evaluated {name}": np.asarray(value) for name, value in evaluated.items()}
    weights = {f"weight {i}": w for i, w in enumerate(model.get_weights())}
    return values | {"outputs": outputs, "few": np.array(few)} | weights


class StopsAlone(keras.callbacks.Callback):
    """Ends the last epoch early in the last instance only, and in a single process."""

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        del logs
        last = popdist.getInstanceIndex() + 1 == popdist.getNumInstances()
        self.model.stop_training = last and self.epoch == 2 and batch > 12

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        del logs
        self.epoch = epoch


def main(folder: str, devices: int, shard: str, *cases: str) -> None:
    config = ipu.config.IPUConfig()
    config.auto_select_ipus = devices
    config.configure_ipu_system()
    for case in cases:
        values = train(case, shard, Path(folder))
        np.savez(Path(folder) / f"{case}-{shard}-{popdist.getInstanceIndex()}.npz", **values)
    print("programs from the cache:", program_cache.hits())


if __name__ == "__main__":
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    main(sys.argv[1], int(sys.argv[2]), *sys.argv[3:])
