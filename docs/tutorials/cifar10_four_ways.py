# ---
# jupyter:
#   jupytext:
#     formats: py:percent
# ---

# %% [markdown]
# # CIFAR-10 four ways
#
# One network, trained four times: on one device, with a whole epoch per launch, on two replicas, and as a pipeline of two
# stages. The network and the data stay the same. What changes is who does the work, and when.
#
# The last three ways make each update from the same 200 images. Two of them even end with the same losses. You will see
# which, and why.
#
# If you have not used OpenIPU before, begin with [MNIST on one device](mnist.py).

# %% [markdown]
# ## The data
#
# CIFAR-10 has 60,000 small colour photographs of ten kinds of things. `ipu.datasets.cifar10` looks for `cifar10.npz` in the
# folder that the environment variable `OPENIPU_DATA` names, and then asks Keras, which downloads the images once. Without
# either, it draws stand-in images and says so.
#
# Set `OPENIPU_TUTORIAL_IMAGES` to a small number if you only want to see it run.

# %%
import os
import time

import openipu as ipu
from openipu.cli import cifar10

import keras

images = int(os.environ.get("OPENIPU_TUTORIAL_IMAGES", "50000"))
data = ipu.datasets.cifar10(images)
x, y = data.x_train, data.y_train[:, 0]
print(x.shape, x.dtype, "from", data.source)

# %% [markdown]
# The images stay bytes, which take a quarter of the memory of floats. The first layer of the network turns them into numbers
# from 0 to 1, on the device.

# %% [markdown]
# ## The network
#
# We take the network that the command `openipu cifar10` trains: convolutions, pooling, dropout and two dense layers.

# %%
cifar10.network().summary(line_length=80)

# %% [markdown]
# All four ways use the two functions below. The seed gives every model the same first weights and the same order of images.
# The clock counts the second epoch only, because the first one includes compiling.

# %%
BATCH = 50
STEPS = max(len(x) // (4 * BATCH), 1) * 4  # batches in an epoch, in groups of four
results = []


class Clock(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        self.began = time.perf_counter()

    def on_epoch_end(self, epoch, logs=None):
        self.seconds = time.perf_counter() - self.began


def devices(number):
    cfg = ipu.config.IPUConfig()
    cfg.auto_select_ipus = number
    cfg.configure_ipu_system()
    keras.utils.set_random_seed(1)
    return ipu.ipu_strategy.IPUStrategy()


def train(model, name, steps_per_execution):
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("adam", loss, metrics=["accuracy"], steps_per_execution=steps_per_execution)
    clock = Clock()
    history = model.fit(x, y, batch_size=BATCH, epochs=2, verbose=2, callbacks=[clock])
    results.append((name, clock.seconds / STEPS * 1000, *history.history["loss"]))


# %% [markdown]
# ## Way 1: one device
#
# This is the way of plain Keras: one launch for each batch, and one update of the weights after each.

# %%
with devices(1).scope():
    model = cifar10.network()
    train(model, "one device", steps_per_execution=1)

# %% [markdown]
# ## Way 2: an epoch per launch, an update per four batches
#
# Two changes. The first: `steps_per_execution` makes the whole epoch one launch. Milliseconds per step of this network, as
# measured on [two CPU cores](../../benchmarks/results/cpu.md) and on [a GPU](../../benchmarks/results/h200.md):
#
# |  | a launch per step | a launch per epoch |
# |---|---|---|
# | two CPU cores, batches of 32 | 29 | 26 |
# | one H200, batches of 16 | 1.2 | 0.21 |
#
# The second: `set_gradient_accumulation_options(4)` adds up the gradients of four batches before the weights change. So an
# update is made from 200 images, with the memory of 50. Adam does not mind that gradients are added up and not averaged. With
# SGD, you would [lower the learning rate](../replication.md#learning-rate).
#
# There are a quarter as many updates now, so the losses differ from those of way 1.

# %%
with devices(1).scope():
    model = cifar10.network()
    model.set_gradient_accumulation_options(4)
    train(model, "accumulation", steps_per_execution=STEPS)

# %% [markdown]
# ## Way 3: two replicas
#
# Ask for two devices, and the model is copied to both. In each step, each of them takes a batch. Two steps on two replicas are
# four batches, so an update is made from the same 200 images as before. But a replica runs only half of the steps.
#
# The losses are close to those of way 2, and not the same. Two replicas compute what one device computes with batches of 100,
# and for these, the dropout layers draw other random numbers than for twice as many batches of 50.

# %%
with devices(2).scope():
    model = cifar10.network()
    model.set_gradient_accumulation_options(2)
    train(model, "two replicas", steps_per_execution=STEPS // 2)

# %% [markdown]
# On a machine with several GPUs, each replica has its own. On a CPU, devices are virtual and share the cores. That shows how it
# works, but not how fast it can be.

# %% [markdown]
# ## Way 4: a pipeline of two stages
#
# Replicas need the whole model on each device. A pipeline does not: each device holds one stage. Let OpenIPU find the cut. It
# looks for stages that cost about the same, and prints what it found.

# %%
with devices(2).scope():
    model = cifar10.network()
    model.set_pipeline_stage_assignment("auto", stages=2)

# %% [markdown]
# An update takes four batches again. They follow each other through the stages, so that both devices have something to do. In
# this table, each column is a tick, `F0:3` is the forward of stage 0 for batch 3, and `B0:3` its backward.

# %%
print(*ipu.schedules.render(ipu.schedules.Grouped().table(2, 4)), sep="\n")

# %% [markdown]
# The devices wait where there is a `-`. The more batches an update has, the less that counts. With four, the updates are
# those of way 2, and so are the losses, except for rounding: where a layer runs does not change what it computes.

# %%
model.set_pipelining_options(gradient_accumulation_steps_per_replica=4)
train(model, "pipeline", steps_per_execution=STEPS)

# %% [markdown]
# ## Side by side
#
# The time of a batch in the second epoch, and the loss in both. Compare the second line with the last one.

# %%
print("way           ms per batch    epoch 1    epoch 2")
for name, milliseconds, first, second in results:
    print(f"{name:14}{milliseconds:12.1f}{first:11.4f}{second:11.4f}")

# %% [markdown]
# | way | what changes in the code | devices | batches per update |
# |---|---|---|---|
# | one device | a configuration and a scope | 1 | 1 |
# | accumulation | `steps_per_execution`, `set_gradient_accumulation_options(4)` | 1 | 4 |
# | two replicas | `auto_select_ipus = 2` | 2 | 2 on each of 2 replicas |
# | pipeline | a cut, and `set_pipelining_options` | 2 | 4 |
#
# ## On the command line
#
# `openipu cifar10` trains this network. These commands are the four ways:
#
# ```
# openipu cifar10 --batch-size 50 --steps-per-execution 1
# openipu cifar10 --batch-size 50 --gradient-accumulation-count 4
# openipu cifar10 --batch-size 50 --gradient-accumulation-count 2 --ipus 2
# openipu cifar10 --batch-size 50 --gradient-accumulation-count 4 --stages 2
# ```
#
# `examples/cifar10/` has scripts for each way as well, with [estimators](estimators_feeds_hooks.py) instead of `fit`. After 5
# epochs on the real photographs, they find the right class for [64 to 74 of 100](../../benchmarks/results/cifar10.md) of them.
