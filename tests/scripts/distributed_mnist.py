"""MNIST in several processes: each trains on its own part of the images, and all have the same weights."""

import argparse

import numpy as np
import popdist
import popdist.tensorflow
import tensorflow as tf
from tensorflow import keras
from tensorflow.python import ipu
from tensorflow.python.ipu import distributed
from tensorflow.python.ipu.distributed.popdist_strategy import PopDistStrategy

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--images", type=int, default=8192)
parser.add_argument("--weights", default="", help="where instance 0 saves the weights")
args = parser.parse_args()

BATCH = 32
if popdist.isPopdistEnvSet():
    popdist.init()
instance, instances = popdist.getInstanceIndex(), popdist.getNumInstances()
config = ipu.config.IPUConfig()
popdist.tensorflow.set_ipu_config(config, ipus_per_replica=popdist.getNumIpusPerReplica(), configure_device=True)
config.configure_ipu_system()

(x_train, y_train), (x_test, y_test) = keras.datasets.mnist.load_data()


def dataset(x, y, shuffle):
    x = np.expand_dims(x.astype(np.float32) / 255.0, -1)
    data = tf.data.Dataset.from_tensor_slices((x, y.astype(np.int32))).shard(instances, instance)
    data = data.shuffle(len(x), seed=1) if shuffle else data
    return data.cache().batch(BATCH, drop_remainder=True)


train, test = dataset(x_train[: args.images], y_train[: args.images], True), dataset(x_test, y_test, False)
steps = len(train) // popdist.getNumLocalReplicas()
tf.random.set_seed(instance)  # the weights of instance 0 count

strategy = PopDistStrategy()
with strategy.scope():
    model = keras.Sequential(
        [
            keras.layers.Conv2D(8, (3, 3), strides=2, activation="relu", input_shape=(28, 28, 1)),
            keras.layers.Flatten(),
            keras.layers.Dense(10),
        ]
    )
    model.compile(
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        optimizer=keras.optimizers.SGD(lr=0.1, momentum=0.9),
        metrics=["accuracy"],
        steps_per_execution=steps,
    )
    model.fit(train, epochs=args.epochs, steps_per_epoch=len(train), verbose=2 if instance == 0 else 0)
    model.compile(
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
        steps_per_execution=len(test) // popdist.getNumLocalReplicas(),
    )
    _, accuracy = model.evaluate(test, verbose=0)

mean = distributed.allreduce(tf.constant(accuracy, tf.float32), "MEAN")
weights = distributed.allgather(tf.constant(np.concatenate([w.ravel() for w in model.get_weights()])))
weights = np.reshape(np.asarray(weights), (instances, -1))
assert (weights == weights[0]).all(), "all instances have the same weights"
if instance == 0 and args.weights:
    model.save_weights(args.weights)
print(f"instance {instance} of {instances}: accuracy {float(mean):.4f}")
