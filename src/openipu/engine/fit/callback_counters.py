"""What Keras' callbacks count, saved and put back by checkpoints."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from openipu import _validate as validate

import keras
import numpy as np

from .together import WRITERS

COUNTERS = (
    "best",
    "best_epoch",
    "cooldown_counter",
    "stopped_epoch",
    "wait",
    "_batches_seen_since_last_saving",
    "_last_batch_seen",
)
"""The attributes by which EarlyStopping, ReduceLROnPlateau and ModelCheckpoint make their decisions."""


def counters_of(callback: keras.callbacks.Callback) -> dict[str, Any]:
    """The counters of one of Keras' callbacks, and what it is known by."""
    about = {"class": type(callback).__name__, "monitor": str(getattr(callback, "monitor", ""))}
    values = {name: vars(callback).get(name) for name in COUNTERS} | {"writes": isinstance(callback, WRITERS) or None}
    values |= about
    return {name: float(v) if isinstance(v, np.floating) else v for name, v in values.items() if v is not None}


def put_back(callbacks: Sequence[Any], saved: Sequence[dict[str, Any]]) -> None:
    """Let callbacks continue from the counters of those that are like them."""
    for callback, counters in _partners(callbacks, saved):
        vars(callback).update({n: v for n, v in counters.items() if n in COUNTERS and hasattr(callback, n)})


def _partners(callbacks: Sequence[Any], saved: Sequence[dict[str, Any]]) -> list[tuple[Any, dict[str, Any]]]:
    """Each callback with the counters of the first saved one like it. Old checkpoints only have the order."""
    if not all("class" in counters for counters in saved):
        return list(zip(callbacks, saved, strict=False))
    left, found = list(saved), []
    for callback in callbacks:
        known = _known_by(counters_of(callback))
        partner = next((counters for counters in left if _known_by(counters) == known), None)
        if partner is None:
            validate.notice(f"The checkpoint has no counters of {known}. It starts from scratch.")
        else:
            left.remove(partner)
            found.append((callback, partner))
    for counters in left:
        validate.notice(f"The checkpoint has counters of {_known_by(counters)}, which `fit` was not given.")
    return found


def _known_by(counters: dict[str, Any]) -> str:
    return f"`{counters['class']}` of {counters.get('monitor')!r}"
