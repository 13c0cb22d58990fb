"""How much free memory devices have, and what share of it data may take."""

from __future__ import annotations

import os

from .replicas import Replicas

RESIDENT_SHARE = 0.3
"""Share of a device's free memory that a resident dataset may take."""
SLAB_SHARE = 0.1
"""Share of a device's free memory that one slab of streamed batches may take (two exist at a time)."""


def free_memory(replicas: Replicas) -> int:
    """Free bytes on each device. Devices without memory of their own share the host's."""
    stats = replicas.devices[0].memory_stats() or {}
    if "bytes_limit" in stats:
        return int(stats["bytes_limit"]) - int(stats.get("bytes_in_use", 0))
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // replicas.count
