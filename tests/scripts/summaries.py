"""Numbers for TensorBoard: from a callback, and from a writer of the script's own; weights saved and loaded."""

import glob
import os
import sys

import numpy as np
import tensorflow as tf
from tensorflow.python import ipu

folder = sys.argv[1]
config = ipu.config.IPUConfig()
config.auto_select_ipus = 1
config.configure_ipu_system()

x = np.random.default_rng(0).normal(size=(128, 4)).astype(np.float32)
y = x.sum(axis=1, keepdims=True)
writer = tf.summary.create_file_writer(os.path.join(folder, "own"))


class Rates(tf.keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        with writer.as_default():
            tf.summary.scalar("rate", tf.keras.backend.get_value(self.model.optimizer.lr), step=epoch)
            tf.summary.scalar("loss", logs["loss"], step=epoch)


def make():
    model = tf.keras.Sequential([tf.keras.layers.Dense(1, input_shape=(4,), name="only")])
    model.compile(tf.keras.optimizers.SGD(lr=0.1), "mse", steps_per_execution=4)
    return model


with ipu.ipu_strategy.IPUStrategy().scope():
    model = make()
    callbacks = [Rates(), tf.keras.callbacks.TensorBoard(os.path.join(folder, "keras"))]
    model.fit(x, y, batch_size=32, epochs=3, callbacks=callbacks, verbose=0)
    model.save_weights(os.path.join(folder, "weights"))
    other = make()
    other.load_weights(os.path.join(folder, "weights"))
    np.testing.assert_array_equal(model.predict(x, batch_size=32), other.predict(x, batch_size=32))

writer.flush()
events = glob.glob(os.path.join(folder, "own", "events*")) + glob.glob(
    os.path.join(folder, "keras", "**", "events*"), recursive=True
)
print(f"{len(events)} event files, variables {[v.name for v in model.weights]}")
assert len(events) >= 2
