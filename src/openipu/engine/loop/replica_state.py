"""Keeps the state equal on all replicas, even if only some of them have data."""

from __future__ import annotations

from openipu.engine.core.state import State
from openipu.engine.devices.replicas import Replicas
from openipu.engine.types import Array

import jax
import jax.numpy as jnp

from .arrays import change, is_float
from .remainder import Number


def only_if(active: Number, replicas: Replicas, new: State, old: State, updated: bool) -> State:
    """The new state if `active`, else the old one. If they were `updated`, all replicas have the same new weights.

    Random seeds advance everywhere, so that they stay equal on all replicas. All replicas get the mean of the moving
    statistics of those that are active.
    """

    def choose(a: Array, b: Array) -> Array:
        return jnp.where(active, a, b)

    def settle(a: Array, b: Array) -> Array:
        return b + replicas.mean_of_active(change(a, b), active) if is_float(a) else a

    return State(
        new.trainable if updated else jax.tree.map(choose, new.trainable, old.trainable),
        [settle(a, b) for a, b in zip(new.non_trainable, old.non_trainable, strict=True)],
        new.optimizer,  # without an update, at most the learning rate is new, which is the same everywhere
        jax.tree.map(choose, new.metrics, old.metrics),
    )


def agree(replicas: Replicas, state: State, begin: State) -> State:
    """The state with moving statistics averaged over replicas.

    Moving statistics are linear in the data, so once per execution is enough. Changes are averaged instead of values,
    so that values that did not change stay the same, bit for bit.
    """
    if replicas.count == 1:
        return state

    def mean(a: Array, b: Array) -> Array:
        return b + replicas.mean(change(a, b)) if is_float(a) else a

    return state._replace(non_trainable=list(map(mean, state.non_trainable, begin.non_trainable)))


def counters(state: State) -> list[Array]:
    """Random seeds and everything else that counts steps. They are equal on all replicas."""
    return [a for a in state.non_trainable if not is_float(a)]


def with_counters(state: State, values: list[Array], condition: Number) -> State:
    """The state with these counters if `condition` holds, else with its own."""
    rest = iter(values)
    return state._replace(
        non_trainable=[a if is_float(a) else jnp.where(condition, next(rest), a) for a in state.non_trainable]
    )
