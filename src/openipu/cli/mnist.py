"""What `openipu mnist` trains: the tutorial CNN."""

from typing import Any, Final

from openipu import datasets

import keras
import numpy as np

from .demo import Demo


def prepare(images: np.ndarray, labels: np.ndarray) -> tuple[Any, Any]:
    """Images with values from 0 to 1 and a channel axis, and one-hot labels."""
    return (images / np.float32(255))[..., None], np.eye(10, dtype=np.float32)[labels]


def tutorial_cnn() -> keras.Model:
    """Two convolutions with pooling, dropout, one dense layer."""
    inputs = keras.Input((28, 28, 1))
    x = keras.layers.Conv2D(32, 3, activation="relu")(inputs)
    x = keras.layers.MaxPooling2D(2)(x)
    x = keras.layers.Conv2D(64, 3, activation="relu")(x)
    x = keras.layers.MaxPooling2D(2)(x)
    x = keras.layers.Flatten()(x)
    x = keras.layers.Dropout(0.5)(x)
    return keras.Model(inputs, keras.layers.Dense(10, activation="softmax")(x))


DEMO: Final = Demo(
    title="the tutorial CNN",
    dataset="MNIST",
    stand_in="stand-in digits",
    load=datasets.mnist,
    prepare=prepare,
    model=tutorial_cnn,
    optimizer=keras.optimizers.SGD,
    loss=keras.losses.CategoricalCrossentropy(),
)
