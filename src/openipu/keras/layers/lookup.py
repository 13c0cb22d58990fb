"""Embeddings and dropout."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

from openipu import _validate as validate
from openipu.keras._registered import registered

import keras

from ._arguments import Seed, first_seed, no_effect, refuse, seed_of, set_state

Initializer: TypeAlias = str | keras.initializers.Initializer


@registered
class Embedding(keras.layers.Embedding):
    """Turns whole numbers into vectors of a trained table: `(batch, length)` becomes `(batch, length, output_dim)`.

    >>> ipu.keras.layers.Embedding(input_dim=100, output_dim=16)(np.array([[1, 5, 7]])).shape
    (1, 3, 16)

    Args:
        input_dim: How many rows the table has: numbers go from 0 to `input_dim - 1`.
        output_dim: The length of the vectors.
        embeddings_initializer: Makes the table.
        embeddings_regularizer: None, and so are all arguments up to `input_length`; `mask_zero` is False.
        serialization_factor: Into how many parts an IPU splits the table. It divides `input_dim`; no effect here.
        **kwargs: Arguments of every Keras layer, such as `name` and `dtype`.
    """

    def __init__(
        self,
        input_dim: int,
        output_dim: int,
        embeddings_initializer: Initializer = "uniform",
        embeddings_regularizer: None = None,
        activity_regularizer: None = None,
        embeddings_constraint: None = None,
        mask_zero: bool = False,
        input_length: None = None,
        serialization_factor: int = 1,
        **kwargs: Any,
    ) -> None:
        refuse("Embedding", {
            "embeddings_regularizer": (embeddings_regularizer, None),
            "activity_regularizer": (activity_regularizer, None),
            "embeddings_constraint": (embeddings_constraint, None),
            "mask_zero": (mask_zero, False),
            "input_length": (input_length, None),
        })  # fmt: skip
        super().__init__(input_dim, output_dim, embeddings_initializer, **kwargs)
        self.serialization_factor = validate.count("serialization_factor", serialization_factor)
        if input_dim % self.serialization_factor:
            raise ValueError(
                f"`serialization_factor` is {self.serialization_factor}, which does not divide the {input_dim} rows "
                "of the table. Give a factor that does."
            )
        no_effect({"serialization_factor": (self.serialization_factor > 1, "a lookup reads only the rows it needs")})

    def build(self, input_shape: Sequence[int | None]) -> None:
        """Make the table."""
        if len(input_shape) != 2:
            raise ValueError(
                f"{self.name!r} got numbers of shape {tuple(input_shape)}. Give them as (batch, length); "
                "`keras.layers.Embedding` takes other shapes, too."
            )
        super().build(input_shape)

    def get_config(self) -> dict[str, Any]:
        """Everything needed to make an equal layer."""
        config = {**super().get_config(), "serialization_factor": self.serialization_factor}
        return {name: value for name, value in config.items() if name not in ("weights", "activity_regularizer")}


@registered
class Dropout(keras.layers.Dropout):
    """Sets a part of its inputs to zero in training, and scales the others so that their mean stays.

    >>> layer = ipu.keras.layers.Dropout(0.5, seed=1)
    >>> outputs = layer(np.ones(100, "float32"), training=True)
    >>> sorted(set(outputs.tolist()))
    [0.0, 2.0]

    Args:
        rate: The part that becomes zero, from 0 up to but not including 1.
        noise_shape: The shape of the random decisions; inputs along axes of length 1 share them.
        seed: Two whole numbers, or one. None: other decisions each time the layer is made.
        **kwargs: Arguments of every Keras layer.
    """

    def __init__(
        self, rate: float = 0.5, noise_shape: Sequence[int | None] | None = None, seed: Seed = None, **kwargs: Any
    ) -> None:
        rate = validate.number("rate", rate, least=0.0, below=1.0)
        given = seed_of("seed", seed)
        super().__init__(rate, noise_shape, first_seed(given), **kwargs)
        self.seed = given
        set_state(getattr(self, "seed_generator", None), given)
