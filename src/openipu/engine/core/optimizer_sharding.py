"""Optimizer state divided over replicas: each keeps, and updates, one share of every weight's slots.

Per update: gradients are reduced and scattered (one reduce-scatter), each replica updates its shares, and the new
weights are gathered (one all-gather). That needs an optimizer whose update treats every element by itself.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from openipu.engine.devices.replicas import REPLICA_AXIS, Replicas

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

    `weights` holds the shapes of the trainable weights; `slots` those of the optimizer's variables that are divided,
    None for the others (iterations, learning rate, slots of weights with a single element).
    """

    replicas: Replicas
    weights: tuple[Shape, ...]
    slots: tuple[Shape | None, ...]
    constraints: tuple[Any, ...]
    """What each weight is put through after an update, if anything; only the whole one can be."""

    def share(self, shape: Shape) -> int:
        """Elements of an array of that shape that each replica keeps; the last one's share may be padded."""
        return share_of(math.prod(shape), self.replicas.count)

    def scatter(self, gradients: list[Any]) -> list[Any]:
        """This replica's shares of the sum of all replicas' gradients."""
        rows = [self._rows(g) for g in gradients if _is_large(g.shape)]
        joined = jnp.concatenate(rows, axis=1) if rows else jnp.zeros((self.replicas.count, 0))
        mine = iter(self._cut(lax.psum_scatter(joined, REPLICA_AXIS, scatter_dimension=0)))
        small = iter(lax.psum([g for g in gradients if not _is_large(g.shape)], REPLICA_AXIS))
        return [next(mine) if _is_large(g.shape) else next(small) for g in gradients]

    def stand_ins(self, optimizer: list[Any]) -> list[Any]:
        """The optimizer's values with zeros of the full shape in place of shares, for those who only look at others."""
        pairs = zip(optimizer, self.slots, strict=True)
        return [v if shape is None else jnp.zeros(shape, v.dtype) for v, shape in pairs]

    def mine(self, weights: list[Any]) -> list[Any]:
        """This replica's shares of arrays that all replicas have."""
        me = self.replicas.index()
        return [self._rows(w)[me] if _is_large(w.shape) else w for w in weights]

    def gather(self, shares: list[Any]) -> list[Any]:
        """The whole weights after an update, from every replica's shares."""
        large = [s for s, shape in zip(shares, self.weights, strict=True) if _is_large(shape)]
        rows = lax.all_gather(jnp.concatenate(large) if large else jnp.zeros(0), REPLICA_AXIS)
        columns = iter(self._cut(rows, axis=1))
        whole = []
        for share, shape in zip(shares, self.weights, strict=True):
            size = math.prod(shape)
            whole.append(next(columns).reshape(-1)[:size].reshape(shape) if _is_large(shape) else share)
        return constrained(self.constraints, whole)

    def _rows(self, array: Any) -> Any:
        share = self.share(array.shape)
        padded = jnp.pad(array.reshape(-1), (0, self.replicas.count * share - array.size))
        return padded.reshape(self.replicas.count, share)

    def _cut(self, joined: Any, axis: int = 0) -> list[Any]:
        ends = np.cumsum([self.share(shape) for shape in self.weights if _is_large(shape)])
        return jnp.split(joined, ends[:-1].tolist(), axis=axis)


def share_of(size: int, replicas: int) -> int:
    """Elements of an array that each replica has; the last one's share may be padded."""
    return -(-size // replicas)


def divide(array: Any, replicas: int) -> np.ndarray:
    """An array as rows, one for each replica."""
    share = share_of(array.size, replicas)
    flat = np.zeros(replicas * share, array.dtype)
    flat[: array.size] = np.asarray(array).reshape(-1)
    return flat.reshape(replicas, share)


def join(rows: Any, shape: Shape) -> Any:
    """The inverse of `divide`."""
    return jnp.asarray(np.asarray(rows).reshape(-1)[: math.prod(shape)].reshape(shape))


def _is_large(shape: Shape) -> bool:
    return math.prod(shape) > 1


def make_shards(optimizer: Any, weights: list[Any], replicas: Replicas) -> tuple[Shards, Any]:
    """How the state of a built `optimizer` is divided, and its twin that updates shares."""
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


def check_elementwise(optimizer: Any) -> None:
    """Refuse an optimizer whose update of one element depends on others, found out by trying it on a small weight."""
    start = np.linspace(-1, 1, 24, dtype=np.float32).reshape(4, 6)
    gradient = np.float32(1e3) * np.sin(np.arange(24, dtype=np.float32)).reshape(4, 6)
    whole = _try(optimizer, start, gradient).reshape(-1)
    pairs = zip(start.reshape(2, 12), gradient.reshape(2, 12), strict=True)
    halves = np.concatenate([_try(optimizer, half, of_half) for half, of_half in pairs])
    if not np.allclose(whole, halves, rtol=1e-6, atol=1e-7):
        raise ValueError(
            f"The state of {type(optimizer).__name__} cannot be divided over replicas: with its settings, the update "
            "of an element depends on other elements (clipping by norm, factored or layer-wise scaling, ...). "
            "Use `replicated_optimizer_state_sharding=False`, or an optimizer such as SGD, Adam, AdamW or RMSprop."
        )


def _try(optimizer: Any, weight: np.ndarray, gradient: np.ndarray) -> np.ndarray:
    """The weight after two updates by an optimizer that knows nothing else."""
    twin = _twin(optimizer)
    owned = keras.Variable(weight)
    twin.build([owned])
    for _ in range(2):
        twin.apply([jnp.asarray(gradient)], [owned])
    return np.asarray(owned.value)


def _twin(optimizer: Any) -> Any:
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        raise ValueError(
            "The state of LossScaleOptimizer cannot be divided over replicas: whether a step is skipped depends on all "
            "gradients. Use `replicated_optimizer_state_sharding=False`, or the policy mixed_bfloat16."
        )
    problem = f"The state of {type(optimizer).__name__} cannot be divided over replicas"
    return make_twin(optimizer, problem, ", or use `replicated_optimizer_state_sharding=False`")
