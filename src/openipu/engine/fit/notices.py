"""What users are told about a model before it runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from openipu import _validate as validate
from openipu.engine.core.options import Options
from openipu.engine.data.feed import Feed
from openipu.engine.devices.replicas import Replicas
from openipu.engine.types import Array

import jax.numpy as jnp
import keras
import numpy as np

_COMPARED: Final = 1024
"""Counts have at most so many numbers."""


def describe_updates(feed: Feed, replicas: Replicas, options: Options) -> str:
    """One line about the sizes on which a good learning rate depends."""
    accumulation = options.updates.accumulation
    batches = replicas.count * accumulation.steps
    size = feed.source.batch_size
    samples = f" of {size} samples = {batches * size} samples" if size else ""
    steps = feed.num_steps
    updates = f", {-(-steps // batches)} updates per epoch" if steps else ""
    averaged = options.average_replicas or replicas.average
    factor = accumulation.strength(1 if averaged else replicas.count)
    return (
        f"each update: {replicas.count} replica(s) x {accumulation.steps} micro-batch(es){samples}{updates}; the "
        f"learning rate acts on {factor} x the mean gradient of these samples"
    )


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
