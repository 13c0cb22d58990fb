"""The three models that are measured, for Keras on any backend and written by hand for JAX."""

from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Case:
    """A model, its data and its sizes."""

    name: str
    shape: tuple[int, ...]
    batch: int
    steps: int
    sparse: bool  # labels are class numbers instead of one-hot rows


CASES = {
    "mlp": Case("mlp", (28, 28), 32, 1875, True),
    "cnn": Case("cnn", (28, 28, 1), 64, 100, False),
    "cifar": Case("cifar", (32, 32, 3), 32, 40, True),
}


def data(case: Case, batch: int, steps: int) -> tuple[np.ndarray, np.ndarray]:
    """Random images and labels for `steps` batches."""
    rng = np.random.default_rng(0)
    x = rng.random((batch * steps, *case.shape), np.float32)
    labels = rng.integers(0, 10, batch * steps)
    return x, labels.astype(np.int32) if case.sparse else np.eye(10, dtype=np.float32)[labels]


def keras_api(name: str) -> Any:
    """The Keras model, ready to be compiled."""
    import keras
    from keras import layers as kl

    if name == "mlp":
        return keras.Sequential(
            [keras.Input((28, 28)), kl.Flatten(), kl.Dense(128, activation="relu"), kl.Dense(10, activation="softmax")]
        )
    if name == "cnn":
        return keras.Sequential(
            [
                keras.Input((28, 28, 1)),
                kl.Conv2D(32, 3, activation="relu"),
                kl.MaxPooling2D(2),
                kl.Conv2D(64, 3, activation="relu"),
                kl.MaxPooling2D(2),
                kl.Flatten(),
                kl.Dropout(0.5),
                kl.Dense(10, activation="softmax"),
            ]
        )
    return keras.Sequential(
        [
            keras.Input((32, 32, 3)),
            kl.Conv2D(32, 3, padding="same", activation="relu"),
            kl.Conv2D(32, 3, activation="relu"),
            kl.MaxPooling2D(2),
            kl.Dropout(0.25),
            kl.Conv2D(64, 3, padding="same", activation="relu"),
            kl.Conv2D(64, 3, activation="relu"),
            kl.MaxPooling2D(2),
            kl.Dropout(0.25),
            kl.Flatten(),
            kl.Dense(512, activation="relu"),
            kl.Dropout(0.5),
            kl.Dense(10, activation="softmax"),
        ]
    )


def compile_model(model: Any, case: Case, steps_per_execution: int, keras_accumulates: int = 1) -> None:
    """The same optimizer, loss and metrics for everyone."""
    import keras

    # Keras' own way to accumulate gradients, for comparison.
    extra = {"gradient_accumulation_steps": keras_accumulates} if keras_accumulates > 1 else {}
    optimizer = keras.optimizers.RMSprop(1e-4, **extra) if case.name == "cifar" else keras.optimizers.SGD(**extra)
    loss = "sparse_categorical_crossentropy" if case.sparse else "categorical_crossentropy"
    model.compile(optimizer, loss, metrics=["accuracy"], steps_per_execution=steps_per_execution)
