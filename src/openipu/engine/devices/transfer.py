"""Arrays between the hosts and the devices of a group of processes.

In a single process `jax.device_put` and `np.asarray` do all of this. An array on the devices of several processes is
made of the parts that each of them has, and reading it is a program that all of them run.
"""

from __future__ import annotations

from typing import Any

from openipu.engine.types import Array, Tree

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from .launching import in_turn


def send(tree: Tree, sharding: jax.Device | NamedSharding) -> Tree:
    """Put arrays on devices. All processes call this with the same values, and each sends its own part."""
    if isinstance(sharding, jax.Device) or sharding.is_fully_addressable:
        return jax.device_put(tree, sharding)
    return jax.tree.map(lambda a: _send(a, sharding), tree)


def _send(array: Any, sharding: NamedSharding) -> Array:
    shape = np.shape(array)
    if isinstance(array, jax.Array) and not array.is_fully_addressable:
        if array.sharding.is_equivalent_to(sharding, array.ndim):
            return array
        array = read(array)
    indices = sharding.addressable_devices_indices_map(shape)
    parts = [jax.device_put(_part(array, index), device) for device, index in indices.items()]
    return jax.make_array_from_single_device_arrays(shape, sharding, parts)


def _part(array: Any, index: tuple[slice, ...] | None) -> Any:
    whole = index is None or all(part == slice(None) for part in index)
    return array if whole else array[index]


def send_own(tree: Tree, sharding: jax.Device | NamedSharding, axis: int) -> Tree:
    """Put arrays on devices, each process those that are its own along `axis`."""
    if isinstance(sharding, jax.Device) or sharding.is_fully_addressable:
        return jax.device_put(tree, sharding)

    def one(array: np.ndarray) -> Array:
        shape = list(array.shape)
        shape[axis] *= len(sharding.device_set) // len(sharding.addressable_devices)
        whole: Array = jax.make_array_from_process_local_data(sharding, array, tuple(shape))
        return whole

    return jax.tree.map(one, tree)


def local(tree: Tree) -> Tree:
    """Arrays that are the same on all devices, as arrays of one device of this process."""
    return jax.tree.map(lambda a: a if a.is_fully_addressable else a.addressable_data(0), tree)


def of_all_processes(array: np.ndarray) -> np.ndarray:
    """The arrays of all processes, stacked. All of them call this, with arrays of the same shape."""
    gather = in_turn(None, jax.devices(), lambda a: (multihost_utils.process_allgather(a),), "gathering arrays")
    [stacked] = gather(_bytes(array))
    return np.asarray(stacked).view(array.dtype).reshape(-1, *array.shape)


def of_first_process(arrays: list[np.ndarray]) -> list[np.ndarray]:
    """The arrays of instance 0. All processes call this, with arrays of the same shapes."""
    spread = in_turn(None, jax.devices(), lambda a: (multihost_utils.broadcast_one_to_all(a),), "spreading arrays")
    [found] = spread([_bytes(array) for array in arrays])
    return [np.asarray(f).view(a.dtype).reshape(a.shape) for f, a in zip(found, arrays, strict=True)]


def _bytes(array: np.ndarray) -> np.ndarray:
    """An array as bytes, because JAX would shorten numbers of 64 bits."""
    return np.frombuffer(np.ascontiguousarray(array).tobytes(), np.uint8)


def read(array: Array) -> np.ndarray:
    """The whole of an array, on the host. If parts are on devices of other processes, all processes must call this."""
    if array.is_fully_addressable:
        return np.asarray(array)
    if not array.is_fully_replicated:
        sharding = array.sharding
        assert isinstance(sharding, NamedSharding)
        gather = jax.jit(lambda a: (a,), out_shardings=NamedSharding(sharding.mesh, P()))
        [array] = in_turn(None, list(sharding.mesh.devices.flat), gather, "reading an array")(array)
    return np.asarray(array.addressable_data(0))
