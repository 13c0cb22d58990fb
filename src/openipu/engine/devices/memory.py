"""How much free memory devices have, and what share of it data may take."""

from __future__ import annotations

import os

from . import group
from .replicas import Replicas

RESIDENT_SHARE = 0.3
"""Share of a device's free memory that a resident dataset may take."""
SLAB_SHARE = 0.1
"""Share of a device's free memory that one slab of streamed batches may take (two exist at a time)."""


def free_memory(replicas: Replicas) -> int:
    """Free bytes on each device: in a group of processes, where there is least."""
    return _free(replicas) if replicas.is_local else min(group.exchange("free memory", _free(replicas)))


def device_memory(replicas: Replicas) -> int | None:
    """All bytes of one device; None if devices have no memory of their own."""
    stats = replicas.own_devices[0].memory_stats() or {}
    return int(stats["bytes_limit"]) if "bytes_limit" in stats else None


def _free(replicas: Replicas) -> int:
    """Free bytes on each device of this process. Devices without memory of their own share the host's."""
    own = replicas.own_devices
    stats = own[0].memory_stats() or {}
    if "bytes_limit" in stats:
        return int(stats["bytes_limit"]) - int(stats.get("bytes_in_use", 0))
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // max(1, len(own) // replicas.each)
