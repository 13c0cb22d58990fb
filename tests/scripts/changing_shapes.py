"""Input pipelines whose batches change their shape: each new shape is compiled once, and never again."""

import time

import numpy as np
import tensorflow as tf
from tensorflow import keras
from tensorflow.python import ipu

config = ipu.config.IPUConfig()
config.auto_select_ipus = 1
config.configure_ipu_system()

rng = np.random.default_rng(1)
x = rng.normal(size=(480, 10)).astype(np.float32)
y = x[:, :1] * 2.0
traced = []


class Noted(keras.layers.Layer):
    def call(self, inputs):
        traced.append(tuple(inputs.shape))
        return tf.identity(inputs)


def dataset(batch, drop=True):
    return tf.data.Dataset.from_tensor_slices((x, y)).batch(batch, drop_remainder=drop)


strategy = ipu.ipu_strategy.IPUStrategy()
with strategy.scope():
    model = keras.Sequential([keras.layers.Input(shape=(10)), Noted(), keras.layers.Dense(1)])
    optimizer = keras.optimizers.SGD(learning_rate=0.05)

    @tf.function(experimental_compile=True)
    def step(iterator, count):
        total = 0.0
        for _ in tf.range(count):
            features, labels = next(iterator)
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.square(model(features) - labels))
            gradients = tape.gradient(loss, model.trainable_variables)
            optimizer.apply_gradients(zip(gradients, model.trainable_variables))
            total += loss
        return total / tf.cast(count, tf.float32)

    iterators = {batch: iter(dataset(batch).repeat()) for batch in (16, 48)}

    def epoch(batch):
        before, began = len(traced), time.time()
        loss = strategy.run(step, args=(iterators[batch], 480 // batch))
        new = len(traced) - before
        print(f"batches of {batch}: loss {loss.numpy():.4f}, traced {new} times, {time.time() - began:.3f} s")
        return new

    print("Caching/warm up test")
    assert epoch(16) > 0
    assert epoch(16) == 0, "the same shape again"
    assert epoch(48) > 0, "another shape"
    assert epoch(16) == epoch(48) == 0, "both are kept"

    # fit keeps a program for each shape, too, and a last batch that is smaller loses no sample.
    model.compile(optimizer, "mse", steps_per_execution=10)
    model.fit(dataset(48), epochs=2, verbose=0)
    seen = len(traced)
    model.fit(dataset(48), epochs=2, verbose=0)
    assert len(traced) == seen
    assert model.predict(dataset(100, drop=False).map(lambda features, _: features), verbose=0).shape == (480, 1)
print(f"{len(set(traced))} shapes")
