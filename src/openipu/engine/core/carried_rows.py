"""Layers that carry a state from each row of a batch to the same row of the next batch."""

from __future__ import annotations

from openipu.engine.keras_compat.api import all_layers

import keras


def check_carried_rows(model: keras.Model, replicas: int) -> None:
    """Raise if a layer continues its rows from one batch to the next, although consecutive batches go to replicas."""
    names = [layer.name for layer in all_layers(model) if getattr(layer, "stateful", False)] if replicas > 1 else []
    if names:
        raise ValueError(
            f"Layer {names[0]!r} of model {model.name!r} is stateful: it continues each row of a batch in the same row "
            f"of the next batch. But with {replicas} replicas, consecutive batches go to different replicas. Use one "
            "replica, or make the layer with `stateful=False`."
        )
