"""A dense layer that computes its product in parts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from openipu import _validate as validate
from openipu.engine.types import Array
from openipu.keras._registered import registered
from openipu.ops._serial_products import PRODUCTS

import keras

DIMENSIONS = ("input_columns", "input_rows_kernel_columns", "kernel_rows")


@registered
class SerialDense(keras.layers.Dense):
    """`keras.layers.Dense` that computes its matrix product in parts, one after another.

    What a product needs besides its inputs and its result is then needed for one part at a time. For inputs of shape
    (..., m, k) and a kernel of shape (k, n), `serialization_dimension` says what is divided: "input_columns" m,
    "input_rows_kernel_columns" k, and "kernel_rows" n.

    >>> layer = ipu.keras.layers.SerialDense(6, serialization_factor=3, serialization_dimension="kernel_rows")
    >>> layer(x).shape  # three products with two columns of the kernel each
    (32, 6)

    Args:
        units: The size of the outputs.
        serialization_factor: The number of parts. It divides the dimension.
        serialization_dimension: See above.
        **kwargs: Arguments of `keras.layers.Dense`.
    """

    def __init__(self, units: int, serialization_factor: int, serialization_dimension: str, **kwargs: Any) -> None:
        factor = validate.count("serialization_factor", serialization_factor)
        dimension = validate.choice("serialization_dimension", serialization_dimension, DIMENSIONS)
        super().__init__(units, **kwargs)
        self.serialization_factor, self.serialization_dimension = factor, dimension

    def build(self, input_shape: Sequence[int | None]) -> None:
        """Make kernel and bias."""
        known = dict(zip(DIMENSIONS, (input_shape[-2], input_shape[-1], self.units), strict=True))
        if len(input_shape) > 2 or self.serialization_dimension != "input_columns":
            self._check(known[self.serialization_dimension])
        super().build(input_shape)

    def call(self, inputs: Array, training: bool | None = None) -> Array:
        """The product, with bias and activation."""
        del training
        kernel = keras.ops.convert_to_tensor(self.kernel)
        size = {"input_columns": inputs.shape[-2], "input_rows_kernel_columns": inputs.shape[-1]}
        self._check(size.get(self.serialization_dimension, self.units))
        product_of = PRODUCTS[DIMENSIONS.index(self.serialization_dimension)]
        product = product_of(inputs, kernel, self.serialization_factor)
        if self.bias is not None:
            product = keras.ops.add(product, self.bias)
        result: Array = product if self.activation is None else self.activation(product)
        return result

    def compute_output_spec(self, inputs: keras.KerasTensor, training: bool | None = None) -> keras.KerasTensor:
        """The shape of the outputs. The batch size need not be known, so nothing is computed for it."""
        del training
        return keras.KerasTensor((*inputs.shape[:-1], self.units), self.compute_dtype)

    def _check(self, size: int | None) -> None:
        if size is not None and size % self.serialization_factor:
            raise ValueError(
                f"{self.name!r} divides {self.serialization_dimension!r} into {self.serialization_factor} parts, but "
                f"its size is {size}. Give a `serialization_factor` that divides it."
            )

    def get_config(self) -> dict[str, Any]:
        """Everything needed to make an equal layer."""
        own = {
            "serialization_factor": self.serialization_factor,
            "serialization_dimension": self.serialization_dimension,
        }
        return {**super().get_config(), **own}
