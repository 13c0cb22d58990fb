# ---
# jupyter:
#   jupytext:
#     formats: py:percent
# ---

# %% [markdown]
# # Preparing data
#
# Programs for the IPU have fixed shapes, so the port of TensorFlow for the IPU insists on data that divides evenly: the
# number of samples by the batch size, and the number of batches by `steps_per_execution`. Scripts therefore trim, repeat or
# pad their data.
#
# **Here you need none of the three.** `fit`, `evaluate` and `predict` take any number of samples and use each of them. This
# page shows what each of the three loses, what it costs, and what happens if you leave it out.

# %%
import os

import openipu as ipu

import keras
import numpy as np

BATCH = 64
images = int(os.environ.get("OPENIPU_TUTORIAL_IMAGES", "60000"))
mnist = ipu.datasets.mnist(images, images // 6)
x_train, y_train = mnist.x_train.astype("float32") / 255, mnist.y_train
x_test, y_test = mnist.x_test.astype("float32") / 255, mnist.y_test


def create_model():
    layers = [keras.Input((28, 28)), keras.layers.Flatten(), keras.layers.Dense(64, activation="relu")]
    return keras.Sequential([*layers, keras.layers.Dense(10, activation="softmax")])


strategy = ipu.ipu_strategy.IPUStrategy()
with strategy.scope():
    keras.utils.set_random_seed(1)
    model = create_model()
    model.compile(
        keras.optimizers.SGD(0.05),
        "sparse_categorical_crossentropy",
        metrics=["accuracy"],
        weighted_metrics=["accuracy"],
        steps_per_execution=50,
    )

# %% [markdown]
# ## Nothing at all
#
# The recommended way. The last batch is smaller than the others, and the last launch may have fewer steps. The smaller
# batch runs as a step of its own size at the end, so the numbers are those of plain Keras. It costs one more small program,
# which is compiled when the data first ends that way.

# %%
model.fit(x_train, y_train, batch_size=BATCH, epochs=1, verbose=2)
print(f"{len(x_train)} samples are {len(x_train) // BATCH} whole batches and {len(x_train) % BATCH} samples more")

# %% [markdown]
# ## Trim
#
# `ipu.data.trim` leaves out the last samples that do not fill a batch. It costs nothing: the results are views of the same
# arrays. It loses up to `batch_size - 1` samples, always the same ones. In training, that hardly matters. In evaluation, it
# changes the result a little: the accuracy below is that of fewer images.

# %%
x_whole, y_whole = ipu.data.trim(x_test, y_test, batch_size=BATCH)
print(f"{len(x_test) - len(x_whole)} of {len(x_test)} test images are lost")
print("trimmed:", model.evaluate(x_whole, y_whole, batch_size=BATCH, verbose=0, return_dict=True)["accuracy"])
print("all:    ", model.evaluate(x_test, y_test, batch_size=BATCH, verbose=0, return_dict=True)["accuracy"])

# %% [markdown]
# With replicas or accumulation, whole updates are more than whole batches. `multiple` says how many batches belong together.
# The more of them, the more is lost:

# %%
for replicas, accumulated in [(1, 1), (2, 1), (2, 4)]:
    kept = ipu.data.trim(x_train, batch_size=BATCH, multiple=replicas * accumulated)
    print(f"{replicas} replicas, {accumulated} micro-batches per update: {len(x_train) - len(kept)} samples lost")

# %% [markdown]
# ## Repeat
#
# `ipu.data.repeat` makes an endless dataset of full batches. A batch that reaches the end of the data continues at its
# beginning, so no sample is lost. But an epoch is then as long as you say, not one pass over the data. Tell `fit` how long,
# and leave the order to the dataset.
#
# It is worth using if you want to count in steps instead of passes. It is slower than arrays: arrays that fit stay on the
# device, while the batches of a dataset are built on the host and sent.

# %%
batches = ipu.data.repeat(x_train, y_train, batch_size=BATCH, shuffle=True, seed=1)
history = model.fit(batches, steps_per_epoch=20, epochs=2, shuffle=False, verbose=2)

# %% [markdown]
# ## Pad
#
# `ipu.data.pad` adds rows of zeros up to a whole number of batches, and weights of 1 for real rows and 0 for added ones. No
# sample is lost, but padding is the method with the most traps:
#
# - Only **weighted** metrics leave the added rows out. `metrics=["accuracy"]` counts them.
# - Layers that look at the whole batch see them: BatchNormalization takes its statistics over the zeros, too.
# - In training, Keras divides the loss of a batch by the number of all its rows. The last batch therefore counts less.
# - The added rows cost as much time as real ones.

# %%
x_padded, y_padded, weights = ipu.data.pad(x_test, y_test, batch_size=BATCH)
found = model.evaluate(x_padded, y_padded, sample_weight=weights, batch_size=BATCH, verbose=0, return_dict=True)
print(f"{len(x_padded) - len(x_test)} rows were added")
print({name: round(float(value), 4) for name, value in found.items()})
right = np.mean(model.predict(x_test, batch_size=BATCH, verbose=0).argmax(-1) == y_test)
print(f"counted by hand, over the real images: {right:.4f}")

# %% [markdown]
# ## Which one?
#
# | | samples lost | extra cost | use it |
# |---|---|---|---|
# | nothing | none | one small program, compiled once | always, unless one of the others is needed |
# | `trim` | up to a batch, or an update | none | to reproduce a script that trims |
# | `repeat` | none | batches are built on the host | to count epochs in steps |
# | `pad` | none | added rows; see the traps above | to reproduce a script that pads |
#
# tf.data, grain, `PyDataset`, torch's `DataLoader` and generators work as they do in Keras, without `drop_remainder`. How
# fast is a dataset? [`ipu.dataset_benchmark`](../feeds.md#how-fast-is-my-dataset) measures it.
