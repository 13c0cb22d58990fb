"""What the CIFAR-10 scripts share: the data, the network as a list of 18 layers, its loss, and how options are read."""

import argparse
import logging

import openipu as ipu

import keras


def load():
    """Images (uint8) and labels: CIFAR-10 from OPENIPU_DATA or Keras, otherwise stand-in images with a warning."""
    data = ipu.datasets.cifar10()
    return (data.x_train, data.y_train[:, 0]), (data.x_test, data.y_test[:, 0])


def count(text):
    """An option that is a whole number of 1 or more."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of 1 or more")
    return int(text)


def execution_steps(test_images, batch_size):
    """Steps of one execution: as many as the test images fill."""
    images = len(test_images)
    if batch_size > images:
        raise SystemExit(f"--batch-size {batch_size} is more than the {images} test images. Give at most {images}.")
    return images // batch_size


def show_log():
    """Show what estimators log: the loss and the speed."""
    logger = logging.getLogger("openipu")
    logger.setLevel(logging.INFO)
    logger.addHandler(logging.StreamHandler())
    logger.propagate = False


def layers():
    """The network in the order of its layers; a pipeline can cut it between any two."""
    return [
        keras.layers.Conv2D(32, 3, padding="same"),
        keras.layers.Activation("relu"),
        keras.layers.Conv2D(32, 3),
        keras.layers.Activation("relu"),
        keras.layers.Conv2D(32, 3),
        keras.layers.MaxPooling2D(),
        keras.layers.Dropout(0.25),
        keras.layers.Conv2D(64, 3, padding="same"),
        keras.layers.Activation("relu"),
        keras.layers.Conv2D(64, 3),
        keras.layers.Activation("relu"),
        keras.layers.MaxPooling2D(),
        keras.layers.Dropout(0.25),
        keras.layers.Flatten(),
        keras.layers.Dense(512),
        keras.layers.Activation("relu"),
        keras.layers.Dropout(0.5),
        keras.layers.Dense(10),
    ]


def network(images):
    """The logits for a batch of images. Pixels travel as bytes and become numbers from 0 to 1 on the device."""
    x = keras.ops.cast(images, "float32") / 255
    for layer in layers():
        x = layer(x)
    return x


def mean_loss(labels, logits):
    return keras.ops.mean(keras.losses.sparse_categorical_crossentropy(labels, logits, from_logits=True))


def train_input(x, y, batch_size):
    """An input_fn: endless shuffled batches, the same ones each time it is called."""
    return lambda: ipu.data.repeat(x, y, batch_size=batch_size, shuffle=True, seed=1)


def test_input(x, y, batch_size):
    """An input_fn: one pass, to the last image."""

    def batches():
        for begin in range(0, len(x), batch_size):
            yield x[begin : begin + batch_size], y[begin : begin + batch_size]

    return batches
