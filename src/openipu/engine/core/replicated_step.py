"""A step as one of several replicas: random numbers by position in the global batch, statistics by group."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from openipu.engine.devices.placement import Placement
from openipu.engine.devices.replicas import Replicas
from openipu.engine.keras_compat.patches import BATCH_MOMENTS, RANDOM_FUNCTIONS
from openipu.engine.types import Array

import jax
import jax.numpy as jnp
from jax import lax

from .state import Batch, Spot, State, Step


def on_replicas(step: Step, place: Placement) -> Step:
    """A step that runs as one of the replicas of `place`: random numbers by position, statistics by group."""
    if place.replicas.count == 1:
        return step
    return replace(step, micro=functools.partial(_on_one_of, place.replicas, place.batch_norm_group, step))


def _on_one_of(
    replicas: Replicas,
    group: int,
    step: Step,
    state: State,
    batch: Batch,
    active: Array | bool = True,
    spot: Spot | None = None,
) -> Any:
    """Run a micro-batch as one of several replicas.

    Without a `spot`, the micro-batches of all replicas have the same size and lie side by side.
    """
    rows = jax.tree.leaves(batch)[0].shape[0]
    with one_of_several(replicas, group, lambda: rows, active, spot):
        return step.micro(state, batch, active) if step.applies else step.micro(state, batch)


@contextlib.contextmanager
def one_of_several(
    replicas: Replicas,
    group: int,
    rows: Callable[[], int | None],
    active: Array | bool = True,
    spot: Spot | None = None,
) -> Iterator[None]:
    """Until the block ends, trace as one of several replicas. `rows()` is the number of samples in a micro-batch.

    Without a `spot`, the micro-batches of all replicas have the same size and lie side by side.
    """
    with _random_by_position(replicas, rows, spot), _shared_statistics(replicas, group, active):
        yield


def _random_by_position(
    replicas: Replicas, rows: Callable[[], int | None], spot: Spot | None
) -> contextlib.AbstractContextManager[None]:
    """Keras' random functions draw for the samples of all replicas, and each replica takes its own part.

    So dropout does not depend on how a global batch is divided. XLA only computes the part that is used. Functions with
    parameters per sample (`categorical`, ...) cannot be drawn that way: there, each replica draws from its own key.
    """

    def by_position(function: Callable[..., Any], name: str) -> Callable[..., Any]:
        return functools.partial(_draw, function, replicas, rows(), spot) if name in _SHAPED else function

    return RANDOM_FUNCTIONS.using(by_position)


_SHAPED = ("normal", "uniform", "randint", "truncated_normal", "bernoulli", "gamma", "binomial", "beta", "categorical")


def _draw(
    function: Callable[..., Any],
    replicas: Replicas,
    rows: int | None,
    spot: Spot | None,
    key: Array,
    *args: Any,
    **kwargs: Any,
) -> Any:
    if rows is None:
        return function(key, *args, **kwargs)
    spot = spot or Spot(replicas.index() * rows, replicas.count * rows)
    values = inspect.signature(function).bind(key, *args, **kwargs)
    shape = values.arguments.get("shape")
    if any(jnp.ndim(a) and jnp.shape(a)[0] == rows for a in values.args[1:] if isinstance(a, jax.Array)):
        return function(jax.random.fold_in(jax.random.wrap_key_data(key), replicas.index()), *args, **kwargs)
    if not shape or shape[0] != rows:
        return function(key, *args, **kwargs)
    values.arguments["shape"] = (spot.total, *shape[1:])
    return lax.dynamic_slice_in_dim(function(*values.args, **values.kwargs), spot.first, rows)


def _shared_statistics(replicas: Replicas, group: int, active: Array | bool) -> contextlib.AbstractContextManager[None]:
    """BatchNormalization takes mean and variance over the micro-batches of `group` consecutive replicas.

    Replicas that are not `active` have no micro-batch. They add nothing to the statistics or their gradients.
    """

    def shared(
        moments: Callable[..., tuple[Array, Array]], layer: Any, inputs: Array, mask: Any
    ) -> tuple[Array, Array]:
        mean, variance = moments(layer, inputs, mask)
        average = over_group if mask is None else functools.partial(by_weight, jnp.sum(mask, dtype=mean.dtype))
        whole = average(mean)
        return whole, average(variance + jnp.square(mean - whole))

    def by_weight(weight: Array, values: Array) -> Array:
        """With a mask, replicas have different numbers of values; none at all is possible, too."""
        return over_group(weight * values) / jnp.maximum(over_group(weight), 1e-7)

    def over_group(values: Array) -> Array:
        whole = replicas.mean_of_active(values, active, group)
        return jnp.where(active, whole, lax.stop_gradient(whole))

    return contextlib.nullcontext() if group == 1 else BATCH_MOMENTS.using(shared)
