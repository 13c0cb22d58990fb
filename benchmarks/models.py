"""The models that are measured, for Keras on any backend. Three are also written by hand for JAX (by_hand.py)."""

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
    sparse: bool = True  # labels are class numbers instead of one-hot rows
    classes: int = 10
    labels: tuple[int, ...] = ()  # the shape of one sample's labels
    words: int = 0  # inputs are numbers of so many words instead of images


CASES = {
    case.name: case
    for case in (
        Case("mlp", (28, 28), 32, 1875),
        Case("cnn", (28, 28, 1), 64, 100, sparse=False),
        Case("cifar", (32, 32, 3), 32, 40),
        Case("unet", (64, 64, 3), 8, 20, classes=3, labels=(64, 64)),
        Case("resnet50", (64, 64, 3), 8, 10),
        Case("mobilenet", (64, 64, 3), 8, 20),
        Case("gpt", (64,), 16, 20, classes=256, labels=(64,), words=256),
        Case("lstm", (64,), 32, 40, classes=2, words=1000),
    )
}
LARGER = {name: CASES[name] for name in ("unet", "resnet50", "mobilenet", "gpt", "lstm")}
"""The models with many layers, for which the time to the first step matters most."""


def data(case: Case, batch: int, steps: int, tail: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Random inputs and labels for `steps` batches, and `tail` samples more."""
    rng, count = np.random.default_rng(0), batch * steps + tail
    if case.words:
        x = rng.integers(0, case.words, (count, *case.shape)).astype(np.int32)
    else:
        x = rng.random((count, *case.shape), np.float32)
    labels = rng.integers(0, case.classes, (count, *case.labels))
    return x, labels.astype(np.int32) if case.sparse else np.eye(case.classes, dtype=np.float32)[labels]


def keras_api(name: str) -> Any:
    """The Keras model, ready to be compiled."""
    import keras
    from keras import layers as kl

    if name in LARGER:
        from benchmarks import larger_models

        return getattr(larger_models, name)()
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
