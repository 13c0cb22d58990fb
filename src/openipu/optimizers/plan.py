"""What an optimizer and its wrappers ask of the engine, and how the engine calls them.

Per micro-batch `map_gradients`, then accumulation and the reduction over replicas as `describe` says, then `update`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from openipu.engine.accumulate import Accumulation

import keras

from .base import IpuOptimizer, by_engine, chain, loss_scale
from .wrappers import CrossReplicaOptimizer, GradientAccumulationOptimizerV2, MapGradientOptimizer


@dataclass(frozen=True, slots=True)
class OptimizerPlan:
    """What the wrappers around an optimizer declare."""

    accumulation: Accumulation | None = None
    """Micro-batches per update; None: no wrapper says."""
    replica_reduction: Literal["sum", "mean"] = "sum"
    shard_state: bool = False
    """Whether each replica keeps only its share of the optimizer's state."""
    offload: bool | None = None
    """Whether the optimizer's state lives on the host between updates; None: no wrapper says."""


def describe(optimizer: Any) -> OptimizerPlan:
    """What `optimizer` declares, whatever is around or inside of it; `OptimizerPlan()` for a plain one."""
    links = list(chain(optimizer))
    _check(links)
    reduction: Literal["sum", "mean"] = "mean" if any(isinstance(o, CrossReplicaOptimizer) for o in links) else "sum"
    for link in links:
        if isinstance(link, GradientAccumulationOptimizerV2):
            return OptimizerPlan(
                link.accumulation,
                reduction,
                link.replicated_optimizer_state_sharding,
                link.offload_weight_update_variables,
            )
    return OptimizerPlan(replica_reduction=reduction)


def map_gradients(
    optimizer: Any, gradients: Sequence[Any], weights: Sequence[Any], state: Sequence[Any] | None = None
) -> list[Any]:
    """The gradients of one micro-batch, mapped by every `MapGradientOptimizer`, from the outermost to the innermost.

    `weights` and `state` are the values of the weights and of the optimizer's variables (None: those they have).
    Gradients of a scaled loss are mapped as those of the loss itself, and scaled again. Where they overflowed they are
    left alone, so that a `LossScaleOptimizer` notices.
    """
    links = list(chain(optimizer))
    maps = [link for link in links if isinstance(link, MapGradientOptimizer)]
    gradients = list(gradients)
    if maps:
        scale = loss_scale(optimizer, state)
        keep = any(isinstance(link, keras.optimizers.LossScaleOptimizer) for link in links)
        for link in maps:
            gradients = link.mapped(gradients, weights, scale, keep_overflow=keep)
    return gradients


def update(
    optimizer: Any, state: Sequence[Any], gradients: Sequence[Any], weights: Sequence[Any]
) -> tuple[list[Any], list[Any]]:
    """The weights and the optimizer's state after gradients that the engine has mapped, accumulated and reduced."""
    with by_engine():
        new_weights, new_state = optimizer.stateless_apply(list(state), list(gradients), list(weights))
    return list(new_weights), list(new_state)


def unwrapped(optimizer: Any) -> Any:
    """The optimizer inside the wrappers; it has the same variables and makes the same updates."""
    return next(link for link in chain(optimizer) if not isinstance(link, IpuOptimizer))


def _check(links: list[Any]) -> None:
    scales = sum(isinstance(link, keras.optimizers.LossScaleOptimizer) for link in links)
    if scales > 1:
        raise ValueError(
            f"{scales} `LossScaleOptimizer`s are around each other, and each of them scales the loss. Keras adds one "
            "to any other optimizer under mixed precision: leave yours out, or put it around all wrappers."
        )
    hidden = [o for several in getattr(links[-1], "optimizers", ()) for o in chain(several)]
    for link in hidden:
        if isinstance(link, IpuOptimizer):
            raise ValueError(
                f"{link.name!r} is one of several optimizers inside {links[-1].name!r}, but it speaks about all "
                f"gradients of an update. Put it around {links[-1].name!r}."
            )
