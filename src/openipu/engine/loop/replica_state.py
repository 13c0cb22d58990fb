"""The state of replicas that do not all have data: what stays equal on all of them, and how."""

from __future__ import annotations

from typing import Any

from openipu.engine.core.state import State
from openipu.engine.devices.replicas import Replicas

import jax
import jax.numpy as jnp

from .arrays import is_float


def only_if(active: Any, replicas: Replicas, new: State, old: State) -> State:
    """The new state if `active`, else the old one.

    Random seeds advance everywhere, so that they stay equal on all replicas. Moving statistics, equal before, become
    those that the active replicas agree on.
    """

    def choose(a: Any, b: Any) -> Any:
        return jnp.where(active, a, b)

    def settle(a: Any, b: Any) -> Any:
        return b + replicas.mean_of_active(a - b, active) if is_float(a) else a

    return State(
        jax.tree.map(choose, new.trainable, old.trainable),
        [settle(a, b) for a, b in zip(new.non_trainable, old.non_trainable, strict=True)],
        jax.tree.map(choose, new.optimizer, old.optimizer),
        jax.tree.map(choose, new.metrics, old.metrics),
    )


def agree(replicas: Replicas, state: State, begin: State) -> State:
    """Moving statistics averaged over replicas. They are linear in what they see, so once per execution is enough.

    Changes are averaged, not values, so that what did not change stays the same to the bit.
    """
    if replicas.count == 1:
        return state

    def mean(a: Any, b: Any) -> Any:
        return b + replicas.mean(a - b) if is_float(a) else a

    return state._replace(non_trainable=list(map(mean, state.non_trainable, begin.non_trainable)))


def counters(state: State) -> list[Any]:
    """Random seeds and whatever else counts steps, which is equal on all replicas."""
    return [a for a in state.non_trainable if not is_float(a)]


def with_counters(state: State, values: list[Any], condition: Any) -> State:
    """The state with these counters, if `condition`."""
    rest = iter(values)
    return state._replace(
        non_trainable=[a if is_float(a) else jnp.where(condition, next(rest), a) for a in state.non_trainable]
    )
