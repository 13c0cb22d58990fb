"""What is decided before anything compiles: where a model runs, how many steps one launch takes, what stays resident.

Every rule about these numbers is checked here, with an error that says the numbers and the remedy.
"""

from __future__ import annotations

import logging
import operator
import os
import warnings
from typing import Any

import jax
import keras

from . import model as keras_model
from .feed import ArraySource, Feed, Source, StreamSource
from .place import Place

log = logging.getLogger("openipu")

RESIDENT_SHARE = 0.3
"""Share of a device's free memory that a dataset may take to be kept resident."""
SLAB_SHARE = 0.1
"""Share of a device's free memory that one slab of streamed batches may take (two exist at a time)."""


def make_feed(
    where: Place,
    steps_per_execution: int,
    x: Any,
    y: Any = None,
    sample_weight: Any = None,
    *,
    batch_size: int | None = None,
    steps: int | None = None,
    shuffle: bool | str = False,
    class_weight: Any = None,
) -> Feed:
    """How the given data reaches programs on `where`."""
    steps_per_execution = positive("steps_per_execution", steps_per_execution)
    batch_size = positive("batch_size", batch_size, optional=True)
    steps = positive("steps", steps, optional=True)
    steps = limited("max_steps_per_epoch", keras.config.max_steps_per_epoch(), steps)
    adapter = keras_model.get_data_adapter(
        x, y, sample_weight, batch_size=batch_size, steps_per_epoch=steps, shuffle=shuffle, class_weight=class_weight
    )
    source = _source(adapter, where.device)
    return Feed(source, _width(source, steps_per_execution, steps, where.device), steps)


def positive(name: str, value: Any, *, optional: bool = False, least: int = 1) -> Any:
    """`value` as an int, checked to be a count; None stays None where it is optional."""
    if optional and value is None:
        return None
    if isinstance(value, bool) or not hasattr(value, "__index__") or operator.index(value) < least:
        raise ValueError(f"`{name}` is {value!r}, but it counts something: give a whole number of {least} or more.")
    return operator.index(value)


def limited(name: str, limit: int | None, value: Any) -> Any:
    """`value`, or the smaller limit that the user has set in `keras.config`; a warning says which one it is."""
    if not limit or (value is not None and value <= limit):
        return value
    warnings.warn(f"Limited to {limit} by `keras.config.set_{name}({limit})`.", stacklevel=4)
    return limit


def _source(adapter: Any, device: Any) -> Source:
    if not isinstance(adapter, keras_model.ArrayDataAdapter):
        return StreamSource(adapter, device)
    samples, _, _ = keras_model.array_order(adapter)
    if samples == 0:
        raise ValueError("The data has 0 samples. Give arrays with at least one row.")
    size = keras_model.resident_bytes(adapter)
    if size is None or size > RESIDENT_SHARE * free_memory(device):
        return StreamSource(adapter, device)
    return ArraySource(adapter, device)


def _width(source: Source, steps_per_execution: int, steps: int | None, device: Any) -> int:
    """Steps in one launch: `steps_per_execution`, but no more than an epoch has or than memory holds."""
    width = min(n for n in (steps_per_execution, steps or source.num_batches) if n is not None)
    if width == 1:
        return 1
    most = max(1, int(SLAB_SHARE * free_memory(device)) // max(1, source.batch_bytes()))
    if width > most:
        log.info(
            "an execution takes %d steps instead of %d: more batches of %d bytes do not fit into %.0f %% of free memory",
            most, width, source.batch_bytes(), 100 * SLAB_SHARE,
        )  # fmt: skip
    return min(width, most)


def free_memory(device: jax.Device) -> int:
    """Bytes that are free on the device, or on this machine where the device has no memory of its own."""
    stats = device.memory_stats() or {}
    if "bytes_limit" in stats:
        return int(stats["bytes_limit"]) - int(stats.get("bytes_in_use", 0))
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
