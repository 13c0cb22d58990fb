"""Losses that layers add while a program is traced: `add_loss`, and activity regularizers.

Keras keeps a loss in the scope in which it was added, and its layer knows the loss by its identity. A loop or a
conditional has a scope of its own and hands a loss out as another value, so the layer adds that one again outside.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from openipu.engine.keras_compat.api import forget_loss, stateless_scope
from openipu.engine.keras_compat.patches import ADDED_LOSSES
from openipu.engine.types import Array, Tree

import jax
import jax.numpy as jnp
import keras

from .variable_scope import VariableScope

Added = Sequence[tuple[keras.Layer, Any]]
"""Layers and what they have added."""


@dataclass(frozen=True, slots=True)
class LossSpec:
    """A loss that a layer adds in a loop or conditional."""

    layer: keras.Layer
    shape: tuple[int, ...]
    dtype: Any

    def zeros(self) -> Array:
        """No loss."""
        return jnp.zeros(self.shape, self.dtype)


def noted() -> contextlib.AbstractContextManager[None]:
    """Until the block ends, scopes know which layers add losses to them."""
    return ADDED_LOSSES.using(_note)


def _note(original: Callable[..., None], layer: keras.Layer, loss: Tree) -> None:
    original(layer, loss)
    scope = stateless_scope()
    if isinstance(scope, VariableScope):
        scope.added.update({id(value): layer for value in jax.tree.leaves(loss)})


def taken(scope: VariableScope) -> list[tuple[keras.Layer, Any]]:
    """The losses that were added in a scope, which has ended, and their layers. The layers forget them."""
    found = [(scope.added[id(loss)], loss) for loss in scope.losses if id(loss) in scope.added]
    for layer, loss in found:
        forget_loss(layer, loss)
    return found


def added_again(losses: Iterable[tuple[keras.Layer, Any]]) -> None:
    """Add losses to the scope that is open."""
    for layer, loss in losses:
        layer.add_loss(loss)


def specs(losses: Added) -> tuple[LossSpec, ...]:
    """What is known of losses before the program runs."""
    return tuple(LossSpec(layer, loss.shape, jax.dtypes.canonicalize_dtype(loss.dtype)) for layer, loss in losses)


def values(known: Sequence[LossSpec], losses: Added) -> list[Array]:
    """The values of losses that were added, as they are known."""
    return [loss.astype(spec.dtype) for spec, (_, loss) in zip(known, losses, strict=True)]
