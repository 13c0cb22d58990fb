# ---
# jupyter:
#   jupytext:
#     formats: py:percent
# ---

# %% [markdown]
# # Coming from Keras
#
# You have a Keras model, and it trains. This page shows what to change, and when that pays.
#
# ## When it pays
#
# Plain Keras launches a compiled program for every step. OpenIPU launches one program for many steps.
# So it saves a certain time per step, however long the step itself takes. On the machine with the H200, that time is
# 0.6 to 1 millisecond:
#
# | a step of your model takes, in plain Keras on a GPU | what to expect |
# |---|---|
# | about 1 ms: small networks, small batches | 5 to 20 times faster |
# | about 5 ms | a tenth or two |
# | 30 ms or more: large models, large batches | **next to nothing.** The device was hardly ever waiting |
#
# The first line is [measured](../../benchmarks/results/h200.md); the others follow from it. On a CPU, networks with
# convolutions are faster than in Keras on JAX whatever their size ([measured](../../benchmarks/results/cpu.md)), because
# OpenIPU rewrites them. Dense ones save the launches, and nothing else.
#
# Besides speed, there are reasons for which the size of a step does not matter: replicas, pipelines for models that do not fit
# on one device, gradient accumulation, and runs that [resume bit for bit](../checkpoints.md).
#
# It does **not** pay if you debug a model step by step, or if your callbacks have to change weights after every batch.

# %% [markdown]
# ## What to change
#
# Here is a complete script. The lines with a number are new.

# %%
import os

import openipu as ipu  # 1: before keras, which it puts on JAX

import keras

images = int(os.environ.get("OPENIPU_TUTORIAL_IMAGES", "60000"))
mnist = ipu.datasets.mnist(images, images // 6)
x, y = mnist.x_train.astype("float32") / 255, mnist.y_train

cfg = ipu.config.IPUConfig()  # 2
cfg.auto_select_ipus = 1  # 3: how many devices
cfg.configure_ipu_system()  # 4

with ipu.ipu_strategy.IPUStrategy().scope():  # 5
    model = keras.Sequential(
        [
            keras.Input((28, 28)),
            keras.layers.Flatten(),
            keras.layers.Dense(128, activation="relu"),
            keras.layers.Dropout(0.2),
            keras.layers.Dense(10, activation="softmax"),
        ]
    )
    model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"], steps_per_execution=100)  # 6

history = model.fit(x, y, batch_size=32, epochs=2, validation_split=0.1, verbose=2)

# %% [markdown]
# Lines 2 to 4 can be left out: without them, one device is used.
#
# Everything else stays: `fit`, `evaluate`, `predict`, callbacks, validation, class and sample weights, your own layers,
# losses, metrics and `train_step`, mixed precision, saving. Layers that call functions of TensorFlow or torch
# do not carry over: write them with `keras.ops`, or run TensorFlow scripts with [`openipu run`](../scripts.md).
#
# ## Is it the same model?
#
# Yes. Train it with the same seed inside and outside of the scope, and compare the weights:

# %%
import contextlib

import numpy as np


def trained(scope):
    keras.utils.set_random_seed(7)
    with scope:
        model = keras.Sequential([keras.Input((28, 28)), keras.layers.Flatten(), keras.layers.Dense(10)])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.SGD(0.1), loss, steps_per_execution=4)
    model.fit(x[:300], y[:300], batch_size=32, epochs=2, verbose=0)
    return model.get_weights()


plain = trained(contextlib.nullcontext())
ours = trained(ipu.ipu_strategy.IPUStrategy().scope())
print("largest difference:", max(np.abs(a - b).max() for a, b in zip(plain, ours, strict=True)))

# %% [markdown]
# [Keras behaviour](../keras-behaviour.md) lists everything that was compared in this way, and the few things that differ on
# purpose. The ones you may notice:
#
# | in plain Keras | here |
# |---|---|
# | batch callbacks run after every execution of `steps_per_execution` | the same; `model.set_asynchronous_callbacks(True)` calls them for every step while the program runs |
# | a callback can read weights at any time | it sees the weights between executions |
# | an integer label that is no class trains silently | it is an error that names the row |
# | `run_eagerly=True` | works on one device, by Keras' own loop |
#
# ## More from the same model
#
# **A larger batch than fits.** One update from 8 batches of 32, at about the cost of 8 plain steps:

# %%
model.set_gradient_accumulation_options(8, "mean")
model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"], steps_per_execution=96)
history = model.fit(x, y, batch_size=32, epochs=1, verbose=2)

# %% [markdown]
# **More devices.** Change line 3. Gradients are summed over replicas, so look at
# [the learning rate](../replication.md#learning-rate) if you use SGD. On a machine without GPUs, devices are virtual and share
# the cores: good for trying things out, not for speed.
#
# **Runs that survive.** `callbacks=[ipu.callbacks.Checkpoint("run")]`: kill the process, start it again, and it ends with the
# same bits.
#
# **A look inside.** `callbacks=[ipu.callbacks.Report("out")]` writes a page that shows where the time went. If it shows that
# the devices wait for data, or hardly ever for the host, you know what to change, or that there is nothing to gain.
