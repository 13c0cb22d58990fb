# ---
# jupyter:
#   jupytext:
#     formats: py:percent
# ---

# %% [markdown]
# # From plain Keras to a pipeline
#
# One small convolutional network, five times: in plain Keras, on one device, with many steps per launch, on two replicas,
# and as a pipeline of two stages. Each step changes a few lines of the one before, and we look at what it brings - also
# where it brings nothing.
#
# The steps are measured on MNIST with `python -m benchmarks.tutorial`, on two CPU cores. The last two columns are what the
# original tutorial for the IPU reports:
#
# |  | options | us per step | accuracy | test accuracy | tutorial: us per step | accuracy |
# |---|---|---|---|---|---|---|
# | plain Keras on the CPU |  | 22201 | 0.9325 | 0.9606 | 10 000 (CPU) | 0.9289 |
# | one device, one launch per step | `--use-ipu --steps-per-execution 1` | 6448 | 0.9307 | 0.9603 | 3 000 | 0.9294 |
# | one device, one launch per epoch | `--use-ipu` | 6544 | 0.9305 | 0.9595 | 222 | 0.9326 |
# | two replicas | `--use-ipu --ipus 2` | 4831 | 0.9315 | 0.9579 | 134 | 0.9304 |
# | pipeline of two stages | `--use-ipu --pipelining` | 11459 | 0.9294 | 0.9598 |  |  |
#
# The options are those of `examples/keras_tutorial/completed_example/main.py`, which has all steps in one script.

# %% [markdown]
# ## The starting point: plain Keras
#
# Data, a model, `compile`, `fit`. Nothing here belongs to OpenIPU, except that importing it puts Keras on JAX, and that it
# loads the data.

# %%
import os
import time

import openipu as ipu

import keras
import numpy as np

