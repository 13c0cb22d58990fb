# ---
# jupyter:
#   jupytext:
#     formats: py:percent
# ---

# %% [markdown]
# # MNIST on one device
#
# This tutorial trains a small network on the MNIST digits with OpenIPU. You will load the data, define a model, choose a
# device, and train. If you know Keras, most of it is familiar. What is new takes five lines.
#
# To follow along, install OpenIPU as in the [quick start](../quickstart.md). Any machine will do.

# %% [markdown]
# ## 1. Import
#
# Import OpenIPU before Keras. It puts Keras on its JAX backend, and Keras reads that setting only once.

# %%
import os

import openipu as ipu

import keras

# %% [markdown]
# ## 2. Load the data
#
# `ipu.datasets.mnist` returns arrays. It looks for `mnist.npz` in the folder that the environment variable `OPENIPU_DATA`
# names, then asks Keras, which downloads the file once. Without either, it draws stand-in digits and warns you, because an
# accuracy on those says nothing about MNIST.
#
# Set `OPENIPU_TUTORIAL_IMAGES` to a small number if you only want to see it run.

# %%
images = int(os.environ.get("OPENIPU_TUTORIAL_IMAGES", "60000"))
mnist = ipu.datasets.mnist(images, images // 6)
x_train = mnist.x_train.astype("float32") / 255  # pixels from 0 to 1
x_test = mnist.x_test.astype("float32") / 255
print(x_train.shape, mnist.y_train.shape, "from", mnist.source)

# %% [markdown]
# The number of images does not have to be a multiple of the batch size. [Preparing data](preparing_data.py) explains why it
# used to.
#
# ## 3. Define the model
#
# An ordinary function that returns an ordinary Keras model.


# %%
def create_model():
    return keras.Sequential(
        [
            keras.Input((28, 28)),
            keras.layers.Flatten(),
            keras.layers.Dense(128, activation="relu"),
            keras.layers.Dense(10, activation="softmax"),
        ]
    )


# %% [markdown]
# ## 4. Choose a device
#
# One device is the first GPU or TPU core, or else the CPU. Nothing happens before `configure_ipu_system()`. All options
# are on the page [Configuration](../config.md).

# %%
cfg = ipu.config.IPUConfig()
cfg.auto_select_ipus = 1
cfg.configure_ipu_system()

# %% [markdown]
# ## 5. Make the model inside the scope of a strategy
#
# A model that is made inside the scope runs through compiled loops. A model that is made outside of it is plain Keras.
#
# `steps_per_execution=100` means that one launch of the compiled program runs 100 steps: it takes 100 batches, computes
# gradients, and updates the weights 100 times. Python only hands over data and reads the results. With the default of 1,
# every step is a launch of its own, and a network as small as this one spends most of its time waiting for the next.

# %%
strategy = ipu.ipu_strategy.IPUStrategy()
with strategy.scope():
    model = create_model()
    model.compile(
        optimizer=keras.optimizers.SGD(0.05),
        loss=keras.losses.SparseCategoricalCrossentropy(),
        metrics=["accuracy"],
        steps_per_execution=100,
    )

# %% [markdown]
# ## 6. Train
#
# `fit` takes what it takes in Keras. The time of the first epoch includes compiling.

# %%
history = model.fit(x_train, mnist.y_train, batch_size=32, epochs=4, verbose=2)

# %% [markdown]
# ## 7. Evaluate
#
# All test images count, including those of a last batch that is not full.

# %%
result = model.evaluate(x_test, mnist.y_test, batch_size=32, verbose=0, return_dict=True)
print(f"Test accuracy: {result['accuracy']:.3f}")

# %% [markdown]
# ## 8. Save
#
# The model is a Keras model, so it is saved as one. Plain Keras opens the file, without OpenIPU.

# %%
model.save("mnist.keras")
restored = keras.models.load_model("mnist.keras")
print(type(restored).__name__, restored.predict(x_test[:1], verbose=0).argmax(), mnist.y_test[0])

# %% [markdown]
# ## What to read next
#
# - [From plain Keras to a pipeline](keras_step_by_step.py): faster, step by step, and on several devices.
# - [Checkpoints](../checkpoints.md): a run that can be killed at any moment.
# - `examples/mnist/mnist.py` is this tutorial as a script with options.
