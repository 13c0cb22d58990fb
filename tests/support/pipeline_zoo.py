"""Small models, one per thing that cutting a model into stages can get wrong, with their inputs."""
# Keras decides the arguments of `call` and `build`.

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import openipu  # noqa: F401 - chooses Keras' backend

import keras
import numpy as np
from keras import layers, ops

from zoo import Scaled

BATCH = 4


@dataclass(frozen=True)
class Model:
    """How to make a model, and inputs for it."""

    make: Callable[[], keras.Model]
    inputs: Callable[[np.random.Generator], Any]
    policy: str = "float32"


def rows(*shape: int) -> Callable[[np.random.Generator], np.ndarray]:
    return lambda rng: rng.normal(size=(BATCH, *shape)).astype("float32")


def tokens(rng: np.random.Generator) -> np.ndarray:
    found = rng.integers(1, 12, (BATCH, 6))
    found[:, 4:] *= rng.integers(0, 2, (BATCH, 2))
    return found.astype("int32")


def stack() -> keras.Model:
    return keras.Sequential([keras.Input((6,)), *(layers.Dense(6, "tanh") for _ in range(4)), layers.Dense(6)])


def unbuilt_stack() -> keras.Model:
    model = keras.Sequential([layers.Dense(6, "tanh"), layers.BatchNormalization(), layers.Dense(6)])
    model.build((None, 6))
    return model


def skips() -> keras.Model:
    x = inputs = keras.Input((6,))
    first = x = layers.Dense(6, "tanh")(x)
    x = layers.Dense(6, "tanh")(x)
    x = layers.BatchNormalization()(x)
    x = layers.Dense(6)(layers.Dropout(0.3)(x))
    x = layers.Add()([x, first])
    x = layers.Concatenate()([layers.Dense(4)(x), inputs])
    return keras.Model(inputs, layers.Dense(6)(x))


def residual_images() -> keras.Model:
    x = inputs = keras.Input((8, 8, 3))
    x = layers.Conv2D(4, 3, padding="same", activation="relu")(x)
    for _ in range(2):
        y = layers.BatchNormalization()(layers.Conv2D(4, 3, padding="same")(x))
        x = ops.relu(x + y)
    return keras.Model(inputs, layers.Dense(6)(layers.GlobalAveragePooling2D()(x)))


def several() -> keras.Model:
    """Named inputs and outputs; one output is ready early, one is an input."""
    left, right = keras.Input((4,), name="left"), keras.Input((2,), name="right")
    early = layers.Dense(3, name="early")(left)
    x = layers.Dense(5, "tanh")(layers.Concatenate()([early, right]))
    return keras.Model({"left": left, "right": right}, {"late": layers.Dense(6)(x), "early": early, "same": right})


def listed() -> keras.Model:
    a, b = keras.Input((4,)), keras.Input((1,))
    x = layers.Dense(6)(a) * b
    return keras.Model([a, b], [layers.Dense(1)(x), (layers.Dense(6)(x), x)])


def shared() -> keras.Model:
    """A layer in three places, with losses and state."""
    inputs = keras.Input((6,))
    layer = Scaled()
    norm = layers.BatchNormalization()
    x = norm(layer(inputs))
    x = layers.Dense(6, "tanh", kernel_regularizer="l2")(x)
    x = norm(layer(x))
    x = layers.Dense(6, "tanh")(x)
    return keras.Model(inputs, layer(x))


def nested() -> keras.Model:
    """A model in a model in a model; the inner ones take other dtypes and ranks than they get."""
    inner_in = keras.Input((6, 1))
    inner = keras.Model(inner_in, layers.Dense(6, "tanh")(layers.Flatten()(inner_in)), name="inner")
    middle = keras.Sequential([keras.Input((6,)), layers.Dense(6), inner, layers.Dropout(0.4)], name="middle")
    inputs = keras.Input((6,))
    x = middle(inputs)
    x = layers.Dense(6)(x)
    x = middle(x) + inner(x)
    return keras.Model(inputs, layers.Dense(6)(x))


def nested_many() -> keras.Model:
    a, b = keras.Input((3,), name="a"), keras.Input((2,), name="b")
    pair = keras.Model({"a": a, "b": b}, [layers.Dense(3)(a), layers.Dense(2)(layers.Concatenate()([a, b]))])
    left, right = keras.Input((3,)), keras.Input((2,))
    first = pair({"a": left, "b": right})
    second = pair({"a": layers.Dense(3)(first[0]), "b": first[1]})
    return keras.Model([left, right], second[0])


