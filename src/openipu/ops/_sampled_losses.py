"""Losses over a sample of many classes, as functions of the rows of a table: one row for each class.

The classes are drawn without replacement, and small numbers more often than large ones (Zipf's law): class k with the
weight log((k + 2) / (k + 1)). Each class waits for an exponential time that its weight shortens; those that come first
are drawn. A class comes until a time t with the probability 1 - exp(-p t), by which its logit is corrected.
"""

from __future__ import annotations

from typing import NamedTuple

from openipu import _validate as validate
from openipu.engine.types import Array

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from ._operation import array


class Sample(NamedTuple):
    """Classes that were drawn, and how often the labels and these classes are to be expected in a sample."""

    classes: ArrayLike
    of_labels: ArrayLike
    of_classes: ArrayLike


def drawn(key: Array, count: int, num_classes: int, labels: Array) -> Sample:
    """A sample of `count` out of `num_classes` classes."""
    number = jnp.arange(num_classes, dtype="float32")
    weight = jnp.log1p(1 / (number + 1)) / jnp.log(num_classes + 1.0)
    early, classes = lax.top_k(-jax.random.exponential(key, (num_classes,)) / weight, count)
    expected = -jnp.expm1(weight * early[-1])
    return Sample(classes, expected[labels], expected[classes])


def checked(labels: ArrayLike, inputs: Array, num_true: int, num_sampled: int, num_classes: int) -> Array:
    """The labels as an array of `num_true` columns. Raise if the numbers do not fit together."""
    validate.count("num_sampled", num_sampled, most=validate.count("num_classes", num_classes))
    found = array(labels).astype("int32")
    if found.size != inputs.shape[0] * num_true:
        raise ValueError(
            f"`labels` has the shape {found.shape}, but there are {inputs.shape[0]} inputs with num_true={num_true} "
            f"each. Give the shape ({inputs.shape[0]}, {num_true})."
        )
    return found.reshape(-1, num_true)


def logits(
    weights: ArrayLike, biases: ArrayLike, labels: Array, inputs: Array, sample: Sample, remove_accidental_hits: bool
) -> tuple[Array, Array]:
    """The logits of the labels, and those of the sampled classes."""
    table, offsets = array(weights), array(biases)
    classes = lax.stop_gradient(array(sample.classes)).astype("int32")
    own = jnp.einsum("bd,btd->bt", inputs, table[labels]) + offsets[labels] - jnp.log(array(sample.of_labels))
    others = inputs @ table[classes].T + offsets[classes] - jnp.log(array(sample.of_classes))
    if validate.flag("remove_accidental_hits", remove_accidental_hits):
        hit = jnp.any(labels[:, :, None] == classes, 1)
        others = jnp.where(hit, float(np.finfo(np.float32).min), others)
    return own, others
