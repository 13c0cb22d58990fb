"""Outfeeds that the optimizer of a pipelined model fills.

Each device updates its own stages with a twin of the optimizer. A twin does not know the outfeeds of the user's object,
and it sees only a part of the gradients. So the optimizer itself runs beside the twins, on the gradients of all
devices. Only what it enqueues is used; XLA removes the rest, with the exchange between devices that it would need.
"""

from __future__ import annotations

from openipu.engine.core.enqueued import IN_SHARES, Enqueued, OutfeedError, collecting
from openipu.engine.core.optimizer_chain import update as apply_update
from openipu.engine.core.optimizer_twin import enqueued_by, may_enqueue
from openipu.engine.devices.replicas import STAGE_AXIS
from openipu.engine.types import Array

import jax.numpy as jnp
from jax import lax

from .packing import Buffers
from .stage_update import Update, UpdateState
from .variable_store import Store


def enqueued_in(update: Update, state: UpdateState, total: Buffers) -> Enqueued:
    """What the optimizer enqueues in an update with the gradients in `total`. It is the same on all devices."""
    optimizer = update.optimizer
    if not may_enqueue(optimizer):
        return Enqueued()
    weights = update.weights.specs()
    if update.divided:
        if enqueued_by(optimizer, [weights[n] for n in sorted(weights)]).outfeeds:
            raise OutfeedError(IN_SHARES)
        return Enqueued()
    gradients = update.replicas.reduced(_of_all(update.weights, total, tied=True), update.average)
    slots = dict(zip(update.common, state.common, strict=True)) | _of_all(update.slots, state.slots)
    lists = (_in_order(part) for part in (slots, gradients, _of_all(update.weights, state.weights)))
    return collecting(apply_update)(optimizer, *lists)[1]


def _of_all(store: Store, buffers: Buffers, *, tied: bool = False) -> dict[int, Array]:
    """The variables in the buffers of all devices. If they are `tied`, those of several devices are summed."""
    me, whole = lax.axis_index(STAGE_AXIS), dict[int, Array]()
    for number in sorted({n for held in store.held for n in held}):
        holders = [device for device, held in enumerate(store.held) if number in held]
        mine = jnp.zeros(())
        for device in holders if tied else holders[:1]:
            [value] = store.packing.read(buffers, store.slots(device, [number]))
            mine = jnp.where(me == device, value, mine.astype(value.dtype))
        whole[number] = lax.psum(mine, STAGE_AXIS)
    return whole


def _in_order(values: dict[int, Array]) -> list[Array]:
    return [values[number] for number in sorted(values)]
