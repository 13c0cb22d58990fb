"""What TensorBoard shows of a training run: scalars, histograms, images of filters, and the time of each epoch."""

import argparse
import glob
import os
import time

import numpy as np
import tensorflow as tf
from tensorflow import keras
from tensorflow.python import ipu

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("folder")
parser.add_argument("--images", type=int, default=8192)
parser.add_argument("--epochs", type=int, default=2)
args = parser.parse_args()

BATCH = 64
(x, y), _ = keras.datasets.mnist.load_data()
x = np.expand_dims(x[: args.images].astype(np.float32) / 255.0, -1)
y = y[: args.images].astype(np.int32)
steps = len(x) // BATCH
train = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(1000, seed=7).batch(BATCH, drop_remainder=True).repeat()


class Filters(keras.callbacks.Callback):
    """Images of the filters of the first layer."""

    def __init__(self, folder):
        super().__init__()
        self.writer = tf.summary.create_file_writer(os.path.join(folder, "filters"))

    def on_epoch_end(self, epoch, logs=None):
        filters = self.model.layers[0].get_weights()[0]
        low, high = filters.min(), filters.max()
        images = np.transpose((filters - low) / (high - low), (3, 0, 1, 2))
        with self.writer.as_default():
            tf.summary.image("filters", images, step=epoch, max_outputs=8)
            tf.summary.histogram("weights", tf.reshape(filters, [-1]), step=epoch)


class Times(keras.callbacks.Callback):
    """How long each epoch takes."""

    def __init__(self, folder):
        super().__init__()
        self.writer = tf.summary.create_file_writer(os.path.join(folder, "times"))

    def on_epoch_begin(self, epoch, logs=None):
        self.began = time.time()

    def on_epoch_end(self, epoch, logs=None):
        with self.writer.as_default():
            tf.summary.scalar("seconds", time.time() - self.began, step=epoch)
            for name, value in logs.items():
                tf.summary.scalar(name, value, step=epoch)


config = ipu.config.IPUConfig()
config.auto_select_ipus = 1
config.configure_ipu_system()
with ipu.ipu_strategy.IPUStrategy().scope():
    model = keras.Sequential(
        [
            keras.layers.Conv2D(8, (5, 5), activation="relu", input_shape=(28, 28, 1)),
            keras.layers.MaxPooling2D((4, 4)),
            keras.layers.Flatten(),
            keras.layers.Dense(10, activation="softmax"),
        ]
    )
    model.compile(
        loss=keras.losses.SparseCategoricalCrossentropy(),
        optimizer=keras.optimizers.RMSprop(),
        metrics=["accuracy"],
        steps_per_execution=steps // 4,
    )
    board = keras.callbacks.TensorBoard(
        log_dir=os.path.join(args.folder, "fit"), histogram_freq=1, update_freq="epoch", write_images=True
    )
    model.fit(
        train,
        epochs=args.epochs,
        steps_per_epoch=steps,
        callbacks=[board, Filters(args.folder), Times(args.folder)],
        validation_data=tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH, drop_remainder=True),
        validation_steps=steps,
        verbose=2,
    )

tags = set()
for file in glob.glob(os.path.join(args.folder, "**", "events*"), recursive=True):
    for record in tf.compat.v1.train.summary_iterator(file):
        tags.update(value.tag for value in record.summary.value)
wanted = {"filters", "weights", "seconds", "loss", "accuracy", "val_accuracy", "epoch_loss"}
assert wanted <= tags, f"{sorted(wanted - tags)} are missing"
print(f"{steps}/{steps} steps, {len(tags)} kinds of summaries")
