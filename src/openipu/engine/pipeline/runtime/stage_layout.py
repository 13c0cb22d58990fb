"""The layout of a pipelined model's state on the devices of its stages and replicas."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from openipu.engine.core.optimizer_sharding import divide, join
from openipu.engine.core.state import State
from openipu.engine.core.state_layout import agreed, all_rows, gathered, own_row, rows_of_first, total
from openipu.engine.devices.replicas import REPLICA_AXIS, STAGE_AXIS, Replicas
from openipu.engine.devices.transfer import read, send
from openipu.engine.types import Array

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from .packing import Buffers
from .stage_update import Update
from .variable_store import Store, listed, numbered


@dataclass(frozen=True, slots=True)
class StageLayout:
    """Where each part of a model's state is while executions run.

    Each device has the variables of its own stages. All devices have the metrics, and those variables of the optimizer
    that belong to no weight.
    """

    replicas: Replicas
    weights: Store
    state: Store
    """The variables that are not trained."""
    update: Update | None
    """None if nothing is trained."""

    def spread(self, state: State) -> State:
        """Put a model's state on the devices. Each replica counts its own metrics: the first continues from these."""
        state = agreed(state, self.replicas)
        return State(
            self._put(self.weights.scatter(state.trainable), P(STAGE_AXIS)),
            self._put(self.state.scatter(state.non_trainable), P(STAGE_AXIS)),
            self._spread_optimizer(state.optimizer),
            self._put(rows_of_first(state.metrics, self.replicas.count), self._metrics_spec),
        )

    def gather(self, state: State) -> State:
        """The inverse of `spread`: plain arrays on one device."""
        return gathered(
            State(
                self.weights.gather(state.trainable, _count(self.weights)),
                self.state.gather(state.non_trainable, _count(self.state)),
                self._gather_optimizer(state.optimizer),
                [total(m) for m in state.metrics],
            ),
            self.replicas,
        )

    @property
    def joint(self) -> bool:
        """Whether all processes have to call `gather` together, because each has a part of the state only."""
        return not self.replicas.is_local

    def own_metrics(self, rows: list[Array]) -> list[Array]:
        """Put one row of metrics on each replica. Empty if the rows were counted by another number of replicas."""
        fits = rows and rows[0].shape[0] == self.replicas.count
        return self._put(rows, self._metrics_spec) if fits else []

    def specs(self, state: State) -> State:
        """A `PartitionSpec` for each array of a spread state, for `jax.shard_map`."""
        slots = 0 if self.update is None else len(self.update.slots.packing.buffers)
        optimizer = [self._slot_spec() if i < slots else P() for i in range(len(state.optimizer))]
        return State(
            [P(STAGE_AXIS)] * len(state.trainable),
            [P(STAGE_AXIS)] * len(state.non_trainable),
            optimizer,
            [self._metrics_spec] * len(state.metrics),
        )

    # --- inside the program

    def own_part(self, state: State) -> State:
        """The part that one device has, without the axes of length one for device and replica."""
        return self._at_split(lambda a: a[0], lambda a: own_row(a, self.replicas), state)

    def rejoin(self, state: State) -> State:
        """The inverse of `own_part`."""
        return self._at_split(lambda a: a[None], lambda a: all_rows(a, self.replicas), state)

    def whole(self, state: State) -> State:
        """The shapes of the model's whole state."""
        variables = [] if self.update is None else self.update.optimizer.variables
        optimizer = [jax.ShapeDtypeStruct(v.shape, v.dtype) for v in variables]
        weights, rest = self.weights.specs(), self.state.specs()
        return State([weights[i] for i in sorted(weights)], [rest[i] for i in sorted(rest)], optimizer, state.metrics)

    def slots(self, state: State) -> tuple[Buffers, list[Array]]:
        """The optimizer's variables: buffers of those that belong to weights, and the common ones."""
        count = 0 if self.update is None else len(self.update.slots.packing.buffers)
        return numbered(state.optimizer[:count]), state.optimizer[count:]

    def with_optimizer(self, state: State, slots: Buffers, common: list[Array]) -> State:
        """The inverse of `slots`."""
        return state._replace(optimizer=[*listed(slots), *common])

    def _at_split(self, change: Callable[[Array], Array], metric: Callable[[Array], Array], state: State) -> State:
        """Change each array once for every axis over which it is split."""
        slots, common = self.slots(state)
        twice = self.update is not None and self.update.divided
        return State(
            [change(a) for a in state.trainable],
            [change(a) for a in state.non_trainable],
            [*(change(change(a)) if twice else change(a) for a in listed(slots)), *common],
            [metric(m) for m in state.metrics],
        )

    # --- outside

    @property
    def _metrics_spec(self) -> P:
        return P(REPLICA_AXIS) if self.replicas.is_local else P()

    def _slot_spec(self) -> P:
        """How the optimizer's slots are split: over stages, and over replicas too if they are divided."""
        return P(STAGE_AXIS, REPLICA_AXIS) if self.update is not None and self.update.divided else P(STAGE_AXIS)

    def _spread_optimizer(self, values: list[Array]) -> list[Array]:
        if self.update is None:
            return []
        slots = self.update.slots
        if self.update.divided:
            shares = {n: divide(values[n], self.replicas.count) for n in self._divided()}
            parts = [
                slots.scatter([shares[n][r] if n in shares else v for n, v in enumerate(values)])
                for r in range(self.replicas.count)
            ]
            buffers = [np.stack(rows, axis=1) for rows in zip(*parts, strict=True)]
        else:
            buffers = slots.scatter(values)
        return self._put(buffers, self._slot_spec()) + self._put([values[n] for n in self.update.common], P())

    def _gather_optimizer(self, spread: list[Array]) -> list[Array]:
        if self.update is None:
            return []
        slots, variables = self.update.slots, self.update.optimizer.variables
        buffers, common = spread[: len(slots.packing.buffers)], spread[len(slots.packing.buffers) :]
        if self.update.divided:
            whole = [read(buffer) for buffer in buffers]
            parts = [slots.gather([b[:, r] for b in whole], len(variables)) for r in range(self.replicas.count)]
            values = list(parts[0])
            for n in self._divided():
                values[n] = join([part[n] for part in parts], tuple(variables[n].shape))
        else:
            values = slots.gather(buffers, len(variables))
        for number, value in zip(self.update.common, common, strict=True):
            values[number] = value.addressable_data(0)
        return values

    def _divided(self) -> list[int]:
        """The numbers of the optimizer's variables that belong to weights."""
        return [] if self.update is None else sorted({n for held in self.update.slots.held for n in held})

    def _put(self, arrays: Sequence[Array | np.ndarray], spec: P) -> list[Array]:
        return list(send(arrays, NamedSharding(self.replicas.mesh, spec)))


def _count(store: Store) -> int:
    """How many variables a store has."""
    return 1 + max((number for held in store.held for number in held), default=-1)
