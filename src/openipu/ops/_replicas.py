"""The replicas of a program, as seen from inside it.

The engine runs a model on several replicas under the mesh axis "replica", and on one replica without any axis. Outside
of programs there is one replica too. However, Keras infers the shapes of a layer's outputs before there is a program
([Note: shapes before programs]).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from openipu import _validate as validate
from openipu.engine.devices.replicas import REPLICA_AXIS
from openipu.engine.types import Array, Tree

import jax
import keras
from jax import lax
from jax.typing import ArrayLike


def count() -> int:
    """The number of replicas of the program that is being traced; 1 outside of programs."""
    try:
        return int(lax.axis_size(REPLICA_AXIS))
    except NameError:  # JAX has no axis of this name
        return 1


def stated_count(replication_factor: int) -> int:
    """The number of replicas that the caller gave, checked against the actual number."""
    stated, actual = validate.count("replication_factor", replication_factor), count()
    if stated != actual and not (actual == 1 and infers_shapes()):
        raise ValueError(
            f"`replication_factor` is {stated}, but the number of replicas here is {actual}. Give the number of "
            "replicas that the model runs on, or 1 outside of a strategy's programs."
        )
    return stated


def groups(size: int | None) -> list[list[int]] | None:
    """Groups of `size` consecutive replicas; None if all replicas form one group."""
    size, actual = validate.count("replica_group_size", size, optional=True), count()
    if size is None or size == actual or (actual == 1 and infers_shapes()):
        return None
    if actual % size:
        raise ValueError(
            f"`replica_group_size` is {size}, but the number of replicas here is {actual}, which is not a multiple of "
            "it. Give a divisor of the number of replicas, or None for a single group."
        )
    return [list(range(first, first + size)) for first in range(0, actual, size)]


def dimension(name: str, value: int, x: Array) -> int:
    """`value` as the number of a dimension of `x`; negative ones count from the end."""
    number = validate.count(name, value, least=None)
    if not -x.ndim <= number < x.ndim:
        raise ValueError(f"`{name}` is {number}, but the tensor has {x.ndim} dimensions. Give the number of one.")
    return number % x.ndim


def infers_shapes() -> bool:
    """Whether Keras runs a layer only to learn the shapes of its outputs.

    [Note: shapes before programs] Keras does so when a model is created or built, before there is a program with
    replicas. Operations then trust the number of replicas they are given and return zeros of the right shape.
    """
    with keras.SymbolicScope() as probe:
        return probe.original_scope is not None


def tensors(tree: Tree) -> Tree:
    """The tree with arrays as leaves."""
    return jax.tree.map(_tensor, tree)


def each(x: Tree, one: Callable[[Array], Array]) -> Tree:
    """`one` of every array in `x`. A list gives a list, except that a list of one array gives an array."""
    if not isinstance(x, list | tuple):
        return jax.tree.map(one, tensors(x))
    results = [jax.tree.map(one, tensors(element)) for element in x]
    return results[0] if len(results) == 1 else results


def _tensor(value: ArrayLike | keras.Variable) -> Any:
    if isinstance(value, keras.KerasTensor):
        raise ValueError(
            f"An operation over replicas was called on the symbolic tensor {value.name!r} of shape {value.shape}. "
            "Call it inside the `call` of a layer (a `keras.layers.Lambda` will do), where tensors have values."
        )
    return keras.ops.convert_to_tensor(value)
