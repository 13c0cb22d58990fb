"""Finds state that should be equal on all replicas and is not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from openipu import _validate as validate
from openipu.engine.types import Array

import jax.numpy as jnp
import keras
import numpy as np

_COMPARED: Final = 1024
"""Counts have at most so many numbers."""


def mention_differing(variables: Sequence[keras.Variable], values: Sequence[Array]) -> None:
    """Say which whole numbers in a model's state differ between replicas. The model keeps those of the first replica.

    Seeds are equal on all replicas, so they are not compared.
    """
    for variable, value in zip(variables, values, strict=True):
        if jnp.issubdtype(value.dtype, jnp.integer) and value.size <= _COMPARED and "seed_gen" not in variable.path:
            found = [np.asarray(shard.data) for shard in value.addressable_shards]
            if any(not np.array_equal(other, found[0]) for other in found[1:]):
                validate.notice(
                    f"The state {variable.path!r} consists of whole numbers and differs between replicas, perhaps "
                    "because it counts samples. The model keeps that of the first replica. To count over all "
                    "replicas, use a metric."
                )
