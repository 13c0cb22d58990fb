"""Optimizer state in host memory. It visits the device only while an update is applied."""

from __future__ import annotations

from collections.abc import Callable

from openipu import _validate as validate
from openipu.engine.devices.replicas import Replicas
from openipu.engine.types import Array

import jax

from .state import State
from .updates import Updates

PLATFORMS = {"gpu", "tpu"}
"""Platforms whose devices have memory of their own that is worth saving."""


def is_offloaded(updates: Updates, replicas: Replicas) -> bool:
    """Whether the optimizer's state lives in host memory. Warns once where asking for that has no effect."""
    if updates.offload_optimizer is not True:
        return False
    platform = replicas.platform
    if platform not in PLATFORMS:
        validate.no_effect({"offload_weight_update_variables": f"on platform {platform}, all memory is host memory"})
    return platform in PLATFORMS


def to_host(state: State) -> State:
    """The state with the optimizer's slots in host memory."""
    return _moved(state, lambda v: jax.device_put(v, v.sharding.with_memory_kind("pinned_host")))


def to_device(state: State) -> State:
    """The inverse of `to_host`."""
    return _moved(state, lambda v: jax.device_put(v, v.sharding.with_memory_kind("device")))


def around(update: Callable[[State, list[Array]], State]) -> Callable[[State, list[Array]], State]:
    """`update`, which now fetches the slots first and sends them back afterwards. Used inside the program."""

    def visiting(state: State, gradients: list[Array]) -> State:
        near = _moved(state, lambda v: jax.device_put(v, jax.memory.Space.Device))
        return _moved(update(near, gradients), lambda v: jax.device_put(v, jax.memory.Space.Host))

    return visiting


def _moved(state: State, move: Callable[[Array], Array]) -> State:
    """The state with its slots moved. Scalars, such as the learning rate, stay where they are."""
    return state._replace(optimizer=[move(v) if v.ndim else v for v in state.optimizer])
