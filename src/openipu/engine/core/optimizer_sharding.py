"""Optimizer state divided over replicas: each replica keeps and updates one share of every weight's slots.

In each update, gradients are reduced and scattered (one reduce-scatter), each replica updates its shares, and the new
weights are gathered (one all-gather). This needs an optimizer that updates every element independently.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from openipu.engine.devices.replicas import REPLICA_AXIS, Replicas
from openipu.engine.types import Array

import jax.numpy as jnp
import keras
import numpy as np
from jax import lax

from .optimizer_chain import unwrapped
from .optimizer_twin import build_twin, constrained, make_twin, stand_in

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Shards:
    """Which parts of the state are divided, and how.

    `weights` holds the shapes of the trainable weights. `slots` holds the shape of each divided optimizer variable, and
    None for the others (iterations, learning rate, slots of weights with a single element).
    """

    replicas: Replicas
    weights: tuple[Shape, ...]
    slots: tuple[Shape | None, ...]
    constraints: tuple[Callable[[Array], Array] | None, ...]
    """The constraint on each weight, if any. It is applied to the whole weight after an update."""

    def share(self, shape: Shape) -> int:
        """How many elements of an array of this shape each replica keeps. The last replica's share may be padded."""
        return share_of(math.prod(shape), self.replicas.count)

    def scatter(self, gradients: list[Array]) -> list[Array]:
        """This replica's shares of the sum of all replicas' gradients."""
        rows = [self._rows(g) for g in gradients if _is_large(g.shape)]
        joined = jnp.concatenate(rows, axis=1) if rows else jnp.zeros((self.replicas.count, 0))
        mine = iter(self._cut(lax.psum_scatter(joined, REPLICA_AXIS, scatter_dimension=0)))
        small = iter(lax.psum([g for g in gradients if not _is_large(g.shape)], REPLICA_AXIS))
        return [next(mine) if _is_large(g.shape) else next(small) for g in gradients]

    def stand_ins(self, optimizer: list[Array]) -> list[Array]:
        """The optimizer's values, with full-size zeros in place of shares, for code that only reads the others."""
        pairs = zip(optimizer, self.slots, strict=True)
        return [v if shape is None else jnp.zeros(shape, v.dtype) for v, shape in pairs]

    def mine(self, weights: list[Array]) -> list[Array]:
        """This replica's shares of arrays that every replica has in full."""
        me = self.replicas.index()
        return [self._rows(w)[me] if _is_large(w.shape) else w for w in weights]

    def gather(self, shares: list[Array]) -> list[Array]:
        """The whole weights after an update, from every replica's shares."""
        large = [s for s, shape in zip(shares, self.weights, strict=True) if _is_large(shape)]
        rows = lax.all_gather(jnp.concatenate(large) if large else jnp.zeros(0), REPLICA_AXIS)
        columns = iter(self._cut(rows, axis=1))
        whole = []
        for share, shape in zip(shares, self.weights, strict=True):
            size = math.prod(shape)
            whole.append(next(columns).reshape(-1)[:size].reshape(shape) if _is_large(shape) else share)
        return constrained(self.constraints, whole)

    def _rows(self, array: Array) -> Array:
        share = self.share(array.shape)
        padded = jnp.pad(array.reshape(-1), (0, self.replicas.count * share - array.size))
        return padded.reshape(self.replicas.count, share)

    def _cut(self, joined: Array, axis: int = 0) -> list[Array]:
        ends = np.cumsum([self.share(shape) for shape in self.weights if _is_large(shape)])
        return jnp.split(joined, ends[:-1].tolist(), axis=axis)


def share_of(size: int, replicas: int) -> int:
    """How many elements of an array of `size` each replica keeps. The last replica's share may be padded."""
    return -(-size // replicas)


def divide(array: Array, replicas: int) -> np.ndarray:
    """An array as rows, one per replica."""
    share = share_of(array.size, replicas)
    flat = np.zeros(replicas * share, array.dtype)
    flat[: array.size] = np.asarray(array).reshape(-1)
    return flat.reshape(replicas, share)


def join(rows: Array | np.ndarray | Sequence[Array], shape: Shape) -> Array:
    """The inverse of `divide`."""
    return jnp.asarray(np.asarray(rows).reshape(-1)[: math.prod(shape)].reshape(shape))


def _is_large(shape: Shape) -> bool:
    return math.prod(shape) > 1


def make_shards(
    optimizer: keras.optimizers.Optimizer, weights: list[keras.Variable], replicas: Replicas
) -> tuple[Shards, keras.optimizers.Optimizer]:
    """How the state of a built `optimizer` is divided, and a twin of it that updates the shares."""
    optimizer = unwrapped(optimizer)
    check_elementwise(optimizer)
    shapes = tuple(tuple(w.shape) for w in weights)
    shards = Shards(replicas, shapes, (), tuple(w.constraint if _is_large(w.shape) else None for w in weights))
    twin = _twin(optimizer)
    sizes = [(shards.share(s),) if _is_large(s) else s for s in shapes]
    shares = [stand_in(w, size) for w, size in zip(weights, sizes, strict=True)]
    build_twin(twin, optimizer, shares, weights)
    pairs = zip(optimizer.variables, twin.variables, strict=True)
    slots = tuple(None if v.shape == t.shape else tuple(v.shape) for v, t in pairs)
    return replace(shards, slots=slots), twin


def check_elementwise(optimizer: keras.optimizers.Optimizer) -> None:
    """Reject an optimizer that does not update every element independently, by trying it on a small weight."""
    start = np.linspace(-1, 1, 24, dtype=np.float32).reshape(4, 6)
    gradient = np.float32(1e3) * np.sin(np.arange(24, dtype=np.float32)).reshape(4, 6)
    whole = _try(optimizer, start, gradient).reshape(-1)
    pairs = zip(start.reshape(2, 12), gradient.reshape(2, 12), strict=True)
    halves = np.concatenate([_try(optimizer, half, of_half) for half, of_half in pairs])
    if not np.allclose(whole, halves, rtol=1e-6, atol=1e-7):
        raise ValueError(
            f"The state of {type(optimizer).__name__} cannot be divided over replicas: with its settings, the update "
            "of one element depends on others (clipping by norm, factored or layer-wise scaling, ...). "
            "Use `replicated_optimizer_state_sharding=False`, or an optimizer such as SGD, Adam, AdamW or RMSprop."
        )


def _try(optimizer: keras.optimizers.Optimizer, weight: np.ndarray, gradient: np.ndarray) -> np.ndarray:
    """The weight after two updates by a new optimizer with the same settings."""
    twin = _twin(optimizer)
    owned = keras.Variable(weight)
    twin.build([owned])
    for _ in range(2):
        twin.apply([jnp.asarray(gradient)], [owned])
    return np.asarray(owned.value)


def _twin(optimizer: keras.optimizers.Optimizer) -> keras.optimizers.Optimizer:
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        raise ValueError(
            "The state of LossScaleOptimizer cannot be divided over replicas: whether a step is skipped depends on all "
            "gradients. Use `replicated_optimizer_state_sharding=False`, or the policy mixed_bfloat16."
        )
    problem = f"The state of {type(optimizer).__name__} cannot be divided over replicas"
    return make_twin(optimizer, problem, ", or use `replicated_optimizer_state_sharding=False`")
