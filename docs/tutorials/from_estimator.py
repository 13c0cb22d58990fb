# ---
# jupyter:
#   jupytext:
#     formats: py:percent
# ---

# %% [markdown]
# # Coming from tf.estimator
#
# TensorFlow no longer has estimators. If you like the way they are used - a function that builds the model, a function that
# provides the data, and something that trains, saves, resumes and evaluates - you can keep it. This page ports an estimator
# script, piece by piece.
#
# Should you? If your script is short, `fit` with [`ipu.callbacks.Checkpoint`](../checkpoints.md) does the same with less code,
# and at the same speed ([measured](../../benchmarks/results/cpu-estimators.md)). An estimator is worth it if you have
# `model_fn`s already, need hooks, or train and evaluate in turns by the number of steps.

# %%
import os
import tempfile

import openipu as ipu
from openipu.estimator import EstimatorSpec, EvalSpec, ModeKeys, TrainSpec, train_and_evaluate

import keras

images = int(os.environ.get("OPENIPU_TUTORIAL_IMAGES", "60000"))
mnist = ipu.datasets.mnist(images, images // 6)
x_train, x_test = mnist.x_train.astype("float32") / 255, mnist.x_test.astype("float32") / 255

# %% [markdown]
# ## The model
#
# A `model_fn` gets features, labels, a mode and params, and returns an `EstimatorSpec`. Write it in Keras: make layers, call
# them, compute a loss with `keras.ops` or `keras.losses`.
#
# | in TensorFlow 1 | here |
# |---|---|
# | `tf.layers.dense(x, 64)` | `keras.layers.Dense(64)(x)` |
# | `tf.losses.sparse_softmax_cross_entropy(labels, logits)` | `keras.ops.mean(keras.losses.sparse_categorical_crossentropy(labels, logits, from_logits=True))` |
# | `tf.train.AdamOptimizer(1e-3).minimize(loss, global_step)` | `keras.optimizers.Adam(1e-3).minimize(loss)`: the estimator counts the steps |
# | `tf.metrics.accuracy(labels, predictions)` | `(keras.metrics.SparseCategoricalAccuracy(), labels, logits)` |
# | `tf.train.get_global_step()` | `openipu.estimator.get_global_step()` |
# | `tf.train.exponential_decay(0.1, global_step, 1000, 0.9)` as the learning rate | `keras.optimizers.schedules.ExponentialDecay(0.1, 1000, 0.9)`: it counts updates |
# | `tf.trainable_variables()` | the weights of your layers: `layer.kernel` |
# | `training=mode == ModeKeys.TRAIN` | not needed: layers know the mode |


# %%
def model_fn(features, labels, mode, params):
    x = keras.layers.Flatten()(features)
    x = keras.layers.Dense(params["units"], activation="relu")(x)
    x = keras.layers.Dropout(0.2)(x)
    logits = keras.layers.Dense(10)(x)
    if mode == ModeKeys.PREDICT:
        return EstimatorSpec(mode, predictions={"class": keras.ops.argmax(logits, -1)})
    loss = keras.ops.mean(keras.losses.sparse_categorical_crossentropy(labels, logits, from_logits=True))
    if mode == ModeKeys.TRAIN:
        return EstimatorSpec(mode, loss=loss, train_op=keras.optimizers.Adam(1e-3).minimize(loss))
    accuracy = keras.metrics.SparseCategoricalAccuracy()
    return EstimatorSpec(mode, loss=loss, eval_metric_ops={"accuracy": (accuracy, labels, logits)})


# %% [markdown]
# There is no graph and no session. `model_fn` is called a few times while a program is traced, and never while it runs. A
# `print` in it shows tensors without values. Each call makes new layers, which get their trained values by the order in which
# they are made. So make them in the same order in every mode.
#
# ## The data
#
# An `input_fn` returns batches: tf.data as before, or grain, a Keras `PyDataset`, a torch `DataLoader`, a generator, a list.
# Neither `repeat` nor `drop_remainder` is needed.


# %%
def train_input():
    return ipu.data.repeat(x_train, mnist.y_train, batch_size=32, shuffle=True, seed=1)


def test_input():
    for first in range(0, len(x_test), 100):
        yield x_test[first : first + 100], mnist.y_test[first : first + 100]


# %% [markdown]
# ## Train, evaluate, predict
#
# `iterations_per_loop` steps are one launch of one compiled program. `steps` must be a multiple of it. The loss and the speed
# go to the logger `openipu`: `logging.getLogger("openipu").setLevel(logging.INFO)` after `logging.basicConfig()` shows them.

# %%
cfg = ipu.config.IPUConfig()
cfg.auto_select_ipus = 1
ipu_config = ipu.ipu_run_config.IPURunConfig(iterations_per_loop=50, ipu_options=cfg)
folder = tempfile.mkdtemp()
config = ipu.ipu_run_config.RunConfig(ipu_config, model_dir=folder, tf_random_seed=1)

estimator = ipu.ipu_estimator.IPUEstimator(model_fn, config=config, params={"units": 64})
estimator.train(train_input, steps=200)
print(estimator.evaluate(test_input))

# %%
predictions = estimator.predict(lambda: [x_test[:5]])
print([int(prediction["class"]) for prediction in predictions], mnist.y_test[:5])

# %% [markdown]
# `predict` ends with the data. In the original for the IPU, it does not.
#
# ## Resume
#
# Checkpoints are in `model_dir`. Another `train`, in this process or the next, goes on from the newest: with the same weights,
# optimizer and random numbers, and at the same place in the data.

# %%
again = ipu.ipu_estimator.IPUEstimator(model_fn, config=config, params={"units": 64})
again.train(train_input, max_steps=300)
print(again.evaluate(test_input)["global_step"])

# %% [markdown]
# ## Train and evaluate in turns

# %%
print(train_and_evaluate(again, TrainSpec(train_input, max_steps=400), EvalSpec(test_input, steps=None)))

# %% [markdown]
# ## Name by name
#
# | `tf.estimator` | here |
# |---|---|
# | `Estimator`, `IPUEstimator` | `ipu.ipu_estimator.IPUEstimator` |
# | `RunConfig` | `ipu.ipu_run_config.RunConfig`, with `ipu.ipu_run_config.IPURunConfig` for devices and loops |
# | `EstimatorSpec`, `ModeKeys`, `TrainSpec`, `EvalSpec`, `train_and_evaluate`, `WarmStartSettings` | the same names in `openipu.estimator` |
# | `SessionRunHook`, `SessionRunArgs` | the same names in `openipu.estimator`; called around executions |
# | `LoggingTensorHook` | `ipu.ipu_session_run_hooks.IPULoggingTensorHook` |
# | several devices | `IPURunConfig(num_replicas=...)`, and the optimizer in `ipu.optimizers.CrossReplicaOptimizer` |
# | a model in stages | `ipu.ipu_pipeline_estimator.IPUPipelineEstimator` |
# | `export_saved_model` | not here: build a Keras model and call `model.export` |
# | feature columns, canned estimators | not here: use Keras' preprocessing layers and models |
#
# To run a script with `tf.estimator` as it is, use [`openipu run`](../scripts.md#estimators).
# The reference is [Estimators](../estimators.md).
