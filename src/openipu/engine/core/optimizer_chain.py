"""What an optimizer and its wrappers ask of the engine, and how the engine calls them.

Per micro-batch `map_gradients`, then accumulation and the reduction over replicas as `describe` says, then `update`.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from functools import reduce
from typing import Any

import keras

from .wrapped_optimizer import Declared, IpuOptimizer, by_engine, chain, loss_scale


def describe(optimizer: Any) -> Declared:
    """What `optimizer` and all optimizers inside it ask for; `Declared()` for a plain one."""
    links = list(chain(optimizer))
    _check(links)
    return reduce(operator.or_, (link.declared for link in links if isinstance(link, IpuOptimizer)), Declared())


def map_gradients(
    optimizer: Any, gradients: Sequence[Any], weights: Sequence[Any], state: Sequence[Any] | None = None
) -> list[Any]:
    """The gradients of one micro-batch, mapped by every wrapper that does so, from the outermost to the innermost.

    `weights` and `state` are the values of the weights and of the optimizer's variables (None: those they have).
    Gradients of a scaled loss are mapped as those of the loss itself, and scaled again. Where they overflowed they are
    left alone, so that a `LossScaleOptimizer` notices.
    """
    links = list(chain(optimizer))
    maps = [link for link in links if isinstance(link, IpuOptimizer) and link.maps_gradients]
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
