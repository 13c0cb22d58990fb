"""The state of a model as a named value, a step as pure functions over it, and what an execution returns."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from openipu.engine.types import Array

import jax

Mode = Literal["train", "test", "predict"]
Batch = Any
"""A micro-batch: a tuple of x, y and sample weights, or what a user's own step takes."""
Logs = dict[str, Any]
"""Metrics by name."""


class State(NamedTuple):
    """Everything a step reads and writes. Parts that a mode does not use are empty lists."""

    trainable: list[Any]
    non_trainable: list[Any]
    optimizer: list[Any]
    metrics: list[Any]


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class Spot:
    """Where a micro-batch lies in the batch of all replicas. Random numbers are drawn by position in it."""

    first: Array | int
    """The position of its first sample."""
    total: int = field(metadata={"static": True})
    """How many samples all replicas have together in a full step."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What an execution returns, and what happens around its micro-batches, whether or not they run in stages.

    `collect` says which results are kept: "none" (`finish` computes them from the final state), "last" (those of the
    last micro-batch), or "all" (one per row of data, as in predict).
    """

    collect: Literal["none", "last", "all"]
    finish: Callable[[State], Any] | None = None
    check: Callable[[State, Batch], None] | None = None
    """Raises if a micro-batch cannot do what the user wants. Called once, while a program is traced."""
    begin: Callable[[State], State] | None = None
    """Changes the state when an execution begins, for example to clear the results of the last one."""
    adds: bool = False
    """Whether the loss of a micro-batch is the sum over its samples, not the mean."""


@dataclass(frozen=True, slots=True)
class Step:
    """One micro-batch as a pure function, the update after one or more of them, and what an execution returns.

    `micro` returns the new state, the gradients and the results. It may be told its `Spot` and whether its replica is
    active in this step (has a micro-batch). `update` applies accumulated gradients. It is None if there is nothing to
    apply, or if a user's own `train_step` applies them itself.
    """

    micro: Callable[..., tuple[State, list[Any], Any]]
    update: Callable[[State, list[Any]], State] | None
    outcome: Outcome
    applies: bool = False
    """Whether `micro` updates the weights itself, with the gradients of all active replicas, as a user's own step does.

    On inactive replicas it makes the same update. It can only see batches of one size at a time, so a smaller last
    batch makes an update of its own.
    """


def state_of(mode: Mode, parts: tuple[Any, ...]) -> State:
    """The state as a named value, from the plain tuple that Keras' trainer uses in `mode`."""
    trainable, non_trainable, *rest = parts
    optimizer, metrics = rest if mode == "train" else ([], *rest) if mode == "test" else ([], [])
    return State(list(trainable), list(non_trainable), list(optimizer), list(metrics))


def parts_of(mode: Mode, state: State) -> tuple[Any, ...]:
    """The inverse of `state_of`."""
    return {"train": tuple(state), "test": (*state[:2], state.metrics), "predict": state[:2]}[mode]
