"""Checkpoints of TensorFlow in several processes: one writes, all restore."""

import argparse

import numpy as np
import popdist
import popdist.tensorflow
import tensorflow as tf
from tensorflow import keras
from tensorflow.python import ipu
from tensorflow.python.ipu.distributed.popdist_strategy import PopDistStrategy

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("folder", help="each instance gives a folder of its own in it")
args = parser.parse_args()

if popdist.isPopdistEnvSet():
    popdist.init()
instance = popdist.getInstanceIndex()
config = ipu.config.IPUConfig()
popdist.tensorflow.set_ipu_config(config, ipus_per_replica=1, configure_device=True)
config.configure_ipu_system()
x = np.random.default_rng(instance).normal(size=(64, 4)).astype(np.float32)
data = tf.data.Dataset.from_tensor_slices((x, x.sum(1, keepdims=True))).batch(8, drop_remainder=True)


def make(seed):
    """A model with its optimizer, and a counter of TensorFlow."""
    tf.random.set_seed(seed)
    model = keras.Sequential([keras.layers.Dense(3, input_shape=(4,)), keras.layers.Dense(1)])
    model.compile(optimizer=keras.optimizers.Adam(0.01), loss="mse")
    return model, tf.Variable(0)


def total(model):
    """A number that all variables have a share in."""
    return float(sum(np.abs(v.numpy()).sum() for v in (*model.variables, *model.optimizer.variables)))


with PopDistStrategy().scope():
    model, step = make(1)
    checkpoint = tf.train.Checkpoint(model=model, step=step)
    manager = tf.train.CheckpointManager(checkpoint, f"{args.folder}/{instance}", max_to_keep=2)
    for _ in range(3):
        model.fit(data, verbose=0)
        step.assign_add(8)
        path = manager.save()
    other, again = make(2)
    tf.train.Checkpoint(model=other, step=again).restore(path).assert_consumed()
    kept = [name.rpartition("-")[2] for name in manager.checkpoints]
    print(f"instance {instance}: step {int(again)}, kept {kept}, equal {total(model) == total(other)}", flush=True)
    print(f"total {total(other)!r}", flush=True)
