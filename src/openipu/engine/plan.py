"""What is decided before anything compiles: where a model runs, how many steps one launch takes, what stays resident.

Every rule about these numbers is checked here, with an error that says the numbers and the remedy.
"""

from __future__ import annotations

import logging
import operator
import os
import warnings
from typing import Any

import keras

from . import model as keras_model
from .adapters import resident_bytes
from .feed import ArraySource, Feed, Source, StreamSource
from .options import Options
from .place import Place
from .replicate import Replicas

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
    accumulated: int = 1,
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
    source = _source(adapter, where.replicas)
    wanted = steps_per_execution * where.replicas.count
    return Feed(source, _width(source, wanted, steps, where.replicas, accumulated), steps)


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


def _source(adapter: Any, replicas: Replicas) -> Source:
    if not isinstance(adapter, keras_model.ArrayDataAdapter):
        return StreamSource(adapter, replicas)
    samples, _, _ = keras_model.array_order(adapter)
    if samples == 0:
        raise ValueError("The data has 0 samples. Give arrays with at least one row.")
    size = resident_bytes(adapter)
    if size is None or size > RESIDENT_SHARE * free_memory(replicas):
        return StreamSource(adapter, replicas)
    return ArraySource(adapter, replicas)


def _width(source: Source, wanted: int, steps: int | None, replicas: Replicas, accumulated: int) -> int:
    """Batches in one launch: those `wanted`, but no more than an epoch has or than memory holds."""
    unit = replicas.count * accumulated
    ends = steps or source.num_batches
    width = wanted if ends is None else min(wanted, round_up(ends, replicas.count))
    if width <= unit:
        return width
    most = max(1, int(SLAB_SHARE * free_memory(replicas)) // max(1, source.batch_bytes()))
    if width <= most:
        return width
    most = max(unit, most - most % unit)
    log.info(
        "an execution takes %d steps instead of %d: more batches of %d bytes do not fit into %.0f %% of free memory",
        most // replicas.count, width // replicas.count, source.batch_bytes(), 100 * SLAB_SHARE,
    )  # fmt: skip
    return most


def round_up(number: int, multiple: int) -> int:
    """The next multiple, or `number` if it is one."""
    return -(-number // multiple) * multiple


def free_memory(replicas: Replicas) -> int:
    """Bytes that are free on each device. Devices without memory of their own share this machine's."""
    stats = replicas.devices[0].memory_stats() or {}
    if "bytes_limit" in stats:
        return int(stats["bytes_limit"]) - int(stats.get("bytes_in_use", 0))
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // replicas.count


def describe_updates(feed: Feed, replicas: Replicas, options: Options) -> str:
    """One line about the sizes that learning rates depend on."""
    accumulation = options.accumulation
    batches = replicas.count * accumulation.steps
    size = feed.source.batch_size
    samples = f" of {size} samples = {batches * size} samples" if size else ""
    steps = feed.num_steps
    updates = f", {-(-steps // batches)} updates per epoch" if steps else ""
    factor = accumulation.strength(1 if options.average_replicas else replicas.count)
    return (
        f"each update: {replicas.count} replica(s) x {accumulation.steps} micro-batch(es){samples}{updates}; the "
        f"learning rate acts on {factor} x the mean gradient of these samples"
    )


def check_accumulation(name: str, steps: int, size: int) -> None:
    """An execution holds whole updates."""
    if steps % size:
        raise RuntimeError(
            f"`{name}` is {steps}, which is not a multiple of the {size} micro-batches that one update accumulates. "
            f"Give a multiple of {size}, for example {round_up(steps, size)}."
        )


def check_training(model: Any, options: Options) -> None:
    """The rules about updates, before anything compiles."""
    size = options.accumulation.steps
    check_accumulation("steps_per_execution", positive("steps_per_execution", model.steps_per_execution), size)
    if size > 1 and keras_model.overrides(model, "train_step"):
        raise RuntimeError(
            f"Model {model.name!r} has its own `train_step`, which updates the weights at every micro-batch, but "
            f"{size} micro-batches are to be accumulated per update. Remove `train_step`, or accumulate 1."
        )
