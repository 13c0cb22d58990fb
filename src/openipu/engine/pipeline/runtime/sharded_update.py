"""The update of a pipeline whose optimizer state is divided over the replicas.

core/optimizer_sharding.py does the same for models without stages. Collectives are not possible inside the conditionals
that choose between devices. So every device first puts its gradients into rows of a common length. Then all devices
reduce and scatter them, update their shares, and gather the new weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from openipu.engine.core.optimizer_sharding import share_of
from openipu.engine.core.optimizer_twin import constrained
from openipu.engine.devices.replicas import REPLICA_AXIS, STAGE_AXIS
from openipu.engine.types import Array

import jax.numpy as jnp
import numpy as np
from jax import lax

from .packing import Buffers, used
from .stage_update import Update, UpdateState


@dataclass(frozen=True, slots=True)
class ShardedUpdate(Update):
    """An `Update` in which each replica updates its share of the weights."""

    @property
    def divided(self) -> bool:
        """Whether each replica only has its share of the slots."""
        return True

    def apply(self, weights: Buffers, slots: Buffers, common: list[Array], total: Buffers) -> UpdateState:
        """The state after an update with the gradients in `total`."""
        me, replicas = lax.axis_index(STAGE_AXIS), self.replicas
        total = self._sum_tied(me, total)
        length = max(sum(self._shares(device)) for device in range(len(self.twins)))
        rows = jnp.zeros((replicas.count, length))
        for device in range(len(self.twins)):
            gradients = self._rows(total, device, length)
            rows = jnp.where(me == device, gradients, rows)
        mine = lax.psum_scatter(rows, REPLICA_AXIS, scatter_dimension=0)
        mine = mine / replicas.count if self.average else mine
        new, state = jnp.zeros(length), UpdateState(weights, slots, common)
        for device in range(len(self.twins)):
            new, state = self._share_on(device, me, mine, new, state)
        everything = lax.all_gather(new, REPLICA_AXIS)
        for device in range(len(self.twins)):
            at = self.weights.slots(device)
            whole = [
                part.reshape(-1)[: slot.spec.size].reshape(slot.spec.shape)
                for part, slot in zip(self._cut(everything, device), at, strict=True)
            ]
            whole = constrained([self.constraints[n] for n in self.weights.held[device]], whole)
            own = used(weights, at)
            written = self.weights.packing.write(own, at, whole)
            weights = weights | {b: jnp.where(me == device, written[b], own[b]) for b in own}
        return UpdateState(weights, state.slots, self._on_all(me, state.common))

    def _share_on(
        self, device: int, me: Array, mine: Array, new: Array, state: UpdateState
    ) -> tuple[Array, UpdateState]:
        """The new weights as a vector, and the new state, after a device's twin has applied the gradients `mine`.

        On all other devices, `new` and `state` stay as they are.
        """
        slot_at = self.slots.slots(device)

        def run(writes: tuple[Array, Buffers, list[Array]]) -> tuple[Array, Buffers, list[Array]]:
            new, own_slots, common = writes
            rows = self._rows(state.weights, device, new.size)[self.replicas.index()]
            dtypes = [slot.spec.dtype for slot in self.weights.slots(device)]
            shares = [s.astype(d) for s, d in zip(self._cut(rows, device), dtypes, strict=True)]
            updated, own_slots, common = self._by_twin(device, own_slots, common, self._cut(mine, device), shares)
            joined = jnp.concatenate([u.astype(new.dtype) for u in updated])
            return jnp.pad(joined, (0, new.size - joined.size)), own_slots, common

        if not self.weights.held[device]:
            return new, state
        writes = new, used(state.slots, slot_at), state.common
        new, own, common = lax.cond(me == device, run, lambda w: w, writes)
        return new, state._replace(slots=state.slots | own, common=common)

    def _shares(self, device: int) -> list[int]:
        """For each weight of a device, how many elements one replica updates."""
        return [share_of(slot.spec.size, self.replicas.count) for slot in self.weights.slots(device)]

    def _rows(self, buffers: Buffers, device: int, length: int) -> Array:
        """A device's arrays as one row of this length per replica."""
        count = self.replicas.count
        parts = [jnp.zeros((count, 0))]
        for array, size in zip(
            self.weights.packing.read(buffers, self.weights.slots(device)), self._shares(device), strict=True
        ):
            flat = array.reshape(-1).astype(jnp.float32)
            parts.append(jnp.pad(flat, (0, count * size - flat.size)).reshape(count, size))
        joined = jnp.concatenate(parts, axis=1)
        return jnp.pad(joined, ((0, 0), (0, length - joined.shape[1])))

    def _cut(self, joined: Array, device: int) -> list[Array]:
        """The part of the last axis that belongs to each weight of a device."""
        ends = np.cumsum([0, *self._shares(device)])
        return [joined[..., a:b] for a, b in pairwise(ends)]
