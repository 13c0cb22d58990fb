"""Models with many layers, for Keras on any backend."""

from typing import Any

import keras
from keras import layers


def unet() -> keras.Model:
    """A small U-Net: 11 convolutions with BatchNormalization, two levels down and up."""

    def twice(x: Any, channels: int) -> Any:
        for _ in range(2):
            x = layers.Conv2D(channels, 3, padding="same", use_bias=False)(x)
            x = layers.Activation("relu")(layers.BatchNormalization()(x))
        return x

    x = inputs = keras.Input((64, 64, 3))
    skips = []
    for channels in (16, 32):
        x = twice(x, channels)
        skips.append(x)
        x = layers.MaxPooling2D(2)(x)
    x = twice(x, 64)
    for channels, skip in zip((32, 16), reversed(skips), strict=True):
        x = twice(layers.Concatenate()([layers.UpSampling2D(2)(x), skip]), channels)
    return keras.Model(inputs, layers.Conv2D(3, 1, activation="softmax")(x))


def resnet50() -> keras.Model:
    """ResNet-50 for small images."""
    return keras.applications.ResNet50(weights=None, input_shape=(64, 64, 3), classes=10)


def mobilenet() -> keras.Model:
    """A narrow MobileNetV2 for small images."""
    return keras.applications.MobileNetV2(weights=None, input_shape=(64, 64, 3), classes=10, alpha=0.35)


def gpt() -> keras.Model:
    """Six transformer blocks over 64 words."""
    inputs = keras.Input((64,), dtype="int32")
    x = layers.Embedding(256, 128)(inputs)
    for _ in range(6):
        h = layers.LayerNormalization()(x)
        x = layers.Add()([x, layers.MultiHeadAttention(4, 32)(h, h, use_causal_mask=True)])
        h = layers.Dense(512, activation="gelu")(layers.LayerNormalization()(x))
        x = layers.Add()([x, layers.Dense(128)(h)])
    return keras.Model(inputs, layers.Dense(256, activation="softmax")(x))


def lstm() -> keras.Model:
    """An LSTM that classifies 64 words."""
    inputs = keras.Input((64,), dtype="int32")
    x = layers.LSTM(64)(layers.Embedding(1000, 64)(inputs))
    return keras.Model(inputs, layers.Dense(2, activation="softmax")(x))
