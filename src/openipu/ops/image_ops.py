"""Preparation of images on the device."""

from __future__ import annotations

from openipu.engine.types import Array

import jax.numpy as jnp
from jax.typing import ArrayLike

from ._operation import array, operation

__all__ = ["normalise_image"]


@operation
def normalise_image(
    image: ArrayLike,
    channel_offsets: ArrayLike,
    channel_scales: ArrayLike,
    scale: float = 1,
    name: str | None = None,  # noqa: ARG001
) -> Array:
    """`(image * scale - channel_offsets) * channel_scales`, with a fourth channel of zeros.

    >>> pixels = np.full((1, 1, 3), 255, "uint8")
    >>> print(ipu.image_ops.normalise_image(pixels, [0.5, 0.5, 0.5], [2, 2, 2], scale=1 / 255))
    [[[1. 1. 1. 0.]]]

    Args:
        image: Images with 3 channels along the last axis, of dtype uint8, float16 or float32.
        channel_offsets: A number for each channel.
        channel_scales: A number for each channel.
        scale: A number for all channels.
        name: A name for the operation in profiles.

    Returns:
        Images with 4 channels, in the dtype of the image; in float16 if that is uint8.
    """
    pixels = array(image)
    dtype = jnp.dtype("float16") if pixels.dtype == jnp.uint8 else pixels.dtype
    if dtype not in (jnp.float16, jnp.float32):
        raise ValueError(f"The image has the dtype {dtype}. Give uint8, float16 or float32.")
    offsets, scales = array(channel_offsets, "float32"), array(channel_scales, "float32")
    for name_, shape in (
        ("image", pixels.shape[-1:]),
        ("channel_offsets", offsets.shape),
        ("channel_scales", scales.shape),
    ):
        if shape != (3,):
            raise ValueError(f"`{name_}` has channels of shape {shape}. Give 3 channels.")
    normalised = (pixels.astype("float32") * scale - offsets) * scales
    return jnp.pad(normalised, [(0, 0)] * (pixels.ndim - 1) + [(0, 1)]).astype(dtype)
