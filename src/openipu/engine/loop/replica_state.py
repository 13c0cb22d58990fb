"""Keeps the state equal on all replicas, even if only some of them have data."""

from __future__ import annotations

from collections.abc import Sequence

from openipu.engine.core.state import State
from openipu.engine.devices.replicas import Replicas
from openipu.engine.types import Array

import jax
import jax.numpy as jnp

from .arrays import is_float
from .remainder import Number


def only_if(active: Number, replicas: Replicas, new: State, old: State, updated: bool) -> State:
    """The new state if `active`, else the old one. If they were `updated`, all replicas have the same new weights.

    Random seeds advance everywhere, so that they stay equal on all replicas. All replicas get the mean of the moving
    statistics of those that are active.
    """

    def choose(a: Array, b: Array) -> Array:
        return jnp.where(active, a, b)

    return State(
        new.trainable if updated else jax.tree.map(choose, new.trainable, old.trainable),
        mean_where_changed(replicas, new.non_trainable, old.non_trainable, active),
        new.optimizer,  # without an update, at most the learning rate is new, which is the same everywhere
        jax.tree.map(choose, new.metrics, old.metrics),
    )


def agree(replicas: Replicas, state: State, begin: State) -> State:
    """The state with moving statistics averaged over replicas.

    Moving statistics are linear in the data, so once per execution is enough.
    """
    return state._replace(non_trainable=mean_where_changed(replicas, state.non_trainable, begin.non_trainable))


def mean_where_changed(
    replicas: Replicas, new: Sequence[Array], old: Sequence[Array], active: Number | bool = True
) -> list[Array]:
    """New values. Floating-point arrays that have changed on any of the active replicas become their mean.

    Arrays that have not changed stay the same, bit for bit. The mean of changes would do that as well, but it loses a
    new value if the old one is infinite or much larger.
    """
    places = [i for i, a in enumerate(new) if is_float(a)]
    if replicas.count == 1 or not places:
        return list(new)
    moved = jnp.stack([jnp.any(new[i] != old[i]) for i in places]).astype(jnp.float32)
    means, shares = replicas.mean_of_active(([new[i] for i in places], moved), active)
    found = list(new)
    for number, i in enumerate(places):
        found[i] = jnp.where(shares[number] > 0, means[number], old[i])
    return found


def counters(state: State) -> list[Array]:
    """Random seeds and everything else that counts steps. They are equal on all replicas."""
    return [a for a in state.non_trainable if not is_float(a)]


def with_counters(state: State, values: list[Array], condition: Number) -> State:
    """The state with these counters if `condition` holds, else with its own."""
    rest = iter(values)
    return state._replace(
        non_trainable=[a if is_float(a) else jnp.where(condition, next(rest), a) for a in state.non_trainable]
    )