def nested_losses() -> keras.Model:
    """A layer that adds a loss, called twice in a nested model: Keras keeps both losses. The model is called twice."""
    layer, inner_in = Scaled(), keras.Input((6,))
    inner = keras.Model(inner_in, layer(layers.Dense(6, "tanh")(layer(inner_in))))
    x = layers.Dense(6)(inputs := keras.Input((6,)))
    return keras.Model(inputs, inner(layers.Dense(6)(inner(x))))


def masked() -> keras.Model:
    """A mask goes over stage boundaries, also into the loss."""
    inputs = keras.Input((6,), dtype="int32")
    x = layers.Embedding(12, 6, mask_zero=True)(inputs)
    x = layers.LSTM(6, return_sequences=True)(layers.Dropout(0.2)(x))
    return keras.Model(inputs, [layers.TimeDistributed(layers.Dense(6))(x), layers.GRU(6)(layers.Dense(4)(x))])


def masked_nested() -> keras.Model:
    inner_in = keras.Input((6,), dtype="int32")
    inner = keras.Model(inner_in, layers.Embedding(12, 6, mask_zero=True)(inner_in))
    inputs = keras.Input((6,), dtype="int32")
    return keras.Model(inputs, layers.GRU(6)(layers.Dropout(0.1)(inner(inputs))))


def attention() -> keras.Model:
    inputs = keras.Input((6,), dtype="int32")
    x = layers.Embedding(12, 6, mask_zero=True)(inputs)
    x = layers.LayerNormalization()(x + layers.MultiHeadAttention(2, 3, dropout=0.1)(x, x, use_causal_mask=True))
    x = x + layers.Dense(6)(ops.gelu(layers.Dense(6)(x)))
    return keras.Model(inputs, layers.Dense(6)(layers.GlobalAveragePooling1D()(x)))


def shared_noise() -> keras.Model:
    """A random layer in every stage; in one of them twice."""
    drop, noise = layers.Dropout(0.4), layers.GaussianNoise(0.2)
    x = drop(layers.Dense(6)(inputs := keras.Input((6,))))
    x = noise(drop(layers.Dense(6)(x)))
    return keras.Model(inputs, drop(noise(drop(layers.Dense(6)(x)))))


def noisy() -> keras.Model:
    x = layers.GaussianNoise(0.3)(inputs := keras.Input((6,)))
    x = layers.Dense(6, activity_regularizer="l2")(layers.Dropout(0.3, seed=1)(x))
    return keras.Model(inputs, layers.Dropout(0.5)(layers.Dense(6)(layers.Dropout(0.3, seed=1)(x))))


class Blocks(keras.Model):
    """Its own `call`, with operations, an explicit `training`, a nested model, and a branch on the mode."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = [layers.Dense(6, "tanh") for _ in range(3)]
        self.drop, self.norm = layers.Dropout(0.3), layers.BatchNormalization()
        self.head = keras.Sequential([keras.Input((6,)), layers.Dense(4), layers.Dropout(0.2)])

    def call(self, inputs: Any, training: bool = False) -> Any:
        x = inputs["x"]
        for block in self.blocks:
            x = x + block(x)
        if training:
            x = x * 2.0
        x = self.norm(self.drop(x, training=training), training=False)
        rest = ops.reshape(x, (ops.shape(x)[0], 3, -1))
        return {"y": self.head(x, training=training), "z": ops.sum(rest, axis=1) + inputs["b"]}


class Block(keras.Model):
    """A subclassed model for use in others: dropout that inherits the mode, one that insists on it, a weight."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.first, self.second = layers.Dense(6, "tanh"), layers.Dense(6)
        self.drop, self.never, self.after = layers.Dropout(0.4), layers.Dropout(0.5), layers.Dropout(0.1)
        self.scale = self.add_weight(shape=(6,), initializer="ones")

    def call(self, inputs: Any, training: bool = False) -> Any:
        # What a call says holds for the calls after it that say nothing.
        x = self.after(self.never(self.drop(self.first(inputs)), training=False))
        return inputs + self.second(x) * self.scale + (1.0 if training else 0.0)


