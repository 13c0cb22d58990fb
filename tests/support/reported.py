"""A script for tests of reports: trains for a while, and ends as it is told: by itself, by an error, or never."""

import sys
import time

import openipu as ipu
from openipu.engine.facts import watcher

import keras
import numpy as np

watcher.EVERY = 0.1


class Ending(keras.callbacks.Callback):
    """Ends the training after two epochs, or lets it go on for a minute."""

    def on_epoch_end(self, epoch: int, logs: object = None) -> None:
        del logs
        if epoch == 1:
            print("trained", flush=True)
            if sys.argv[1] == "error":
                raise RuntimeError("no more")
            if sys.argv[1] == "wait":
                time.sleep(60)


config = ipu.config.IPUConfig()
config.auto_select_ipus = 1
config.configure_ipu_system()
with ipu.ipu_strategy.IPUStrategy().scope():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)], name="net")
    model.compile("sgd", "mse", steps_per_execution=2)
x = np.ones((32, 4), "float32")
model.fit(x, x[:, :1], batch_size=8, epochs=3, verbose=0, callbacks=[Ending()])
