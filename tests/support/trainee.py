"""A training run to be killed: prints when it begins and, when it ends, the digest of all it ended with.

python tests/support/trainee.py FOLDER
"""

import hashlib
import sys

import openipu as ipu

import keras
import numpy as np


class Begun(keras.callbacks.Callback):
    """Says when training is under way."""

    def on_epoch_begin(self, epoch: int, logs: object = None) -> None:  # noqa: ARG002
        print(f"epoch {epoch}", flush=True)


def main(folder: str) -> None:
    np.random.seed(5)
    rng = np.random.default_rng(0)
    x, y = rng.random((2003, 16), np.float32), rng.integers(0, 4, 2003)
    with ipu.ipu_strategy.IPUStrategy().scope():
        model = keras.Sequential([keras.Input((16,))])
        model.add(keras.layers.Dense(64, "relu", kernel_initializer=keras.initializers.GlorotUniform(seed=1)))
        model.add(keras.layers.Dropout(0.2, seed=2))
        model.add(keras.layers.Dense(4, kernel_initializer=keras.initializers.GlorotUniform(seed=3)))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("adam", loss, metrics=["accuracy"], steps_per_execution=50)
    checkpoint = ipu.callbacks.Checkpoint(folder, keep=2, max_share=1)
    history = model.fit(x, y, batch_size=8, epochs=90, verbose=0, callbacks=[checkpoint, Begun()])
    digest = hashlib.sha256(repr(history.history).encode())
    for variable in [*model.weights, *model.optimizer.variables]:
        digest.update(np.ascontiguousarray(variable.value).tobytes())
    print(f"ended {digest.hexdigest()}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
