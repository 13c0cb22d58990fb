"""A script for several instances: callbacks that do something in one of them only.

    python tests/support/instance_callbacks.py FOLDER DEVICES SHARD CASE...

What each instance ends with goes to FOLDER/CASE-SHARD-INSTANCE.npz.
"""

import sys
from pathlib import Path
from typing import Any

import openipu as ipu
from openipu import popdist

import keras
import numpy as np

import instances


class Looks(keras.callbacks.Callback):
    """Reads the weights in instance 0, after each execution."""

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        del batch, logs
        if popdist.getInstanceIndex() == 0:
            self.model.get_weights()


class StopsPredicting(keras.callbacks.Callback):
    """Stops in the last instance."""

    def on_predict_batch_end(self, batch: int, logs: Any = None) -> None:
        del batch, logs
        self.model.stop_predicting = is_last()


def is_last() -> bool:
    return popdist.getInstanceIndex() + 1 == popdist.getNumInstances()


def trained(case: str, shard: str, callbacks: list[keras.callbacks.Callback], stops: bool = False) -> Any:
    """A model after two epochs, which the last instance may stop."""
    keras.utils.set_random_seed(1)
    model = instances.make(case, shard)

    def stop(batch: int, logs: Any) -> None:
        del logs
        model.stop_training = is_last() and batch > 20

    if stops:
        callbacks = [keras.callbacks.LambdaCallback(on_train_batch_end=stop)]
    x, y = instances.data(200, 0 if shard == "auto" else popdist.getInstanceIndex())
    model.fit(x, y, instances.BATCH, epochs=2, verbose=0, shuffle=False, callbacks=callbacks)
    return model


def results(case: str, shard: str, folder: Path) -> dict[str, Any]:
    saves = keras.callbacks.ModelCheckpoint(folder / f"{case}.weights.h5", save_freq=3, save_weights_only=True)
    plain, watched = trained(case, shard, []), trained(case, shard, [saves, Looks()])
    weights = {
        f"{name} {i}": w for name, m in (("plain", plain), ("watched", watched)) for i, w in enumerate(m.weights)
    }
    if case == "plain":  # instance 0 alone has it
        logged = trained(case, shard, [keras.callbacks.TensorBoard(folder / "events")])
        weights |= {f"logged {i}": w for i, w in enumerate(logged.weights)}
    stopped = trained(case, shard, [], stops=True).history
    outputs = plain.predict(instances.data(50)[0], instances.BATCH, verbose=0, callbacks=[StopsPredicting()])
    return weights | {"epochs": len(stopped.epoch), "count": stopped.history["count"], "predicted": len(outputs)}


def main(folder: str, devices: int, shard: str, *cases: str) -> None:
    config = ipu.config.IPUConfig()
    config.auto_select_ipus = devices
    config.configure_ipu_system()
    for case in cases:
        path = Path(folder) / f"{case}-{shard}-{popdist.getInstanceIndex()}.npz"
        np.savez(path, **results(case, shard, Path(folder)))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), *sys.argv[3:])
