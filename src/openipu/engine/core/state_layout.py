"""How a model's state is laid out on the devices of its replicas while executions run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from openipu.engine.devices import same_values
from openipu.engine.devices.replicas import Replicas
from openipu.engine.devices.transfer import read
from openipu.engine.types import Array

import jax
import jax.numpy as jnp

from . import offload
from .optimizer_sharding import Shape, Shards, divide, join
from .state import State


class StateLayout(Protocol):
    """A way to lay out a model's state on devices."""

    def spread(self, state: State) -> State:
        """A model's state on the devices."""

    def gather(self, state: State) -> State:
        """The inverse: plain arrays on one device."""

    @property
    def joint(self) -> bool:
        """Whether all processes have to call `gather` together, because each has a part of the state only."""

    def own_metrics(self, rows: list[Array]) -> list[Array]:
        """The metrics of each replica on its device, if there is one row for each replica; otherwise nothing."""


@dataclass(frozen=True, slots=True)
class ReplicaLayout:
    """Weights and the rest in full on every replica; metrics and, with `shards`, optimizer slots in parts."""

    replicas: Replicas
    shards: Shards | None = None
    offloaded: bool = False

    def spread(self, state: State) -> State:
        """A model's state on the devices of all replicas. What is there already is not copied.

        Each replica counts its own metrics from zero, except the first, which continues from the given values.
        """
        spread = self._on_one(state) if self.replicas.count == 1 else self._on_all(agreed(state, self.replicas))
        return offload.to_host(spread) if self.offloaded else spread

    def gather(self, state: State) -> State:
        """The inverse of `spread`: plain arrays on one device."""
        state = offload.to_device(state) if self.offloaded else state
        if self.replicas.count == 1:
            return state
        return gathered(
            State(
                [x.addressable_data(0) for x in state.trainable],
                [x.addressable_data(0) for x in state.non_trainable],
                [
                    x.addressable_data(0) if self.shards is None or shape is None else join(read(x), shape)
                    for x, shape in zip(state.optimizer, self._slots(state), strict=True)
                ],
                [total(m) for m in state.metrics],
            ),
            self.replicas,
        )

    @property
    def joint(self) -> bool:
        """Whether all processes have to call `gather` together, because each has a part of the state only."""
        return self.shards is not None and not self.replicas.is_local

    def own_metrics(self, rows: list[Array]) -> list[Array]:
        """The metrics of each replica on its device, if there is one row for each replica; otherwise nothing."""
        # A single replica has no axis for replicas, though a pipeline with one replica saves metrics with that axis.
        fits = rows and rows[0].shape[0] == self.replicas.count > 1
        return list(self.replicas.send(rows, self._metrics_axis)) if fits else []

    def axes(self, state: State) -> State:
        """The axis along which each part of a spread state is split over replicas; None if it is not split."""
        slots = [None if shape is None else 0 for shape in self._slots(state)]
        return State(None, None, slots, self._metrics_axis)  # type: ignore[arg-type]

    def own_part(self, state: State) -> State:
        """Inside the program: the state of one replica, without the replica axis, which has length one there."""
        return self._at_split(lambda a: a[0], lambda a: own_row(a, self.replicas), state)

    def rejoin(self, state: State) -> State:
        """The inverse of `own_part`."""
        return self._at_split(lambda a: a[None], lambda a: all_rows(a, self.replicas), state)

    def _at_split(self, slot: Callable[[Array], Array], metric: Callable[[Array], Array], state: State) -> State:
        if self.replicas.count == 1:
            return state
        pairs = zip(state.optimizer, self._slots(state), strict=True)
        optimizer = [a if shape is None else slot(a) for a, shape in pairs]
        return state._replace(optimizer=optimizer, metrics=[metric(m) for m in state.metrics])

    @property
    def _metrics_axis(self) -> int | None:
        return 0 if self.replicas.is_local else None

    def _slots(self, state: State) -> tuple[Shape | None, ...]:
        """The shapes of the optimizer's divided slots, and None for what is not divided."""
        return self.shards.slots if self.shards and state.optimizer else (None,) * len(state.optimizer)

    def _on_one(self, state: State) -> State:
        (device,) = self.replicas.devices
        return State(*([x if x.devices() == {device} else jax.device_put(x, device) for x in part] for part in state))

    def _on_all(self, state: State) -> State:
        send, count = self.replicas.send, self.replicas.count
        return State(
            send(state.trainable),
            send(state.non_trainable),
            [
                send(v) if self.shards is None or shape is None else send(divide(v, count), 0)
                for v, shape in zip(state.optimizer, self._slots(state), strict=True)
            ],
            send(rows_of_first(state.metrics, count), self._metrics_axis),
        )


# [Note: metrics of several processes] Each replica counts its own metrics, so they are split over replicas. If replicas
# lie in several processes, every device has all of the numbers instead, exchanged when an execution ends. So a callback
# of one process can read them without the others.


def own_row(metric: Array, replicas: Replicas) -> Array:
    """Inside the program: what this replica has counted."""
    return metric[0] if replicas.is_local else jnp.take(metric, replicas.index(), axis=0)


def all_rows(metric: Array, replicas: Replicas) -> Array:
    """The inverse of `own_row`."""
    rows: Array = metric[None] if replicas.is_local else replicas.gather(metric)
    return rows


def rows_of_first(metrics: list[Array], count: int) -> list[Array]:
    """Metrics of `count` replicas, of which the first continues from these values and the others from zero."""
    return [jnp.zeros((count, *m.shape), m.dtype).at[0].set(m) for m in metrics]


def total(metric: Array) -> Array:
    """What all replicas have counted together."""
    return jnp.asarray(read(metric).sum(0), metric.dtype)


def agreed(state: State, replicas: Replicas) -> State:
    """The same state in all processes that have replicas."""
    if replicas.is_local:
        return state
    found: State = jax.tree.unflatten(jax.tree.structure(state), same_values.same(jax.tree.leaves(state)))
    return found


def gathered(state: State, replicas: Replicas) -> State:
    """A state that all processes have gathered, so it is the same in all of them."""
    if not replicas.is_local:
        same_values.mark(jax.tree.leaves(state))
    return state
