"""A second optimizer with the settings of the first, for some of its weights."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

from openipu.engine.keras_compat.api import decays
from openipu.engine.types import Array

import jax
import jax.numpy as jnp
import keras

from .enqueued import Enqueued, collecting
from .optimizer_chain import update
from .wrapped_optimizer import IpuOptimizer, chain


class HasShape(Protocol):
    """A variable, an array, or the description of one."""

    @property
    def shape(self) -> Any:
        """Its shape."""

    @property
    def dtype(self) -> Any:
        """The type of its elements."""


def make_twin(optimizer: keras.optimizers.Optimizer, problem: str, otherwise: str = "") -> keras.optimizers.Optimizer:
    """An optimizer made from another one's configuration. It has no variables yet.

    Wrappers have no state and are copied as they are. If the optimizer inside them cannot be copied, the error begins
    with `problem` and its remedy ends with `otherwise`.
    """
    if isinstance(optimizer, IpuOptimizer):
        return optimizer.around(make_twin(optimizer.inner_optimizer, problem, otherwise))
    if type(optimizer) is keras.optimizers.LossScaleOptimizer:
        inner = make_twin(optimizer.inner_optimizer, problem, otherwise)
        growth = optimizer.dynamic_growth_steps
        return keras.optimizers.LossScaleOptimizer(inner, optimizer.initial_scale, growth, name=optimizer.name)
    try:
        return type(optimizer).from_config(optimizer.get_config())
    except (NotImplementedError, TypeError, ValueError) as error:
        raise ValueError(
            f"{problem}: it cannot be copied by means of its configuration ({error}). Give it, or its learning-rate "
            f"schedule, a complete `get_config`{otherwise}."
        ) from error


def may_enqueue(optimizer: keras.optimizers.Optimizer) -> bool:
    """Whether an optimizer could enqueue into outfeeds: only classes of users do."""
    return any(type(link).__module__.split(".")[0] not in ("keras", "openipu") for link in chain(optimizer))


def enqueued_by(optimizer: keras.optimizers.Optimizer, weights: Sequence[HasShape]) -> Enqueued:
    """The shapes of what a built optimizer enqueues when it updates these weights. Its twins may not do so."""

    def run(state: list[Array], gradients: list[Array], values: list[Array]) -> Enqueued:
        return collecting(update)(optimizer, state, gradients, values)[1]

    if not may_enqueue(optimizer):
        return Enqueued()
    own, given = ([jax.ShapeDtypeStruct(v.shape, v.dtype) for v in part] for part in (optimizer.variables, weights))
    shapes: Enqueued = jax.eval_shape(run, own, given, given)
    return shapes


def stand_in(weight: keras.Variable, shape: Sequence[int], suffix: str = "") -> keras.Variable:
    """A variable of `shape` in place of a weight. It has the weight's path, because some optimizers search in it.

    `suffix` is put after its name, which becomes part of the names of the optimizer's variables.
    """
    *scopes, name = weight.path.split("/")
    with contextlib.ExitStack() as stack:
        for scope in scopes:
            stack.enter_context(keras.name_scope(scope))
        return keras.Variable(jnp.zeros(shape, weight.dtype), name=name + suffix)


def constrained(constraints: Iterable[Callable[[Array], Array] | None], weights: Iterable[Array]) -> list[Array]:
    """Updated weights with their constraints applied. A twin that only has shares of them cannot do this itself."""
    return [w if rule is None else rule(w) for rule, w in zip(constraints, weights, strict=True)]


def build_twin(
    twin: keras.optimizers.Optimizer,
    optimizer: keras.optimizers.Optimizer,
    stand_ins: Sequence[keras.Variable],
    weights: Sequence[keras.Variable],
) -> None:
    """Make the twin's variables for `stand_ins`, which decay where the optimizer's `weights` do.

    Users can exclude weights from decay, and the configuration does not record it. Full-size stand-ins get the
    weights' constraints.
    """
    inner = _innermost(optimizer)
    steady = [own for own, w in zip(stand_ins, weights, strict=True) if not decays(inner, w)]
    _innermost(twin).exclude_from_weight_decay(steady)
    for own, w in zip(stand_ins, weights, strict=True):
        own.constraint = w.constraint if own.shape == w.shape else None
    twin.build(list(stand_ins))


def _innermost(optimizer: keras.optimizers.Optimizer) -> keras.optimizers.Optimizer:
    return list(chain(optimizer))[-1]
