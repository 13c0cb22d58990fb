"""What devices can do at best, measured with a matrix product and a copy. It takes some tenths of a second, once."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Final

from openipu.engine.facts.costs import Peak
from openipu.engine.types import Tree

import jax
import jax.numpy as jnp

REPEATS: Final = 3
_SIDES: Final = {"cpu": 1024}
"""The rows and columns of the matrices: enough to keep all units of a device busy."""
_SIDE: Final = 4096
_COPIED: Final = {"cpu": 40 << 20}
"""The bytes of the array that is read and written: more than caches hold."""
_COPY: Final = 256 << 20


_known: dict[tuple[str, str, int, str], Peak] = {}


def measured_peak(platform: str, count: int, dtype: str) -> Peak:
    """The speed of `count` devices of this process, all at work at the same time. It is measured once per process."""
    devices = jax.local_devices(backend=platform)[:count]
    key = (platform, devices[0].device_kind, len(devices), dtype)
    if key not in _known:
        _known[key] = _measured(devices, platform, dtype)
    return _known[key]


def _measured(devices: Sequence[jax.Device], platform: str, dtype: str) -> Peak:
    side, count = _SIDES.get(platform, _SIDE), _COPIED.get(platform, _COPY)
    if platform == "cpu":
        count //= len(devices)  # virtual devices share one memory
    operations = 2 * side**3 * len(devices) / _product_seconds(devices, side, dtype)
    moved = 2 * count * len(devices) / _copy_seconds(devices, count // 4)
    return Peak(len(devices), dtype, operations, moved)


def _product_seconds(devices: Sequence[jax.Device], side: int, dtype: str) -> float:
    """The time in which each device multiplies two matrices."""
    product = jax.jit(lambda a: a @ a)
    matrices = [jax.device_put(jnp.ones((side, side), dtype), device) for device in devices]
    return best_seconds(lambda: [product(matrix) for matrix in matrices], REPEATS)


def _copy_seconds(devices: Sequence[jax.Device], length: int) -> float:
    """The time in which each device reads and writes an array."""
    change = jax.jit(lambda a: a + 1, donate_argnums=0)
    arrays = [jax.device_put(jnp.zeros(length, "float32"), device) for device in devices]

    def changed() -> list[Any]:
        arrays[:] = map(change, arrays)
        return arrays

    return best_seconds(changed, REPEATS)


def best_seconds(run: Callable[[], Tree], repeats: int) -> float:
    """The time that a call takes at best, of so many after one that compiles."""
    jax.block_until_ready(run())
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        jax.block_until_ready(run())
        times.append(time.perf_counter() - began)
    return max(min(times), 1e-9)
