"""Models and optimizers of which replicas and pipelines give the numbers of one device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import openipu  # noqa: F401 - chooses Keras' backend

import keras

import zoo

optimizers = keras.optimizers

# By the strength of an update: a rate that is not divided by it would let training diverge, and magnify rounding. So
# would the usual epsilons, which are smaller than the rounding of some gradients: with those, plain Keras on one device
# gives other numbers when only the rows within each batch change places.
OPTIMIZERS: dict[str, Callable[[int], Any]] = {
    "sgd": lambda s: optimizers.SGD(0.1 / s),
    "momentum": lambda s: optimizers.SGD(0.05 / s, momentum=0.9, nesterov=True),
    "adam": lambda _: optimizers.Adam(0.01, epsilon=1e-4),
    "adamw": lambda _: optimizers.AdamW(0.01, weight_decay=0.02, epsilon=1e-4),
    "rmsprop": lambda _: optimizers.RMSprop(0.01, momentum=0.5, epsilon=1e-4),
    "adafactor": lambda _: optimizers.Adafactor(0.02),
    "lion": lambda _: optimizers.Lion(0.003),
    "lamb": lambda _: optimizers.Lamb(0.01),
    "loss_scale": lambda s: optimizers.LossScaleOptimizer(optimizers.SGD(0.05 / s, momentum=0.9), initial_scale=256.0),
    "clipnorm": lambda _: optimizers.SGD(0.1, momentum=0.9, clipnorm=0.5),
    "global_clipnorm": lambda _: optimizers.Adam(0.01, global_clipnorm=0.5, epsilon=1e-4),
    "ema": lambda s: optimizers.SGD(0.05 / s, 0.9, use_ema=True, ema_momentum=0.8, ema_overwrite_frequency=2),
}


def encoder() -> keras.Model:
    """Embedding, mask, attention and layer normalisation, without dropout."""
    x = keras.layers.Embedding(20, 8, mask_zero=True)(inputs := keras.Input((6,), dtype="int32"))
    x = keras.layers.LayerNormalization()(x + keras.layers.MultiHeadAttention(2, 4, use_bias=False)(x, x))
    return keras.Model(inputs, keras.layers.Dense(3)(keras.layers.GlobalAveragePooling1D()(x)))


def recurrent() -> keras.Model:
    x = keras.layers.Bidirectional(keras.layers.GRU(3))(inputs := keras.Input((5, 3)))
    return keras.Model(inputs, keras.layers.Dense(1)(x))


CASES = zoo.CASES | {
    "encoder": zoo.Case(encoder, zoo.tokens, zoo.CASES["attention"].compile),
    "recurrent": zoo.Case(recurrent, zoo.sequences, zoo.CASES["lstm"].compile),
}
