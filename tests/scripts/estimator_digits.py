"""An estimator with a model function in the words of TensorFlow 1, on two replicas."""

import argparse
import tempfile

import numpy as np
import tensorflow as tf
from tensorflow.python import ipu

parser = argparse.ArgumentParser()
parser.add_argument("--replicas", type=int, default=2)
parser.add_argument("--steps", type=int, default=200)
parser.add_argument("--model-dir", default=None)
args = parser.parse_args()

tf.compat.v1.logging.set_verbosity(tf.compat.v1.logging.ERROR)
(x_train, y_train), (x_test, y_test) = tf.keras.datasets.mnist.load_data()


def model_fn(features, labels, mode, params):
    x = tf.keras.layers.Conv2D(8, 3, activation="relu")(features)
    x = tf.keras.layers.Flatten()(x)
    logits = tf.keras.layers.Dense(10)(x)
    predictions = tf.argmax(input=logits, axis=-1, output_type=tf.int32)
    if mode == tf.estimator.ModeKeys.PREDICT:
        return tf.estimator.EstimatorSpec(mode, predictions=predictions)
    loss = tf.reduce_mean(tf.keras.losses.sparse_categorical_crossentropy(labels, logits, from_logits=True))
    if mode == tf.estimator.ModeKeys.EVAL:
        accuracy = tf.compat.v1.metrics.accuracy(labels, predictions)
        return tf.estimator.EstimatorSpec(mode, loss=loss, eval_metric_ops={"accuracy": accuracy})
    optimizer = tf.compat.v1.train.GradientDescentOptimizer(learning_rate=params["learning_rate"])
    optimizer = ipu.optimizers.CrossReplicaOptimizer(optimizer)
    return tf.estimator.EstimatorSpec(mode, loss=loss, train_op=optimizer.minimize(loss))


def dataset(x, y, batch, training):
    def prepare(image, label):
        return tf.expand_dims(tf.cast(image, tf.float32) / 255.0, -1), tf.cast(label, tf.int32)

    data = tf.data.Dataset.from_tensor_slices((x, y)).map(prepare)
    data = data.shuffle(1000, seed=1).repeat() if training else data
    return data.batch(batch, drop_remainder=True)


options = ipu.config.IPUConfig()
options.auto_select_ipus = args.replicas
ipu_run_config = ipu.ipu_run_config.IPURunConfig(
    num_replicas=args.replicas, iterations_per_loop=50, ipu_options=options
)
config = ipu.ipu_run_config.RunConfig(
    ipu_run_config=ipu_run_config, model_dir=args.model_dir or tempfile.mkdtemp(), tf_random_seed=1
)
estimator = ipu.ipu_estimator.IPUEstimator(model_fn, config=config, params={"learning_rate": 0.2})
estimator.train(lambda: dataset(x_train, y_train, 32, True), steps=args.steps)
result = estimator.evaluate(lambda: dataset(x_test, y_test, 100, False), steps=50)
predicted = np.array([next(estimator.predict(lambda: dataset(x_test, y_test, 100, False)))])
print(f"accuracy {result['accuracy']:.4f} after {result['global_step']} steps, first prediction {predicted}")
