"""A training loop of the script's own: a tape, an optimizer and an outfeed in one compiled function."""

import argparse

import numpy as np
import tensorflow as tf
from tensorflow.python import ipu

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=20)
parser.add_argument("--runs", type=int, default=3)
args = parser.parse_args()

if not tf.__version__.startswith("2"):
    raise RuntimeError("TensorFlow 2 is needed")

config = ipu.config.IPUConfig()
config.auto_select_ipus = 1
config.configure_ipu_system()

generator = np.random.default_rng(0)
x = generator.normal(size=(512, 8)).astype(np.float32)
y = (x.sum(axis=1) > 0).astype(np.int32)
dataset = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(512, seed=1).batch(32, drop_remainder=True).repeat()

strategy = ipu.ipu_strategy.IPUStrategy()
with strategy.scope():
    model = tf.keras.Sequential([tf.keras.layers.Dense(16, activation="relu"), tf.keras.layers.Dense(2)])
    optimizer = tf.keras.optimizers.SGD(lr=0.1, momentum=0.9)
    outfeed = ipu.ipu_outfeed_queue.IPUOutfeedQueue()
    iterator = iter(dataset)

    @tf.function(experimental_compile=True)
    def step(features, labels):
        with tf.GradientTape() as tape:
            logits = model(features, training=True)
            loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=logits))
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables))
        correct = tf.reduce_sum(tf.cast(tf.equal(tf.argmax(logits, axis=-1, output_type=tf.int32), labels), tf.float32))
        return loss, correct

    @tf.function(experimental_compile=True)
    def train(iterator, steps):
        total, right = 0.0, 0.0
        for _ in tf.range(steps):
            features, labels = next(iterator)
            loss, correct = step(features, labels)
            outfeed.enqueue({"loss": loss})
            total += loss
            right += correct
        return total / tf.cast(steps, tf.float32), right / tf.cast(32 * steps, tf.float32)

    for run in range(args.runs):
        mean, accuracy = strategy.run(train, args=(iterator, args.steps))
        losses = outfeed.dequeue()["loss"].numpy()
        assert losses.shape == (args.steps,)
        assert abs(losses.mean() - mean.numpy()) < 1e-5
        print(f"run {run}: loss {mean.numpy():.4f}, accuracy {accuracy.numpy():.3f}")

print("names:", [variable.name for variable in model.trainable_variables][0])
