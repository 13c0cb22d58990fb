"""An estimator whose model is cut into two stages, with functions for each of them."""

import argparse
import tempfile

import numpy as np
import tensorflow as tf
from tensorflow.python import ipu

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--batch-size", type=int, default=16)
parser.add_argument("--gradient-accumulation-count", type=int, default=8)
parser.add_argument("--model_shard_position", type=int, default=3, help="how many layers are in the first stage")
parser.add_argument("--updates", type=int, default=60)
args = parser.parse_args()

(x_train, y_train), (x_test, y_test) = tf.keras.datasets.mnist.load_data()


def layers():
    return [
        tf.keras.layers.Conv2D(16, (3, 3), strides=2, padding="same"),
        tf.keras.layers.Activation("relu"),
        tf.keras.layers.MaxPooling2D(pool_size=(2, 2)),
        tf.keras.layers.Flatten(),
        tf.keras.layers.Dropout(0.25),
        tf.keras.layers.Dense(64, activation=tf.nn.relu),
        tf.keras.layers.Dense(10),
    ]


def model_fn(mode, params):
    model = layers()
    cut = params["position"]

    def stage1(images, labels=None):
        values = tf.cast(images, tf.float32) / 255.0
        for layer in model[:cut]:
            values = layer(values)
        return (values,) if labels is None else (values, labels)

    def stage2(values, labels=None):
        for layer in model[cut:]:
            values = layer(values)
        predictions = tf.argmax(input=values, axis=-1, output_type=tf.int32)
        if mode == tf.estimator.ModeKeys.PREDICT:
            return {"digit": predictions}
        loss = tf.reduce_mean(tf.keras.losses.sparse_categorical_crossentropy(labels, values, from_logits=True))
        if mode == tf.estimator.ModeKeys.TRAIN:
            return loss
        return loss, predictions, labels

    def optimizer_function(loss):
        optimizer = tf.compat.v1.train.MomentumOptimizer(learning_rate=0.02, momentum=0.9)
        return ipu.ops.pipelining_ops.OptimizerFunctionOutput(optimizer, loss)

    def eval_metrics_fn(loss, predictions, labels):
        return {"loss": np.mean(loss), "accuracy": np.mean(np.equal(predictions, labels))}

    return ipu.ipu_pipeline_estimator.IPUPipelineEstimatorSpec(
        mode,
        computational_stages=[stage1, stage2],
        optimizer_function=optimizer_function,
        eval_metrics_fn=eval_metrics_fn,
        gradient_accumulation_count=params["count"],
        reduction_method=ipu.gradient_accumulation.GradientAccumulationReductionMethod.MEAN,
    )


def dataset(x, y=None):
    images = np.expand_dims(x, -1)
    data = tf.data.Dataset.from_tensor_slices(images if y is None else (images, y.astype(np.int32)))
    return data.batch(args.batch_size, drop_remainder=True)


options = ipu.config.IPUConfig()
options.auto_select_ipus = 2
count = args.gradient_accumulation_count
run_config = ipu.ipu_run_config.RunConfig(
    ipu_run_config=ipu.ipu_run_config.IPURunConfig(num_shards=2, iterations_per_loop=4 * count, ipu_options=options),
    model_dir=tempfile.mkdtemp(),
    tf_random_seed=4,
)
estimator = ipu.ipu_pipeline_estimator.IPUPipelineEstimator(
    model_fn=model_fn, config=run_config, params={"position": args.model_shard_position, "count": count}
)
estimator.train(input_fn=lambda: dataset(x_train, y_train).shuffle(100, seed=1).repeat(), steps=args.updates * count)
result = estimator.evaluate(input_fn=lambda: dataset(x_test, y_test).repeat(), steps=8 * count)
digits = [next(estimator.predict(lambda: dataset(x_test[:512]), num_predictions=1))["digit"]]
print(f"Validation accuracy: {100 * result['accuracy']:.2f}%, after {result['global_step']} steps, first {digits}")
