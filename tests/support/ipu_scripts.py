"""Scripts as people wrote them for TensorFlow 2 on IPUs, each with what it prints at its end."""

STRATEGY = '''\
"""Train a small classifier on one IPU, from a tf.data pipeline."""
import argparse
import tensorflow as tf
from tensorflow import keras
from tensorflow.keras.layers import Dense, Flatten
from tensorflow.python import ipu
import numpy as np

if tf.__version__[0] != '2':
    raise ImportError("This script needs TensorFlow 2")

BATCH = 16


def make_data(count=512):
    rng = np.random.RandomState(3)
    labels = rng.randint(0, 4, count)
    images = rng.rand(count, 8, 8) + 2 * np.eye(4)[labels].repeat(16, axis=1).reshape(count, 8, 8)
    return (images * 80).astype(np.uint8), labels.astype(np.int32)


def scale(image, label):
    # runs on the host
    return tf.cast(image, tf.float32) / 255., label


def make_model():
    return keras.Sequential([
        Flatten(input_shape=(8, 8)),
        Dense(16, activation=tf.nn.relu),
        Dense(4, activation='softmax'),
    ])


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument('--epochs', type=int, default=6)
    args = parser.parse_args()
    tf.random.set_seed(1)

    cfg = ipu.utils.IPUConfig()
    cfg.auto_select_ipus = 1
    cfg.configure_ipu_system()

    ds = tf.data.Dataset.from_tensor_slices(make_data()).map(scale)
    ds = ds.batch(BATCH, drop_remainder=True).prefetch(tf.data.experimental.AUTOTUNE)

    strategy = ipu.ipu_strategy.IPUStrategy()
    with strategy.scope():
        model = make_model()
        model.compile(loss=tf.keras.losses.SparseCategoricalCrossentropy(),
                      optimizer=tf.keras.optimizers.SGD(lr=0.5, decay=0.),
                      metrics=['accuracy'],
                      experimental_steps_per_execution=16)
        model.fit(ds, epochs=args.epochs, verbose=0)
        loss, accuracy = model.evaluate(ds, verbose=0)
    print("accuracy", accuracy)


if __name__ == '__main__':
    main()
'''

PIPELINE = '''\
import numpy as np
import tensorflow as tf
from tensorflow.python import ipu
from tensorflow.keras import layers
import tensorflow.keras.backend as K


class Standardise(layers.Layer):
    """Zero mean and unit length for each row."""

    def call(self, inputs):
        x = tf.cast(inputs, tf.float32)
        x = x - tf.reduce_mean(x, axis=-1, keepdims=True)  # centred
        return x / tf.sqrt(tf.reduce_sum(tf.square(x), axis=-1, keepdims=True) + 1e-6)


def mean_distance(y_true, y_pred):
    return K.mean(tf.abs(y_true - y_pred), axis=-1)


def build():
    inputs = tf.keras.Input(shape=(6))
    with tf.keras.ipu.PipelineStage(0):
        x = Standardise()(inputs)
        x = layers.Dense(8, activation='tanh')(x)
    with tf.keras.ipu.PipelineStage(1):
        outputs = layers.Dense(2)(x)
    return tf.keras.Model(inputs, outputs)


config = ipu.config.IPUConfig()
config.auto_select_ipus = 2
config.configure_ipu_system()

rng = np.random.RandomState(0)
features = rng.rand(256, 6).astype(np.float32)
targets = np.stack([features[:, 0], features[:, 1]], axis=1)

strategy = ipu.ipu_strategy.IPUStrategy()
with strategy.scope():
    model = build()
    model.set_pipelining_options(
        gradient_accumulation_steps_per_replica=8,
        pipeline_schedule=ipu.ops.pipelining_ops.PipelineSchedule.Grouped)
    model.compile(tf.keras.optimizers.Adam(lr=0.01), loss=mean_distance, steps_per_execution=32)
    history = model.fit(features, targets, batch_size=8, epochs=12, verbose=0)

losses = history.history['loss']
print("losses", losses[0], losses[-1])
'''

