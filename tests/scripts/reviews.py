"""A text classifier: an embedding and an LSTM, with a layer and a loss of its own."""

import numpy as np
import tensorflow as tf
from tensorflow.keras import layers
from tensorflow.keras.preprocessing import sequence
from tensorflow.python import ipu

words, length = 200, 40
rng = np.random.default_rng(4)
texts = [rng.integers(1, words, rng.integers(10, 60)).tolist() for _ in range(512)]
labels = np.array([int(np.mean(np.array(text) % 2) > 0.5) for text in texts], np.float32)
x = sequence.pad_sequences(texts, maxlen=length).astype(np.int32)


class Attention(layers.Layer):
    def build(self, shape):
        self.query = self.add_weight("query", shape=[shape[-1], 1], initializer=tf.keras.initializers.GlorotUniform())

    def call(self, states):
        weights = tf.nn.softmax(tf.matmul(states, self.query), axis=1)
        return tf.reduce_sum(states * weights, axis=1)


def loss_fn(truth, logits):
    truth = tf.cast(truth, logits.dtype)
    return tf.reduce_mean(
        tf.nn.sigmoid_cross_entropy_with_logits(labels=tf.reshape(truth, tf.shape(logits)), logits=logits)
    )


def right(truth, logits):
    return tf.cast(tf.equal(tf.cast(tf.squeeze(logits, -1) > 0.0, tf.float32), tf.reshape(truth, [-1])), tf.float32)


config = ipu.config.IPUConfig()
config.auto_select_ipus = 1
config.configure_ipu_system()
strategy = ipu.ipu_strategy.IPUStrategy()
with strategy.scope():
    inputs = tf.keras.Input(shape=(length), dtype=tf.int32)
    states = layers.Embedding(words, 16, input_length=length)(inputs)
    states = layers.LSTM(16, return_sequences=True)(states)
    logits = layers.Dense(1)(Attention()(states))
    model = tf.keras.Model(inputs, logits)
    model.compile(tf.keras.optimizers.Adam(lr=0.01, decay=1e-3), loss_fn, metrics=[right], steps_per_execution=8)
    history = model.fit(x, labels, batch_size=32, epochs=8, verbose=0).history

print(f"loss {history['loss'][0]:.3f} -> {history['loss'][-1]:.3f}, right {history['right'][-1]:.3f}")
assert history["right"][-1] > 0.8
