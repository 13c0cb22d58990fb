"""When a function is compiled again: once for each shape of its arguments."""

import numpy as np
import tensorflow as tf
from tensorflow.python import ipu

config = ipu.config.IPUConfig()
config.auto_select_ipus = 1
config.configure_ipu_system()

traced = []
strategy = ipu.ipu_strategy.IPUStrategy()


@tf.function
def normalise(values):
    traced.append((tf.compat.v1.get_default_graph().name, values.shape))
    mean, variance = tf.nn.moments(values, axes=[0])
    scaled = (values - mean) * tf.math.rsqrt(variance + 1e-6)
    if tf.reduce_max(tf.abs(scaled)) > 1.5:
        scaled = tf.clip_by_value(scaled, -1.5, 1.5)
    return scaled


def programs():
    return len({shape for _, shape in traced}), len(traced)


with strategy.scope():
    for size in (8, 8, 8, 16, 16, 8):
        result = strategy.run(normalise, args=(np.arange(size, dtype=np.float32),))
        assert result.shape == (size,)
        assert float(tf.reduce_max(result)) <= 1.5

shapes, traces = programs()
print(f"{shapes} shapes, {traces} traces of {traced[0][0]}")
assert shapes == 2
assert traces == 4
