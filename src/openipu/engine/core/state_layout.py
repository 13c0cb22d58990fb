"""How a model's state is laid out on the devices of its replicas while executions run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from openipu.engine.devices.replicas import Replicas
from openipu.engine.types import Array

import jax
import jax.numpy as jnp
import numpy as np

from . import offload
from .optimizer_sharding import Shape, Shards, divide, join
from .state import State


class StateLayout(Protocol):
    """A way to lay out a model's state on devices."""

    def spread(self, state: State) -> State:
        """A model's state on the devices."""

    def gather(self, state: State) -> State:
        """The inverse: plain arrays on one device."""

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
        spread = self._on_one(state) if self.replicas.count == 1 else self._on_all(state)
        return offload.to_host(spread) if self.offloaded else spread

    def gather(self, state: State) -> State:
        """The inverse of `spread`: plain arrays on one device."""
        state = offload.to_device(state) if self.offloaded else state
        if self.replicas.count == 1:
            return state
        return State(
            [x.addressable_data(0) for x in state.trainable],
            [x.addressable_data(0) for x in state.non_trainable],
            [
                x.addressable_data(0) if self.shards is None or shape is None else join(x, shape)
                for x, shape in zip(state.optimizer, self._slots(state), strict=True)
            ],
            [jnp.asarray(np.asarray(m).sum(0), m.dtype) for m in state.metrics],
        )

    def own_metrics(self, rows: list[Array]) -> list[Array]:
        """The metrics of each replica on its device, if there is one row for each replica; otherwise nothing."""
        fits = rows and rows[0].shape[0] == self.replicas.count
        return list(jax.device_put(rows, self.replicas.split(0))) if fits else []

    def axes(self, state: State) -> State:
        """The axis along which each part of a spread state is split over replicas; None if it is not split."""
        slots = [None if shape is None else 0 for shape in self._slots(state)]
        return State(None, None, slots, 0)  # type: ignore[arg-type]

    def own_part(self, state: State) -> State:
        """Inside the program: the state of one replica, without the replica axis, which has length one there."""
        return self._at_split(lambda a: a[0], state)

    def rejoin(self, state: State) -> State:
        """The inverse of `own_part`."""
        return self._at_split(lambda a: a[None], state)

    def _at_split(self, change: Callable[[Array], Array], state: State) -> State:
        if self.replicas.count == 1:
            return state
        pairs = zip(state.optimizer, self._slots(state), strict=True)
        optimizer = [a if shape is None else change(a) for a, shape in pairs]
        return state._replace(optimizer=optimizer, metrics=[change(m) for m in state.metrics])

    def _slots(self, state: State) -> tuple[Shape | None, ...]:
        """The shapes of the optimizer's divided slots, and None for what is not divided."""
        return self.shards.slots if self.shards and state.optimizer else (None,) * len(state.optimizer)

    def _on_one(self, state: State) -> State:
        (device,) = self.replicas.devices
        return State(*([x if x.devices() == {device} else jax.device_put(x, device) for x in part] for part in state))

    def _on_all(self, state: State) -> State:
        everywhere, split = self.replicas.everywhere(), self.replicas.split(0)
        metrics = [jnp.zeros((self.replicas.count, *m.shape), m.dtype).at[0].set(m) for m in state.metrics]
        return State(
            jax.device_put(state.trainable, everywhere),
            jax.device_put(state.non_trainable, everywhere),
            [
                jax.device_put(v, everywhere)
                if self.shards is None or shape is None
                else jax.device_put(divide(v, self.replicas.count), split)
                for v, shape in zip(state.optimizer, self._slots(state), strict=True)
            ],
            jax.device_put(metrics, split),
        )
