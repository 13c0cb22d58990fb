"""A custom step that gets its data as arguments, and a metric of Keras."""

import numpy as np
import tensorflow as tf
from tensorflow.python.ipu import ipu_strategy, utils
from tensorflow.python.ipu.config import IPUConfig

config = IPUConfig()
config.auto_select_ipus = 1
config.configure_ipu_system()
assert utils.get_num_of_ipus_in_device("/device:IPU:0") == 1

rng = np.random.default_rng(2)
inputs = rng.normal(size=(256, 4)).astype(np.float32)
targets = (inputs @ np.array([[1.0], [-2.0], [0.5], [3.0]], np.float32) + 0.25).astype(np.float32)


class Regression(tf.keras.Model):
    def __init__(self):
        super().__init__()
        self.hidden = tf.keras.layers.Dense(16, activation=tf.keras.activations.relu)
        self.last = tf.keras.layers.Dense(1)

    def call(self, x, training=False):
        x = tf.cast(x, tf.float32)
        if training:
            x = x + tf.zeros_like(x)
        return self.last(self.hidden(x))


strategy = ipu_strategy.IPUStrategy()
with strategy.scope():
    model = Regression()
    optimizer = tf.keras.optimizers.Adam(learning_rate=0.02)
    error = tf.keras.metrics.MeanSquaredError()

    @tf.function
    def step(x, y):
        with tf.GradientTape() as tape:
            prediction = model(x, training=True)
            loss = tf.reduce_mean(tf.math.squared_difference(prediction, y)) + 1e-4 * tf.add_n(
                [tf.nn.l2_loss(v) for v in model.trainable_variables if "kernel" in v.name]
            )
        variables = model.trainable_variables
        gradients, norm = tf.clip_by_global_norm(tape.gradient(loss, variables), 10.0)
        optimizer.apply_gradients(zip(gradients, variables))
        error.update_state(y, prediction)
        return loss, norm

    first = None
    for epoch in range(30):
        error.reset_state()
        for start in range(0, 256, 64):
            loss, norm = strategy.run(step, args=(tf.constant(inputs[start : start + 64]), targets[start : start + 64]))
        first = first or error.result().numpy()

print(f"error {first:.3f} -> {error.result().numpy():.4f}, loss {float(loss):.4f}, norm {norm.numpy():.3f}")
assert error.result().numpy() < first / 10