class Rows(keras.Model):
    """Asks for the number of rows, so that it can only be looked into where that is known."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = layers.Dense(6)

    def call(self, inputs: Any) -> Any:
        return ops.reshape(self.inner(ops.reshape(inputs, (ops.shape(inputs)[0], 2, 3))), (-1, 6))


def subclassed_inside() -> keras.Model:
    block = Block()
    x = layers.Dense(6)(inputs := keras.Input((6,)))
    x = layers.BatchNormalization()(block(Rows()(block(x))))
    return keras.Model(inputs, layers.Dense(6)(x))


class Outer(keras.Model):
    def __init__(self) -> None:
        super().__init__()
        self.told, self.untold, self.rows = Block(), Block(), Rows()

    def call(self, inputs: Any, training: bool = False) -> Any:
        return self.rows(self.untold(self.told(inputs, training=training)))


class Masks(keras.Model):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.drop = layers.Embedding(12, 6, mask_zero=True), layers.Dropout(0.3)
        self.attend, self.last = layers.MultiHeadAttention(2, 3), layers.GlobalAveragePooling1D()

    def call(self, inputs: Any, training: bool = False) -> Any:
        x = self.drop(self.embed(inputs), training=training)
        return self.last(x + self.attend(x, x, use_causal_mask=True), mask=ops.not_equal(inputs, 0))


class Tied(keras.Model):
    """A decoder whose last product uses the embedding's weights, and positions that are a layer of constants."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.positions = layers.Embedding(12, 6), layers.Embedding(6, 6)
        self.blocks = [layers.Dense(6, "gelu") for _ in range(2)]
        self.scale = self.add_weight(shape=(6,), initializer="ones")

    def call(self, inputs: Any) -> Any:
        x = self.embed(inputs) + self.positions(ops.arange(6))
        for block in self.blocks:
            x = (x + block(x)) * self.scale
        return ops.matmul(x, ops.transpose(self.embed.embeddings))


class TiedHead(layers.Layer):
    """A layer that uses the weights of another."""

    def __init__(self, embedding: layers.Embedding, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.embedding = embedding

    def call(self, inputs: Any) -> Any:
        return ops.matmul(inputs, ops.transpose(self.embedding.embeddings))


def tied_layers() -> keras.Model:
    embedding = layers.Embedding(12, 6)
    x = embedding(inputs := keras.Input((6,), dtype="int32"))
    return keras.Model(inputs, TiedHead(embedding)(layers.Dense(6, "tanh")(x)))


def tied_operation() -> keras.Model:
    embedding = layers.Embedding(12, 6)
    x = layers.Dense(6, "tanh")(embedding(inputs := keras.Input((6,), dtype="int32")))
    return keras.Model(inputs, ops.einsum("bsd,vd->bsv", layers.Dense(6)(x), embedding.embeddings))


def built(make: Callable[[], keras.Model], inputs: Callable[[], Any]) -> Callable[[], keras.Model]:
    def made() -> keras.Model:
        model = make()
        model(inputs())
        return model

    return made


def block_inputs(rng: np.random.Generator) -> dict[str, np.ndarray]:
    return {"x": rows(6)(rng), "b": rows(2)(rng)}


MODELS = {
    "stack": Model(stack, rows(6)),
    "unbuilt_stack": Model(unbuilt_stack, rows(6)),
    "skips": Model(skips, rows(6)),
    "residual_images": Model(residual_images, rows(8, 8, 3)),
    "several": Model(several, lambda rng: {"left": rows(4)(rng), "right": rows(2)(rng)}),
    # The second input comes without its last axis, and as whole numbers.
    "listed": Model(listed, lambda rng: [rows(4)(rng), rng.integers(1, 5, BATCH)]),
    "shared": Model(shared, rows(6)),
    "nested": Model(nested, rows(6)),
    "nested_losses": Model(nested_losses, rows(6)),
    "nested_many": Model(nested_many, lambda rng: [rows(3)(rng), rows(2)(rng)]),
    "masked": Model(masked, tokens),
    "masked_nested": Model(masked_nested, tokens),
    "attention": Model(attention, tokens),
    "noisy": Model(noisy, rows(6)),
    "shared_noise": Model(shared_noise, rows(6)),
    "subclassed": Model(built(Blocks, lambda: block_inputs(np.random.default_rng(0))), block_inputs),
    "subclassed_inside": Model(subclassed_inside, rows(6)),
    "subclassed_outside": Model(built(Outer, lambda: rows(6)(np.random.default_rng(0))), rows(6)),
    "mixed_inside": Model(subclassed_inside, rows(6), "mixed_bfloat16"),
    "masked_subclassed": Model(built(Masks, lambda: tokens(np.random.default_rng(0))), tokens),
    "tied": Model(built(Tied, lambda: tokens(np.random.default_rng(0))), tokens),
    "tied_layers": Model(tied_layers, tokens),
    "tied_operation": Model(tied_operation, tokens),
    "mixed_precision": Model(skips, rows(6), "mixed_bfloat16"),
    "mixed_nested": Model(nested, rows(6), "mixed_float16"),
    "mixed_tied": Model(built(Tied, lambda: tokens(np.random.default_rng(0))), tokens, "mixed_bfloat16"),
}
