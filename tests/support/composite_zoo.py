"""Layers that are made of layers, one per thing that looking into a layer can get wrong, and models of them."""
# Keras decides the arguments of `call` and `build`.

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import openipu  # noqa: F401 - chooses Keras' backend

import keras
import numpy as np
from keras import layers, ops

from pipeline_zoo import rows, tokens
from zoo import Scaled

WIDTH = 6


class Transformer(layers.Layer):
    """A block as people write it: attention, a residual, layers in a Sequential, a mode that is passed on."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.attend, self.drop = layers.MultiHeadAttention(2, 3, dropout=0.1), layers.Dropout(0.2)
        self.before, self.after = layers.LayerNormalization(), layers.LayerNormalization()
        self.mlp = keras.Sequential([layers.Dense(8, "gelu"), layers.Dropout(0.2), layers.Dense(WIDTH)])

    def call(self, inputs: Any, training: bool = False) -> Any:
        x = self.before(inputs)
        x = inputs + self.drop(self.attend(x, x, use_causal_mask=True), training=training)
        batch, length = ops.shape(x)[0], ops.shape(x)[1]
        x = ops.reshape(ops.reshape(x, (batch, length * WIDTH)), (batch, length, WIDTH))
        return x + 0.5 * self.mlp(self.after(x))


class OwnWeight(layers.Layer):
    """Weights of its own between its layers."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.first, self.last = layers.Dense(WIDTH, "tanh"), layers.Dense(WIDTH)

    def build(self, input_shape: Any) -> None:
        self.scale = self.add_weight(shape=(WIDTH,), initializer="ones", regularizer="l2")
        self.first.build(input_shape)
        self.last.build(input_shape)

    def call(self, inputs: Any) -> Any:
        return self.last(self.first(inputs) * self.scale) + inputs * ops.square(self.scale)


