"""What an optimizer and its wrappers ask of the engine, and how the engine calls them.

The engine calls `map_gradients` for each micro-batch. It then accumulates the gradients and reduces them over replicas,
as `describe` says, and calls `update`.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from functools import reduce

from openipu.engine.types import Array

import keras

from .wrapped_optimizer import Declared, IpuOptimizer, applies_itself, by_engine, chain, loss_scale


def describe(optimizer: keras.optimizers.Optimizer) -> Declared:
    """What `optimizer` and all optimizers inside it ask for; `Declared()` for a plain optimizer."""
    links = list(chain(optimizer))
    _check(links)
    return reduce(operator.or_, (link.declared for link in links if isinstance(link, IpuOptimizer)), Declared())


def map_gradients(
    optimizer: keras.optimizers.Optimizer,
    gradients: Sequence[Array],
    weights: Sequence[Array],
    state: Sequence[Array] | None = None,
) -> list[Array]:
    """The gradients of one micro-batch, mapped by all wrappers from the outermost to the innermost.

    `weights` and `state` are the values of the weights and of the optimizer's variables (None: their current values).
    Gradients of a scaled loss are unscaled, mapped and scaled again. Gradients that overflowed are left alone, so that
    a `LossScaleOptimizer` notices.
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
    optimizer: keras.optimizers.Optimizer, state: Sequence[Array], gradients: Sequence[Array], weights: Sequence[Array]
) -> tuple[list[Array], list[Array]]:
    """The new weights and optimizer state. The engine has mapped, accumulated and reduced the gradients before."""
    with by_engine():
        new_weights, new_state = optimizer.stateless_apply(list(state), list(gradients), list(weights))
    return list(new_weights), list(new_state)


def unwrapped(optimizer: keras.optimizers.Optimizer) -> keras.optimizers.Optimizer:
    """The optimizer without outer wrappers that do not change updates. It has the same variables."""
    return next(link for link in chain(optimizer) if not isinstance(link, IpuOptimizer) or applies_itself(link))


def _check(links: list[keras.optimizers.Optimizer]) -> None:
    scales = sum(isinstance(link, keras.optimizers.LossScaleOptimizer) for link in links)
    if scales > 1:
        raise ValueError(
            f"{scales} `LossScaleOptimizer`s are nested, and each of them scales the loss. Under mixed precision, "
            "Keras puts one around any other optimizer: leave yours out, or put it around all wrappers."
        )
    for link in links:
        if isinstance(link, IpuOptimizer) and type(link).update_step is not keras.optimizers.Optimizer.update_step:
            raise ValueError(
                f"{link.name!r} is a wrapper with an `update_step`, but updates are made by the optimizer inside it. "
                "Override `apply`, or make it a subclass of `keras.optimizers.Optimizer`."
            )
    hidden = [o for several in getattr(links[-1], "optimizers", ()) for o in chain(several)]
    for link in hidden:
        if isinstance(link, IpuOptimizer):
            raise ValueError(
                f"{link.name!r} is one of several optimizers inside {links[-1].name!r}, but it applies to all "
                f"gradients of an update. Put it around {links[-1].name!r}."
            )
