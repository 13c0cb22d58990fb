"""Training in several processes, started by poprun or `openipu launch`."""

import numpy as np
import popdist
import popdist.tensorflow
import tensorflow as tf
from tensorflow.python import ipu

popdist.init()
config = ipu.config.IPUConfig()
popdist.tensorflow.set_ipu_config(config, ipus_per_replica=popdist.getNumIpusPerReplica())
config.configure_ipu_system()

rng = np.random.default_rng(6)
x = rng.normal(size=(256, 5)).astype(np.float32)
y = x @ np.arange(5, dtype=np.float32)[:, None]
dataset = tf.data.Dataset.from_tensor_slices((x, y)).shard(popdist.getNumInstances(), popdist.getInstanceIndex())
dataset = dataset.batch(16, drop_remainder=True)

strategy = ipu.distributed.popdist_strategy.PopDistStrategy()
with strategy.scope():
    model = tf.keras.Sequential([tf.keras.layers.Dense(1, input_shape=(5,))])
    model.compile(tf.keras.optimizers.SGD(lr=0.05), "mse", steps_per_execution=8)
    history = model.fit(dataset, epochs=6, verbose=0)

weights = model.get_weights()[0]
largest = ipu.distributed.allreduce(float(np.abs(weights - np.arange(5)[:, None]).max()), "MEAN")
print(f"instance {popdist.getInstanceIndex()} of {popdist.getNumInstances()}: largest error {float(largest):.3f}")
assert float(largest) < 0.5
