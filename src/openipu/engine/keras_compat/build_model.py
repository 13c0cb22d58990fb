"""When and how a model's variables are made."""

from __future__ import annotations

from collections.abc import Callable

from openipu.engine.devices.dtypes import narrowed
from openipu.engine.types import Tree

import keras

from .api import all_layers, compiled_parts, symbolic_build
from .initial_values import quick_initial_values


def is_built(model: keras.Model) -> bool:
    """Whether all of the model's layers have their variables."""
    return bool(model.built) and _layers_built(model)


def build(model: keras.Model, first_batch: Callable[[], Tree]) -> None:
    """Create all variables of a compiled model. `first_batch` is only called if Keras has to see a batch."""
    complete = _layers_built(model) and all(part.built for part in compiled_parts(model))
    batch = None if complete else narrowed(first_batch())
    with quick_initial_values():
        symbolic_build(model, batch)


def build_for_predict(model: keras.Model, first_batch: Callable[[], Tree]) -> None:
    """Create the variables of a model, which need not have been compiled."""
    if not _layers_built(model):
        x, _, _ = keras.utils.unpack_x_y_sample_weight(first_batch())
        with keras.StatelessScope(), keras.SymbolicScope(), quick_initial_values():
            model(narrowed(x))


def _layers_built(model: keras.Model) -> bool:
    return all(layer.built for layer in all_layers(model))
