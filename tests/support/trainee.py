"""A training run to be killed: prints when it begins and, when it ends, the digest of all it ended with.

python tests/support/trainee.py FOLDER [plain|replicas|pipeline|asynchronous]
"""

import hashlib
import sys

import openipu as ipu

import keras
import numpy as np

KINDS = ("plain", "replicas", "pipeline", "asynchronous")


class Begun(keras.callbacks.Callback):
    """Says when training is under way."""

    def on_epoch_begin(self, epoch: int, logs: object = None) -> None:  # noqa: ARG002
        print(f"epoch {epoch}", flush=True)


def main(folder: str, kind: str = "plain") -> None:
    np.random.seed(5)
    config = ipu.config.IPUConfig()
    config.auto_select_ipus = 2 if kind in ("replicas", "pipeline") else 1
    config.configure_ipu_system()
    rng = np.random.default_rng(0)
    x, y = rng.random((2003, 16), np.float32), rng.integers(0, 4, 2003)
    with ipu.ipu_strategy.IPUStrategy().scope():
        model = keras.Sequential([keras.Input((16,))])
        model.add(keras.layers.Dense(64, "relu", kernel_initializer=keras.initializers.GlorotUniform(seed=1)))
        model.add(keras.layers.Dropout(0.2, seed=2))
        model.add(keras.layers.Dense(4, kernel_initializer=keras.initializers.GlorotUniform(seed=3)))
        if kind == "pipeline":
            model.set_pipeline_stage_assignment([0, 0, 1])
            model.set_pipelining_options(gradient_accumulation_steps_per_replica=4)
        model.set_asynchronous_callbacks(kind == "asynchronous")
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("adam", loss, metrics=["accuracy"], steps_per_execution=48)
    checkpoint = ipu.callbacks.Checkpoint(folder, keep=2, max_share=1)
    history = model.fit(x, y, batch_size=8, epochs=90, verbose=0, callbacks=[checkpoint, Begun()])
    digest = hashlib.sha256(repr(history.history).encode())
    for variable in [*model.weights, *model.optimizer.variables]:
        digest.update(np.ascontiguousarray(variable.value).tobytes())
    print(f"ended {digest.hexdigest()}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
