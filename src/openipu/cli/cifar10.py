"""What `openipu cifar10` trains: the network of the CIFAR-10 examples."""

from typing import Any, Final

from openipu import datasets

import keras
import numpy as np

from .demo import Demo


def prepare(images: np.ndarray, labels: np.ndarray) -> tuple[Any, Any]:
    """Images as they are, because bytes take a quarter of the memory; labels without their second axis."""
    return images, labels[:, 0]


def layers() -> list[keras.layers.Layer]:
    """The 18 layers in their order. A pipeline can cut between any two."""
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


def network() -> keras.Model:
    """The layers as a model. Pixels become numbers from 0 to 1 on the device."""
    return keras.Sequential([keras.Input((32, 32, 3)), keras.layers.Rescaling(1 / 255), *layers()])


DEMO: Final = Demo(
    title="a network of 18 layers",
    dataset="CIFAR-10",
    stand_in="stand-in shapes",
    load=datasets.cifar10,
    prepare=prepare,
    model=network,
    # Unlike SGD, it does not care whether gradients are summed or averaged, so all ways to train learn alike.
    optimizer=keras.optimizers.Adam,
    loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
)
