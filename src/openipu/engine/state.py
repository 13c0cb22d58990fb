"""The state of a model as a named value, and a step as pure functions over it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .replicate import Replicas
from .shard import Shards

Mode = Literal["train", "test", "predict"]
Batch = Any
Logs = dict[str, Any]


class State(NamedTuple):
    """Everything a step reads and writes. Parts that a mode does not use are empty lists."""

    trainable: list[Any]
    non_trainable: list[Any]
    optimizer: list[Any]
    metrics: list[Any]


@dataclass(frozen=True, slots=True)
class Step:
    """One micro-batch as a pure function, the update after one or more of them, and what an execution gives back.

    `micro` gives the new state, the gradients and the results; `update` applies gradients that were accumulated over
    micro-batches (None where there is nothing to apply, or where a user's own `train_step` does it itself).
    `collect` says which results matter: "none" (they are computed from the final state by `finish`), "last" (those of
    the last micro-batch), or "all" (one per row of data, as in predict).
    """

    micro: Callable[[State, Batch], tuple[State, list[Any], Any]]
    update: Callable[[State, list[Any]], State] | None
    collect: Literal["none", "last", "all"]
    finish: Callable[[State], Any] | None = None


def spread_state(state: State, replicas: Replicas, shards: Shards | None = None) -> State:
    """A model's state on the devices of all replicas; what is there already is not copied.

    Each replica counts its own metrics from zero, except the first, which goes on from what is there.
    """
    if replicas.count == 1:
        (device,) = replicas.devices
        return State(*([x if x.devices() == {device} else jax.device_put(x, device) for x in part] for part in state))
    metrics = [jnp.zeros((replicas.count, *m.shape), m.dtype).at[0].set(m) for m in state.metrics]
    slots = shards.slots if shards and state.optimizer else (None,) * len(state.optimizer)
    return State(
        jax.device_put(state.trainable, replicas.everywhere()),
        jax.device_put(state.non_trainable, replicas.everywhere()),
        [
            jax.device_put(v, replicas.everywhere())
            if shards is None or shape is None
            else jax.device_put(shards.divide(v), replicas.split(0))
            for v, shape in zip(state.optimizer, slots, strict=True)
        ],
        jax.device_put(metrics, replicas.split(0)),
    )


def gather_state(state: State, replicas: Replicas, shards: Shards | None = None) -> State:
    """The inverse of `spread_state`: plain arrays on one device."""
    if replicas.count == 1:
        return state
    slots = shards.slots if shards and state.optimizer else (None,) * len(state.optimizer)
    return State(
        [x.addressable_data(0) for x in state.trainable],
        [x.addressable_data(0) for x in state.non_trainable],
        [
            x.addressable_data(0) if shards is None or shape is None else shards.join(x, shape)
            for x, shape in zip(state.optimizer, slots, strict=True)
        ],
        [jnp.asarray(np.asarray(m).sum(0), m.dtype) for m in state.metrics],
    )


def split_axes(state: State, replicas: Replicas, shards: Shards | None = None) -> State:
    """The axis along which each part of a spread state is split over replicas, None for what all have."""
    if replicas.count == 1 or shards is None:
        return State(None, None, None, 0)  # type: ignore[arg-type]
    slots = shards.slots if state.optimizer else ()
    return State(None, None, [None if shape is None else 0 for shape in slots], 0)  # type: ignore[arg-type]


def own_part(state: State, axes: State) -> State:
    """Inside the program: the state of one replica, without the axis of length one for the replica."""
    return _at_split(lambda a: a[0], state, axes)


def rejoin(state: State, axes: State) -> State:
    """The inverse of `own_part`."""
    return _at_split(lambda a: a[None], state, axes)


def _at_split(change: Callable[[Any], Any], state: State, axes: State) -> State:
    optimizer = state.optimizer
    if axes.optimizer is not None:
        optimizer = [a if axis is None else change(a) for a, axis in zip(optimizer, axes.optimizer, strict=True)]
    return state._replace(optimizer=optimizer, metrics=[change(m) for m in state.metrics])


def state_of(mode: Mode, parts: tuple[Any, ...]) -> State:
    """The state behind the anonymous tuple that Keras' trainer uses in `mode`."""
    trainable, non_trainable, *rest = parts
    optimizer, metrics = rest if mode == "train" else ([], *rest) if mode == "test" else ([], [])
    return State(list(trainable), list(non_trainable), list(optimizer), list(metrics))


def parts_of(mode: Mode, state: State) -> tuple[Any, ...]:
    """The inverse of `state_of`."""
    return {"train": tuple(state), "test": (*state[:2], state.metrics), "predict": state[:2]}[mode]
