# ---
# jupyter:
#   jupytext:
#     formats: py:percent
# ---

# %% [markdown]
# # Estimators, feeds and hooks
#
# A training loop that runs as one compiled program is fast, but you cannot look inside: Python gets its turn only between
# two launches. This tutorial shows the three tools for working with such a loop:
#
# - an **estimator** runs it for you, and saves and restores;
# - **hooks** are your code that the estimator calls between launches;
# - **feeds** are the queues through which data enters a running program and results leave it.
#
# We start with an estimator, watch it with hooks, and then write the same loop ourselves, with feeds.
# To port an existing `tf.estimator` script, read [coming from tf.estimator](from_estimator.py) instead.

# %%
import logging
import os
import sys
import tempfile
import threading
from pathlib import Path

import openipu as ipu
from openipu.estimator import (
    CheckpointSaverListener,
    EstimatorSpec,
    IPULoggingTensorHook,
    LoggingMode,
    ModeKeys,
    SessionRunArgs,
    SessionRunHook,
    group,
)

import keras
import numpy as np

BATCH = 32
images = int(os.environ.get("OPENIPU_TUTORIAL_IMAGES", "60000"))
mnist = ipu.datasets.mnist(images, images // 6)
x_train, x_test = (x.reshape(len(x), 784).astype("float32") / 255 for x in (mnist.x_train, mnist.x_test))
y_train, y_test = mnist.y_train.astype("int32"), mnist.y_test.astype("int32")

# %% [markdown]
# ## An estimator
#
# An estimator needs two functions. The first builds the model. It gets a batch and a mode, and returns a loss together with
# what to do with it: an update in training, a metric in evaluation.


# %%
def network(features):
    x = keras.layers.Dense(64, activation="relu")(features)
    return keras.layers.Dense(10)(x)


def mean_loss(labels, logits):
    return keras.ops.mean(keras.losses.sparse_categorical_crossentropy(labels, logits, from_logits=True))


def model_fn(features, labels, mode):
    logits = network(features)
    loss = mean_loss(labels, logits)
    if mode == ModeKeys.TRAIN:
        return EstimatorSpec(mode, loss=loss, train_op=keras.optimizers.Adam(0.001).minimize(loss))
    accuracy = keras.metrics.SparseCategoricalAccuracy()
    return EstimatorSpec(mode, loss=loss, eval_metric_ops={"accuracy": (accuracy, labels, logits)})


# %% [markdown]
# The second returns the data, batch by batch. For training we take endless shuffled batches, for testing one pass.


# %%
def train_input():
    return ipu.data.repeat(x_train, y_train, batch_size=BATCH, shuffle=True, seed=1)


def test_input():
    for first in range(0, len(x_test), BATCH):
        yield x_test[first : first + BATCH], y_test[first : first + BATCH]


# %% [markdown]
# A configuration says how many devices there are, and how many steps one launch runs: `iterations_per_loop`. Here a launch is
# 50 steps. Checkpoints go into `model_dir`.


# %%
def make_estimator(model_fn, **settings):
    cfg = ipu.config.IPUConfig()
    cfg.auto_select_ipus = 1
    ipu_config = ipu.ipu_run_config.IPURunConfig(iterations_per_loop=50, ipu_options=cfg)
    settings = {"model_dir": tempfile.mkdtemp(), "tf_random_seed": 1, "log_step_count_steps": None, **settings}
    return ipu.ipu_estimator.IPUEstimator(model_fn, config=ipu.ipu_run_config.RunConfig(ipu_config, **settings))


estimator = make_estimator(model_fn)
estimator.train(train_input, steps=200)
print(estimator.evaluate(test_input))

# %% [markdown]
# Those were 4 launches of 50 steps. The result counts all test images and says at which step the weights were saved.

# %% [markdown]
# ## A hook that watches
#
# A hook is a class with methods that the estimator calls around each launch. `before_run` may ask for the loss, and
# `after_run` gets it: the mean over the steps of that launch. You will see four lines.


# %%
class Watch(SessionRunHook):
    def before_run(self, run_context):
        return SessionRunArgs("loss")

    def after_run(self, run_context, run_values):
        print(f"step {run_context.global_step}: mean loss {float(run_values.results):.3f}")


estimator.train(train_input, hooks=[Watch()], steps=200)

# %% [markdown]
# The first line says 250, not 50: `train` went on from the checkpoint of the first call.
#
# `after_run` is called when a launch has begun. Reading the loss waits for its end, and the next launch begins after that.
# So a hook that reads something costs a short pause after each launch. If launches are short, read rarely.

# %% [markdown]
# ## A hook that ends the training
#
# `request_stop` ends the training after the current launch. This is early stopping in three lines. We allow 5000 steps, and
# expect to need fewer.


# %%
class StopBelow(Watch):
    def __init__(self, limit):
        self.limit = limit

    def after_run(self, run_context, run_values):
        if float(run_values.results) < self.limit:
            run_context.request_stop()


estimator.train(train_input, hooks=[StopBelow(0.15)], max_steps=5000)
print("stopped at step", estimator.get_variable_value("global_step"))

# %% [markdown]
# ## Looking inside the loop
#
# A hook that is called between launches knows one number per launch. What if you need a value from every step, or one that
# `model_fn` computes on the way? `IPULoggingTensorHook` takes tensors out of the running program. Call its `log` in
# `model_fn`, group it with the update, and list the hook in the specification.
#
# It writes to the logger `openipu`. We show that on the screen.

# %%
logger = logging.getLogger("openipu")
logger.setLevel(logging.INFO)
logger.addHandler(logging.StreamHandler(sys.stdout))
logger.propagate = False


def over_the_steps(values):
    loss, sure = values["loss"], values["sure"]
    return f"{len(loss)} steps: loss from {loss.max():.2f} down to {loss.min():.2f}, sure of {sure[-1]:.0%} at the end"


def watched_model_fn(features, labels, mode):
    logits = network(features)
    loss = mean_loss(labels, logits)
    sure = keras.ops.mean(keras.ops.max(keras.ops.softmax(logits), axis=-1))
    hook = IPULoggingTensorHook(every_n_iter=1, logging_mode=LoggingMode.ALL, formatter=over_the_steps)
    update = keras.optimizers.Adam(0.001).minimize(loss)
    train_op = group(update, hook.log({"loss": loss, "sure": sure}))
    return EstimatorSpec(mode, loss=loss, train_op=train_op, training_hooks=[hook])


make_estimator(watched_model_fn).train(train_input, steps=150)

# %% [markdown]
# Three launches, three lines. Each was made from arrays of 50 values, one for every step. `LoggingMode.LAST` logs the last
# step only. Without a `formatter`, the tensors are printed as `name = value`.

# %% [markdown]
# ## Checkpoints
#
# A listener is called whenever a checkpoint is saved: to copy it, to evaluate it, to send a message. With
# `save_checkpoints_steps=100`, you will see two lines.


# %%
class Tell(CheckpointSaverListener):
    def after_save(self, session, global_step_value):
        print("saved step", global_step_value)


saving = make_estimator(model_fn, save_checkpoints_steps=100)
saving.train(train_input, steps=200, saving_listeners=[Tell()])
print("the newest is", Path(saving.latest_checkpoint()).name)

# %% [markdown]
# ## The same loop by hand
#
# What did the estimator do? It made a model, a queue for the data, a loop, and a program. You can do that yourself. Four
# things are needed:
#
# 1. an **infeed**: a queue that reads a dataset, from which the program takes one batch per step;
# 2. an **outfeed**: a queue into which the program puts results for the host;
# 3. a function for **one step**;
# 4. `loops.repeat`, which runs it many times on the device.

# %%
strategy = ipu.ipu_strategy.IPUStrategy()
with strategy.scope():
    model = keras.Sequential([keras.Input((784,)), keras.layers.Dense(64, activation="relu"), keras.layers.Dense(10)])
    optimizer = keras.optimizers.Adam(0.001)
    infeed = ipu.ipu_infeed_queue.IPUInfeedQueue(train_input)
    outfeed = ipu.ipu_outfeed_queue.IPUOutfeedQueue(buffer_depth=64)


def step(x, y):
    def loss():
        return mean_loss(y, model(x, training=True))

    outfeed.enqueue(ipu.training.minimize(optimizer, loss, model.trainable_variables))


def train(steps):
    ipu.loops.repeat(steps, step, [], infeed)


# %% [markdown]
# `strategy.run` compiles `train` and launches it once. 300 steps later, the outfeed has 300 losses.

# %%
strategy.run(train, args=(300,))
losses = outfeed.dequeue()
print(losses.shape, f"from {losses[:10].mean():.3f} to {losses[-10:].mean():.3f}")

# %% [markdown]
# The weights are in the model, which is an ordinary Keras model. So everything else works, too:

# %%
predicted = model.predict(x_test, batch_size=BATCH, verbose=0).argmax(-1)
print(f"test accuracy {np.mean(predicted == y_test):.3f}")

# %% [markdown]
# ## Reading while the program runs
#
# `strategy.run` returns when the program has ended. To see losses earlier, read in a second thread. The order is kept, and
# nothing is lost. If the reader is slower than the program, the program waits.


# %%
def print_losses(ended):
    number = 0
    while True:
        last = ended.is_set()  # asked before reading, so that nothing comes after the last look
        for loss in outfeed:
            if number % 500 == 0:
                print(f"step {number}: loss {loss:.3f}")
            number += 1
        if last:
            print(number, "losses were read")
            return
        ended.wait(0.01)


ended = threading.Event()
reader = threading.Thread(target=print_losses, args=(ended,))
reader.start()
strategy.run(train, args=(2000,))
ended.set()
reader.join()

# %% [markdown]
# ## Data that ends
#
# `train_input` is endless. A dataset that is too short is an error that says how many batches are missing, and the weights
# stay as they are.

# %%
with strategy.scope():
    short = ipu.ipu_infeed_queue.IPUInfeedQueue([(x_train[:BATCH], y_train[:BATCH])] * 3)

try:
    strategy.run(lambda: ipu.loops.repeat(5, step, [], short))
except ipu.errors.OutOfRangeError as error:
    print(error)

# %% [markdown]
# ## Which one?
#
# | you want | use |
# |---|---|
# | to train a Keras model | `fit`: it is the shortest, and [as fast](../../benchmarks/results/cpu-estimators.md) |
# | something to happen between launches | a callback of `fit`, or a hook of an estimator |
# | values from every step of a launch | `IPULoggingTensorHook`, or an outfeed in a layer of your model |
# | to train and evaluate by the number of steps, with a `model_fn` | an estimator |
# | a loop that is not "batch, loss, update" | feeds and `loops.repeat` |
#
# With several devices, only the configuration changes: [estimators](../estimators.md#counting-and-replicas),
# [feeds](../feeds.md#your-own-program). `examples/infeed_outfeed.py` has the loop on replicas, and
# `examples/ipu_estimator_cnn/ipu_estimator_cnn.py` an estimator with all of its options.