FEEDS = """\
from tensorflow.python import ipu
from tensorflow.python.ipu import ipu_infeed_queue, ipu_outfeed_queue
import tensorflow as tf
import numpy as np

cfg = ipu.config.IPUConfig()
cfg.auto_select_ipus = 1
cfg.configure_ipu_system()

numbers = np.arange(24, dtype=np.float32).reshape(6, 4)
dataset = tf.data.Dataset.from_tensor_slices(numbers).repeat()
strategy = ipu.ipu_strategy.IPUStrategy()

with strategy.scope():
    infeed = ipu_infeed_queue.IPUInfeedQueue(dataset)
    outfeed = ipu_outfeed_queue.IPUOutfeedQueue()

    def body(total, row):
        largest = tf.reduce_max(row)
        outfeed.enqueue(tf.stack([largest, tf.math.reduce_sum(row, name="row_sum")]))
        return total + largest

    @tf.function(experimental_compile=True)
    def program(start):
        return ipu.loops.repeat(6, body, [tf.cast(start, tf.float32)], infeed)

    result = strategy.run(program, args=[tf.constant(1.0)])
    rows = outfeed.dequeue()

print("total", float(np.asarray(result).reshape(-1)[0]))
print("rows", np.asarray(rows).tolist())
"""

ESTIMATOR = """\
import tempfile

import numpy as np
import tensorflow as tf

from tensorflow.python import ipu


def input_fn():
    rng = np.random.RandomState(5)
    x = rng.rand(128, 4).astype(np.float32)
    y = (x[:, 0] > x[:, 1]).astype(np.int32)
    return tf.data.Dataset.from_tensor_slices((x, y)).batch(16, drop_remainder=True).repeat()


def model_fn(features, labels, mode):
    hidden = tf.keras.layers.Dense(16, activation=tf.nn.relu)(features)
    logits = tf.keras.layers.Dense(2)(hidden)
    loss = tf.reduce_mean(
        tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=logits))
    if mode == tf.estimator.ModeKeys.EVAL:
        predictions = tf.argmax(input=logits, axis=-1, output_type=tf.int32)
        eval_metric_ops = {"accuracy": tf.compat.v1.metrics.accuracy(labels, predictions=predictions)}
        return tf.estimator.EstimatorSpec(mode, loss=loss, eval_metric_ops=eval_metric_ops)
    optimizer = tf.compat.v1.train.GradientDescentOptimizer(learning_rate=0.5)
    return tf.estimator.EstimatorSpec(mode=mode, loss=loss, train_op=optimizer.minimize(loss))


options = ipu.config.IPUConfig()
options.auto_select_ipus = 1
run_config = ipu.ipu_run_config.RunConfig(
    ipu_run_config=ipu.ipu_run_config.IPURunConfig(iterations_per_loop=8, ipu_options=options),
    model_dir=tempfile.mkdtemp())
estimator = ipu.ipu_estimator.IPUEstimator(config=run_config, model_fn=model_fn)
estimator.train(input_fn=input_fn, steps=8)
before = estimator.evaluate(input_fn=input_fn, steps=8)
estimator.train(input_fn=input_fn, steps=320)
after = estimator.evaluate(input_fn=input_fn, steps=8)
print("losses", before["loss"], after["loss"])
print("accuracy", after["accuracy"])
"""

DISTRIBUTED = """\
import popdist
import popdist.tensorflow
from tensorflow.python.ipu.config import IPUConfig
from tensorflow.python.ipu.distributed import popdist_strategy
from tensorflow import keras as K
import numpy as np

popdist.init()
config = IPUConfig()
popdist.tensorflow.set_ipu_config(config, ipus_per_replica=1)
config.configure_ipu_system()
print("instances", popdist.getNumInstances())

with popdist_strategy.PopDistStrategy().scope():
    model = K.Sequential([K.layers.Dense(1, input_shape=(3))])
    model.compile(K.optimizers.SGD(lr=0.1), K.losses.MeanSquaredError(), steps_per_execution=8)
    x = np.random.RandomState(0).rand(64, 3).astype("float32")
    losses = model.fit(x, x.sum(axis=1, keepdims=True), batch_size=8, epochs=8, verbose=0).history["loss"]
print("losses", losses[0], losses[-1])
"""
