"""Tiny models of KerasHub with random weights, and data for them. KerasHub is imported where it is used."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import openipu  # noqa: F401 - chooses Keras' backend

import keras
import numpy as np

WORDS, LENGTH, WIDTH = 24, 8, 8
TEXT = {"vocabulary_size": WORDS, "num_layers": 2, "hidden_dim": WIDTH, "intermediate_dim": 16}
LLAMA = TEXT | {"num_query_heads": 2, "num_key_value_heads": 1}


@dataclass(frozen=True)
class Case:
    """How to make a model, and its inputs and labels."""

    make: Callable[[], keras.Model]
    data: Callable[[int, np.random.Generator], tuple[Any, Any]]
    loss: Any = "mse"
    mixes: bool = False
    """Whether the loss depends on which samples a micro-batch has."""


def crossentropy() -> keras.losses.Loss:
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def words(rows: int, rng: np.random.Generator, length: int = LENGTH) -> np.ndarray:
    return rng.integers(1, WORDS, (rows, length)).astype("int32")


def sentences(rows: int, rng: np.random.Generator) -> tuple[Any, Any]:
    x = {"token_ids": words(rows, rng), "padding_mask": np.ones((rows, LENGTH), "int32")}
    return x, words(rows, rng)


def numbers(rows: int, rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.normal(size=(rows, *shape)).astype("float32")


def gpt2() -> keras.Model:
    from keras_hub import models

    return models.GPT2CausalLM(models.GPT2Backbone(**TEXT, num_heads=2, max_sequence_length=LENGTH, dropout=0.0))


def gemma3() -> keras.Model:
    from keras_hub import models

    backbone = models.Gemma3Backbone(
        **LLAMA, image_size=16, head_dim=4, use_sliding_window_attention=True, sliding_window_size=4,
        vision_encoder=None, layer_norm_epsilon=1e-6, dropout=0.0,
    )  # fmt: skip
    return models.Gemma3CausalLM(preprocessor=None, backbone=backbone)


def llama() -> keras.Model:
    from keras_hub import models

    return models.LlamaCausalLM(models.LlamaBackbone(**LLAMA, dropout=0.0))


def mixtral() -> keras.Model:
    from keras_hub import models

    return models.MixtralCausalLM(models.MixtralBackbone(**LLAMA, num_experts=2, top_k=1, sliding_window=4))


def t5() -> keras.Model:
    from keras_hub import models

    return models.T5Backbone(**TEXT, num_heads=2, dropout=0.0)


def t5_data(rows: int, rng: np.random.Generator) -> tuple[Any, Any]:
    sides = ("encoder", "decoder")
    x = {f"{side}_token_ids": words(rows, rng) for side in sides}
    x |= {f"{side}_padding_mask": np.ones((rows, LENGTH), "int32") for side in sides}
    return x, {f"{side}_sequence_output": numbers(rows, rng, LENGTH, WIDTH) for side in sides}


def bert() -> keras.Model:
    from keras_hub import models

    return models.BertMaskedLM(models.BertBackbone(**TEXT, num_heads=2, max_sequence_length=LENGTH, dropout=0.0))


def bert_data(rows: int, rng: np.random.Generator) -> tuple[Any, Any]:
    x, _ = sentences(rows, rng)
    x |= {"segment_ids": np.zeros((rows, LENGTH), "int32")}
    x |= {"mask_positions": rng.integers(0, LENGTH, (rows, 2)).astype("int32")}
    return x, words(rows, rng, 2)


def vit() -> keras.Model:
    from keras_hub import models

    backbone = models.ViTBackbone((16, 16, 3), 8, 2, 2, WIDTH, 16, dropout_rate=0.0, attention_dropout=0.0)
    return models.ViTImageClassifier(backbone=backbone, num_classes=3)


def clip() -> keras.Model:
    """The embeddings of images and texts. The logits compare all of a batch with each other."""
    from keras_hub import models

    backbone = models.CLIPBackbone(
        models.CLIPVisionEncoder(8, WIDTH, 2, 2, 16, image_shape=(16, 16, 3)),
        models.CLIPTextEncoder(WORDS, WIDTH, WIDTH, 2, 2, 16, max_sequence_length=LENGTH),
        projection_dim=6,
    )
    images, texts = (next(t for t in backbone.inputs if t.name == name) for name in ("images", "token_ids"))
    return keras.Model(
        {"images": images, "token_ids": texts},
        {"images": backbone.get_vision_embeddings(images), "texts": backbone.get_text_embeddings(texts)},
    )


def whisper() -> keras.Model:
    from keras_hub import models

    return models.WhisperBackbone(
        **TEXT, num_heads=2, num_mels=6, max_encoder_sequence_length=LENGTH * 2, max_decoder_sequence_length=LENGTH,
        dropout=0.0,
    )  # fmt: skip


def whisper_data(rows: int, rng: np.random.Generator) -> tuple[Any, Any]:
    x = {"encoder_features": numbers(rows, rng, LENGTH * 2, 6)}
    x |= {"decoder_token_ids": words(rows, rng), "decoder_padding_mask": np.ones((rows, LENGTH), "int32")}
    return x, {f"{side}_sequence_output": numbers(rows, rng, LENGTH, WIDTH) for side in ("encoder", "decoder")}


CASES = {
    "gpt2": Case(gpt2, sentences, crossentropy),
    "gemma3": Case(gemma3, sentences, crossentropy),
    "llama": Case(llama, sentences, crossentropy),
    "mixtral": Case(mixtral, sentences, crossentropy, mixes=True),
    "t5": Case(t5, t5_data),
    "bert": Case(bert, bert_data, crossentropy),
    "vit": Case(vit, lambda rows, rng: (numbers(rows, rng, 16, 16, 3), rng.integers(0, 3, rows)), crossentropy),
    "clip": Case(clip, lambda rows, rng: (
        {"images": numbers(rows, rng, 16, 16, 3), "token_ids": words(rows, rng)},
        {"images": numbers(rows, rng, 6), "texts": numbers(rows, rng, 6)},
    )),
    "whisper": Case(whisper, whisper_data),
}  # fmt: skip
