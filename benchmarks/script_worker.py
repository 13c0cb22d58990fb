"""What scripts.py measures: `openipu run benchmarks/script_worker.py WHAT`, and without `openipu run` what is plain.

WHAT is "loops" (a custom `tf.function` loop and the same loop written natively, in turns), "plain" (that loop in
TensorFlow alone), or "eager" (TensorFlow's operations outside of programs). The last line is JSON.
"""

import argparse
import json
import pathlib
import sys
import time

import numpy as np
import tensorflow as tf

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent))

from benchmarks.measure import in_turns

parser = argparse.ArgumentParser()
parser.add_argument("what", choices=["loops", "plain", "eager"])
parser.add_argument("--steps", type=int, default=500)
parser.add_argument("--rounds", type=int, default=5)
args = parser.parse_args()

BATCH, WIDTH = 64, 784
rng = np.random.default_rng(0)
x = rng.normal(size=(50 * BATCH, WIDTH)).astype(np.float32)
y = rng.integers(0, 10, len(x)).astype(np.int32)


def data():
    """Endless batches."""
    return tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH, drop_remainder=True).cache().repeat().prefetch(8)


def network():
    """A small dense network."""
    layers = tf.keras.layers
    return tf.keras.Sequential([layers.Input((WIDTH,)), layers.Dense(128, activation="relu"), layers.Dense(10)])


def loop(model, optimizer, enqueue):
    """A training loop in the words of TensorFlow."""

    @tf.function
    def train(iterator, steps):
        total = 0.0
        for _ in tf.range(steps):
            features, labels = next(iterator)
            with tf.GradientTape() as tape:
                logits = model(features, training=True)
                loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=logits))
            gradients = tape.gradient(loss, model.trainable_variables)
            optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
            enqueue(loss)
            total += loss
        return total / tf.cast(steps, tf.float32)

    return train


def microseconds(run):
    """A function that runs and returns the microseconds per step."""

    def timed():
        began = time.perf_counter()
        float(run())
        return (time.perf_counter() - began) / args.steps * 1e6

    return timed


def loops():
    """The loop as a script has it, and written natively."""
    import openipu as ipu

    import keras
    from tensorflow.python.ipu import ipu_strategy

    strategy = ipu_strategy.IPUStrategy()
    with strategy.scope():
        outfeed = ipu.ipu_outfeed_queue.IPUOutfeedQueue()
        train = loop(network(), tf.keras.optimizers.SGD(0.01, momentum=0.9), outfeed.enqueue)
        iterator = iter(data())
        model, optimizer = network(), keras.optimizers.SGD(0.01, momentum=0.9)
        infeed, own_outfeed = ipu.ipu_infeed_queue.IPUInfeedQueue(data()), ipu.ipu_outfeed_queue.IPUOutfeedQueue()
        loss_fn = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    def step(total, features, labels):
        def loss():
            return loss_fn(labels, model(features, training=True))

        found = ipu.training.minimize(optimizer, loss, model.trainable_variables)
        own_outfeed.enqueue(found)
        return total + found

    def native_loop():
        return ipu.loops.repeat(args.steps, step, [0.0], infeed) / args.steps

    def as_script():
        mean = strategy.run(train, args=(iterator, args.steps))
        assert len(outfeed.dequeue()) == args.steps
        return mean

    def natively():
        mean = strategy.run(native_loop)
        assert len(own_outfeed.dequeue()) == args.steps
        return mean

    return in_turns({"script": microseconds(as_script), "native": microseconds(natively)}, args.rounds)


def plain():
    """The loop in TensorFlow alone."""
    train = loop(network(), tf.keras.optimizers.SGD(0.01, momentum=0.9), lambda _: None)
    iterator = iter(data())
    steps = tf.constant(args.steps)
    return in_turns({"plain": microseconds(lambda: train(iterator, steps))}, args.rounds)


def eager():
    """Operations of TensorFlow on its own tensors, one by one."""
    weights, values = tf.Variable(tf.ones((16, 16))), tf.ones((8, 16))

    def work():
        total = tf.constant(0.0)
        for _ in range(args.steps):
            with tf.GradientTape() as tape:
                hidden = tf.nn.relu(tf.matmul(values, weights) * 0.01)
                loss = tf.reduce_mean(tf.square(hidden - 1.0))
            total = total + loss + tf.reduce_sum(tape.gradient(loss, weights)) * 0.0
        return total

    return in_turns({"eager": microseconds(work)}, args.rounds)


print(json.dumps({"loops": loops, "plain": plain, "eager": eager}[args.what]()))