BATCH = 64
EPOCHS = 3
images = int(os.environ.get("OPENIPU_TUTORIAL_IMAGES", "60000"))
mnist = ipu.datasets.mnist(images, images // 6)


def prepare(x, y):
    """Pixels from 0 to 1 with an axis for the channel, and labels as one-hot rows."""
    return np.expand_dims(x.astype("float32") / 255, -1), keras.utils.to_categorical(y, 10)


x_train, y_train = prepare(mnist.x_train, mnist.y_train)
x_test, y_test = prepare(mnist.x_test, mnist.y_test)


def model_fn():
    inputs = keras.Input((28, 28, 1))
    x = keras.layers.Conv2D(32, 3, activation="relu")(inputs)
    x = keras.layers.MaxPooling2D()(x)
    x = keras.layers.Conv2D(64, 3, activation="relu")(x)
    x = keras.layers.MaxPooling2D()(x)
    x = keras.layers.Flatten()(x)
    x = keras.layers.Dropout(0.5)(x)
    return inputs, keras.layers.Dense(10, activation="softmax")(x)


class Clock(keras.callbacks.Callback):
    """Microseconds per step in the last epoch. The first one includes compiling."""

    def on_epoch_begin(self, epoch, logs=None):
        self.began = time.perf_counter()

    def on_epoch_end(self, epoch, logs=None):
        self.us_per_step = (time.perf_counter() - self.began) / self.params["steps"] * 1e6


def train(model):
    clock = Clock()
    model.fit(x_train, y_train, batch_size=BATCH, epochs=EPOCHS, verbose=2, callbacks=[clock])
    result = model.evaluate(x_test, y_test, batch_size=BATCH, verbose=0, return_dict=True)
    print(f"{clock.us_per_step:.0f} us per step, test accuracy {result['accuracy']:.3f}")


model = keras.Model(*model_fn())
model.compile("sgd", "categorical_crossentropy", metrics=["accuracy"])
train(model)

# %% [markdown]
# ## Step 1: one device
#
# Choose a device, and make the model inside the scope of a strategy. `model_fn` and `train` stay as they are.

# %%
cfg = ipu.config.IPUConfig()
cfg.auto_select_ipus = 1
cfg.configure_ipu_system()

strategy = ipu.ipu_strategy.IPUStrategy()
with strategy.scope():
    model = keras.Model(*model_fn())
    model.compile("sgd", "categorical_crossentropy", metrics=["accuracy"])
train(model)

# %% [markdown]
# It computes the same. On a CPU it is already faster, because OpenIPU [rewrites convolutions](../convolutions.md). On a
# GPU, do not expect a difference yet: every step is still a launch of its own.

# %% [markdown]
# ## Step 2: many steps per launch
#
# `steps_per_execution` says how many steps one launch runs. Here it is a whole epoch. The number need not divide anything:
# a last launch with fewer steps and a last batch with fewer images are fine.

# %%
with strategy.scope():
    model = keras.Model(*model_fn())
    model.compile("sgd", "categorical_crossentropy", metrics=["accuracy"], steps_per_execution=len(x_train) // BATCH)
train(model)

# %% [markdown]
# This is the step that matters most, above all for small models on fast devices: Python no longer takes part in every
# step. The price is that Python no longer takes part in every step. Callbacks are called once per launch, not once per
# batch. If you need them at every batch, `model.set_asynchronous_callbacks(True)` brings them back
# ([feeds](../feeds.md#asynchronous-callbacks)).

# %% [markdown]
# ## Step 3: two replicas
#
# Ask for two devices. The model is then copied to both, each takes a batch of 64 in every step, and their gradients are
# summed before the weights change. There are half as many updates, each from twice as many images.
#
# Because gradients are summed and not averaged, plain SGD takes larger steps with more replicas. Here that is what we want:
# half as many updates, each twice as strong. See [learning rate](../replication.md#learning-rate) before you use eight.

# %%
cfg = ipu.config.IPUConfig()
cfg.auto_select_ipus = 2
cfg.configure_ipu_system()

with strategy.scope():
    model = keras.Model(*model_fn())
    model.compile(
        "sgd", "categorical_crossentropy", metrics=["accuracy"], steps_per_execution=len(x_train) // (2 * BATCH)
    )
train(model)

# %% [markdown]
# On two GPUs, expect a bit less than twice the speed, since gradients have to be exchanged. On one CPU, the two devices are
# virtual and share the cores. This network still gains a little; a small dense network is faster on one device
# ([measured](../../benchmarks/results/cpu-replicas.md)).

# %% [markdown]
# ## Step 4: a pipeline
#
# A model that does not fit on one device is cut into stages. Layers made inside `PipelineStage(0)` run on the first device,
# those inside `PipelineStage(1)` on the second. While the second works on one batch, the first already has the next one.
#
# The weights change only after several batches have passed through all stages. With the Grouped schedule, the number of
# these batches must be a multiple of twice the number of stages.


# %%
def staged_model_fn():
    inputs = keras.Input((28, 28, 1))
    with ipu.keras.PipelineStage(0):
        x = keras.layers.Conv2D(32, 3, activation="relu")(inputs)
        x = keras.layers.MaxPooling2D()(x)
        x = keras.layers.Conv2D(64, 3, activation="relu")(x)
    with ipu.keras.PipelineStage(1):
        x = keras.layers.MaxPooling2D()(x)
        x = keras.layers.Flatten()(x)
        x = keras.layers.Dropout(0.5)(x)
        outputs = keras.layers.Dense(10, activation="softmax")(x)
    return inputs, outputs


with strategy.scope():
    model = keras.Model(*staged_model_fn())
    model.set_pipelining_options(
        gradient_accumulation_steps_per_replica=8,
        pipeline_schedule=ipu.ops.pipelining_ops.PipelineSchedule.Grouped,
    )
    model.compile("sgd", "categorical_crossentropy", metrics=["accuracy"], steps_per_execution=48)  # 6 updates
model.print_pipeline_stage_assignment_summary()
train(model)

# %% [markdown]
# The numbers are those of one device that adds up the gradients of 8 batches. **The speed is not.** Nine tenths of this
# network's work are in its first stage, so the second device mostly waits, and the pipeline is slower than one device.
# Pipelines are for models that do not fit on one device, and they need stages of about the same cost.
# `model.set_pipeline_stage_assignment("auto", stages=2)` looks for such a cut ([pipelining](../pipelining.md#automatically)).
#
# The schedule as a table: each column is a tick, `F0:3` is the forward of stage 0 for batch 3, `B0:3` its backward.

# %%
print(*ipu.schedules.render(ipu.schedules.Grouped().table(2, 8)), sep="\n")

# %% [markdown]
# With four devices, the same code gives two replicas of the two stages.
#
# ## What you have seen
#
# | step | what changes in the code | when it pays |
# |---|---|---|
# | one device | a configuration and a scope | on CPUs, if there are convolutions |
# | `steps_per_execution` | one argument | almost always; the smaller the model, the more |
# | replicas | one number | with several real devices, and enough work per update |
# | a pipeline | a stage for each layer | when the model does not fit on one device |
#
# Next: the same on [CIFAR-10](cifar10_four_ways.py), [preparing data](preparing_data.py), or [coming from Keras](from_keras.py) with a model of your own.