class Noise(layers.Layer):
    """Dropout that inherits the mode, one that insists on it, and a branch on the mode."""

    def __init__(self, width: int = WIDTH, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.first, self.last = layers.Dense(width, "tanh"), layers.Dense(width)
        self.drop, self.always = layers.Dropout(0.3, seed=3), layers.Dropout(0.3)

    def call(self, inputs: Any, training: bool | None = None) -> Any:
        x = self.last(self.always(self.drop(self.first(inputs)), training=True))
        return x * 2.0 if training else x


class Normed(layers.Layer):
    """Moving statistics, and layers in a list and a dictionary."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.listed = [layers.Dense(WIDTH), layers.BatchNormalization()]
        self.named = {"a": layers.Dense(WIDTH, "relu"), "b": layers.BatchNormalization(momentum=0.5)}

    def call(self, inputs: Any) -> Any:
        x = inputs
        for layer in (*self.listed, *self.named.values()):
            x = layer(x)
        return x - inputs[:, ::-1]


class Outer(layers.Layer):
    """Layers of layers of layers, one of them used twice, and several outputs."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.inner, self.noise, self.last = OwnWeight(), Noise(), Normed()

    def call(self, inputs: Any) -> Any:
        x = self.noise(self.inner(inputs))
        return {"x": self.last(self.inner(x)), "early": x}


class Losses(layers.Layer):
    """A layer that adds a loss, called twice: Keras keeps the losses of both calls."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.twice, self.between = Scaled(), layers.Dense(WIDTH, "tanh", activity_regularizer="l2")

    def call(self, inputs: Any) -> Any:
        return self.twice(self.between(self.twice(inputs)))


class Masked(layers.Layer):
    """Takes a mask that nobody passes, and hands it on."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.supports_masking = True
        self.first, self.attend = layers.Dense(WIDTH, "tanh"), layers.MultiHeadAttention(2, 3)
        self.last = layers.Dense(WIDTH)

    def call(self, inputs: Any, mask: Any = None) -> Any:
        x = self.first(inputs)
        if mask is not None:
            x = x * ops.expand_dims(ops.cast(mask, x.dtype), -1)
        x = x + self.attend(x, x, attention_mask=None if mask is None else mask[:, None, :])
        return ops.tanh(self.last(x))


class Embedded(layers.Layer):
    """Makes a mask for what comes after it."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.supports_masking = True
        self.words, self.places, self.drop = (
            layers.Embedding(12, WIDTH),
            layers.Embedding(6, WIDTH),
            layers.Dropout(0.2),
        )

    def call(self, inputs: Any) -> Any:
        return self.drop(self.words(inputs) + self.places(ops.arange(6)))

    def compute_mask(self, inputs: Any, previous: Any = None) -> Any:  # noqa: ARG002
        return ops.not_equal(inputs, 0)


class Pair(layers.Layer):
    """Two inputs, one by keyword, and masks for both."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.supports_masking = True
        self.left, self.right, self.join = layers.Dense(WIDTH), layers.Dense(WIDTH), layers.Dense(WIDTH, "tanh")

    def call(self, left: Any, right: Any = None, left_mask: Any = None, right_mask: Any = None) -> Any:
        x = self.join(self.left(left) + self.right(right))
        for mask in (left_mask, right_mask):
            x = x if mask is None else x * ops.expand_dims(ops.cast(mask, x.dtype), -1)
        return x


# --- models ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Model:
    """A model, its inputs, and how many of its layers can be looked into."""

    make: Callable[[], keras.Model]
    inputs: Callable[[np.random.Generator], Any]
    opened: int
    policy: str = "float32"


def between(*made: layers.Layer, shape: tuple[int, ...] = (WIDTH,)) -> keras.Model:
    x = layers.Dense(WIDTH)(inputs := keras.Input(shape))
    for layer in made:
        x = layer(x)
    return keras.Model(inputs, layers.Dense(3)(x["x"] + x["early"] if isinstance(x, dict) else x))


def twice(layer: layers.Layer) -> keras.Model:
    return between(layer, layers.Dense(WIDTH), layer)


def masked() -> keras.Model:
    x = Embedded()(inputs := keras.Input((6,), dtype="int32"))
    x = Masked()(Masked()(x))
    x = Pair()(x, right=layers.Dropout(0.1)(x))
    return keras.Model(inputs, layers.GRU(WIDTH)(layers.Masking()(x)))


def passed_on() -> keras.Model:
    """The mask goes through a layer that is looked into, up to the loss."""
    x = layers.Embedding(12, WIDTH, mask_zero=True)(inputs := keras.Input((6,), dtype="int32"))
    return keras.Model(inputs, layers.TimeDistributed(layers.Dense(3))(Masked()(x)))


class Subclassed(keras.Model):
    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.head = [Transformer(), Transformer()], layers.Dense(3)

    def call(self, inputs: Any, training: bool = False) -> Any:
        x = inputs
        for block in self.blocks:
            x = block(x, training=training)
        return self.head(x)


def subclassed() -> keras.Model:
    model = Subclassed()
    model(rows(4, WIDTH)(np.random.default_rng(0)))
    return model


def blocks() -> keras.Model:
    return between(Transformer(), Transformer(), shape=(4, WIDTH))


MODELS = {
    "blocks": Model(blocks, rows(4, WIDTH), 2),
    "own_weight": Model(lambda: between(OwnWeight()), rows(WIDTH), 1),
    "noise": Model(lambda: between(Noise()), rows(WIDTH), 1),
    "normed": Model(lambda: between(Normed()), rows(WIDTH), 1),
    "outer": Model(lambda: between(Outer()), rows(WIDTH), 4),
    "losses": Model(lambda: between(Losses()), rows(WIDTH), 1),
    "shared_noise": Model(lambda: twice(Noise()), rows(WIDTH), 1),
    "shared_losses": Model(lambda: twice(Losses()), rows(WIDTH), 1),
    "shared_norm": Model(lambda: twice(Normed()), rows(WIDTH), 1),
    "masked": Model(masked, tokens, 4),
    "passed_on": Model(passed_on, tokens, 1),
    "subclassed": Model(subclassed, rows(4, WIDTH), 2),
    "mixed_blocks": Model(blocks, rows(4, WIDTH), 2, "mixed_bfloat16"),
    "mixed_weight": Model(lambda: between(OwnWeight()), rows(WIDTH), 1, "mixed_float16"),
}
