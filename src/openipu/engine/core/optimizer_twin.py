"""A second optimizer with the settings of a first one, for a part of its weights."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from typing import Any

from openipu.engine.keras_compat.api import decays

import jax.numpy as jnp
import keras

from .wrapped_optimizer import chain


def make_twin(optimizer: Any, problem: str, otherwise: str = "") -> Any:
    """An optimizer made from another one's configuration; it has no variables yet.

    Where that fails, the error begins with `problem` and its remedy ends with `otherwise`.
    """
    try:
        return type(optimizer).from_config(optimizer.get_config())
    except (NotImplementedError, TypeError, ValueError) as error:
        raise ValueError(
            f"{problem}: a second one cannot be made from its configuration ({error}). Give it, or its learning-rate "
            f"schedule, a complete `get_config`{otherwise}."
        ) from error


def stand_in(weight: Any, shape: Sequence[int], prefix: str = "") -> Any:
    """A variable of `shape` in place of a weight. It has the weight's path, because some optimizers look at it.

    `prefix` comes before its name, which is in the names of the optimizer's variables.
    """
    *scopes, name = weight.path.split("/")
    with contextlib.ExitStack() as stack:
        for scope in scopes:
            stack.enter_context(keras.name_scope(scope))
        return keras.Variable(jnp.zeros(shape, weight.dtype), name=prefix + name)


def constrained(constraints: Iterable[Any], weights: Iterable[Any]) -> list[Any]:
    """Updated weights, changed as the constraint of each wants it. Twins cannot do it where they have only shares."""
    return [w if rule is None else rule(w) for rule, w in zip(constraints, weights, strict=True)]


def build_twin(twin: Any, optimizer: Any, stand_ins: Sequence[Any], weights: Sequence[Any]) -> None:
    """Make the twin's variables for `stand_ins`, which decay where the optimizer's `weights` do.

    Users exclude some weights from decay, and no configuration tells. Whole stand-ins have the weights' constraints.
    """
    inner = _innermost(optimizer)
    steady = [own for own, w in zip(stand_ins, weights, strict=True) if not decays(inner, w)]
    _innermost(twin).exclude_from_weight_decay(steady)
    for own, w in zip(stand_ins, weights, strict=True):
        own.constraint = w.constraint if own.shape == w.shape else None
    twin.build(list(stand_ins))


def _innermost(optimizer: Any) -> Any:
    return list(chain(optimizer))[-1]
