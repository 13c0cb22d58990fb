"""Decides how data reaches programs, before anything compiles: what stays resident, and how many steps a launch takes.

Every rule about these numbers is checked here.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Mapping
from typing import TypeVar

from openipu import _validate as validate
from openipu.engine.core.update_rules import round_up
from openipu.engine.devices import group
from openipu.engine.devices.memory import RESIDENT_SHARE, SLAB_SHARE, free_memory
from openipu.engine.devices.placement import Placement
from openipu.engine.devices.replicas import Replicas
from openipu.engine.keras_compat import api as keras_api
from openipu.engine.types import Data

import keras

from .adapters import adapter_of, resident_bytes
from .feed import Feed
from .instances import check_same, check_same_size
from .position import follow_first
from .sources import ArraySource, Source, StreamSource

log = logging.getLogger("openipu")

Count = TypeVar("Count", int, int | None)


def make_feed(
    where: Placement,
    steps_per_execution: int,
    x: Data,
    y: Data = None,
    sample_weight: Data = None,
    *,
    accumulated: int = 1,
    batch_size: int | None = None,
    steps: int | None = None,
    shuffle: bool | str = False,
    class_weight: Mapping[int, float] | None = None,
    told: bool = False,
) -> Feed:
    """A feed of the given data for programs on `where`.

    `accumulated` is the number of micro-batches per update: slabs that memory limits still hold whole updates. `told`
    says that the user has been told of limits in `keras.config` by another feed of the same call.
    """
    steps_per_execution = validate.count("steps_per_execution", steps_per_execution)
    batch_size = validate.count("batch_size", batch_size, optional=True)
    steps = validate.count("steps", steps, optional=True)
    steps = limited("max_steps_per_epoch", keras.config.max_steps_per_epoch(), steps, told)
    adapter = adapter_of(
        x, y, sample_weight, batch_size=batch_size, steps_per_epoch=steps, shuffle=shuffle, class_weight=class_weight
    )
    if where.own_data and steps is not None:
        steps = sum(group.exchange("steps", steps))
    elif not where.replicas.is_local and not where.own_data:
        follow_first()
        check_same_size(adapter, steps)
    source = _source(adapter, where)
    wanted = steps_per_execution * where.replicas.count
    return Feed(source, _width(source, wanted, steps, where.replicas, accumulated), steps)


def limited(name: str, limit: int | None, value: Count, told: bool = False) -> Count:
    """`value`, or the smaller limit that the user has set in `keras.config`, with a warning unless one was given."""
    if not limit or (value is not None and value <= limit):
        return value
    if not told:
        warnings.warn(f"Limited to {limit} by `keras.config.set_{name}({limit})`.", stacklevel=4)
    return limit


def _source(adapter: keras_api.DataAdapter, where: Placement) -> Source:
    replicas = where.replicas
    if where.own_data:
        return StreamSource(adapter, replicas, own_data=True)
    if not isinstance(adapter, keras_api.ArrayDataAdapter):
        return StreamSource(adapter, replicas)
    size = resident_bytes(adapter)
    if size is None or size > RESIDENT_SHARE * free_memory(replicas):
        return StreamSource(adapter, replicas)
    source = ArraySource(adapter, replicas)
    if not replicas.is_local:
        check_same(source.host, "the data")
    return source


def _width(source: Source, wanted: int, steps: int | None, replicas: Replicas, accumulated: int) -> int:
    """Batches in one launch: as many as `wanted`, but no more than an epoch has or memory holds."""
    unit = replicas.count * accumulated
    ends = steps or source.num_batches
    width = wanted if ends is None else min(wanted, round_up(ends, replicas.count))
    if width <= unit:
        return width
    size = source.batch_bytes()
    if not replicas.is_local:
        size = max(group.exchange("bytes of a batch", size))
    most = max(1, int(SLAB_SHARE * free_memory(replicas)) // max(1, size))
    if width <= most:
        return width
    most = max(unit, most - most % unit)
    log.info(
        "an execution takes %d steps instead of %d: more batches of %d bytes do not fit in %.0f %% of free memory",
        most // replicas.count, width // replicas.count, size, 100 * SLAB_SHARE,
    )  # fmt: skip
    return most
