"""What leaves a training or evaluation program: values that are kept in the state's `metrics` while it runs.

Each replica keeps its own. When an execution ends they are reduced or gathered over replicas, once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from openipu.engine.devices.replicas import Replicas
from openipu.engine.types import Tree

import jax
import jax.numpy as jnp


class Mean:
    """The mean of a value over all examples, as two numbers: the weighted sum and the sum of weights."""

    SIZE = 2

    @staticmethod
    def start() -> list[Any]:
        """Before the first example."""
        return [jnp.zeros(()), jnp.zeros(())]

    @staticmethod
    def add(kept: Sequence[Any], value: Any, rows: int) -> list[Any]:
        """With the mean of one more batch of so many rows."""
        return [kept[0] + jnp.reshape(value, ()).astype(jnp.float32) * rows, kept[1] + rows]

    @staticmethod
    def result(kept: Sequence[Any]) -> Any:
        """The mean."""
        return kept[0] / jnp.maximum(kept[1], 1)


@dataclass(frozen=True, slots=True)
class Outbox:
    """Tensors of the steps of an execution: of the last step, or of all of them (`rows` steps at most)."""

    shapes: tuple[Tree, ...]
    """The tensors of each sender."""
    all_steps: tuple[bool, ...]
    """Whether each sender wants those of all steps."""
    rows: int

    def start(self) -> list[Any]:
        """Empty: the number of steps so far, and room for each tensor."""
        room = [
            jnp.zeros((self.rows, *leaf.shape) if every else leaf.shape, leaf.dtype)
            for tree, every in zip(self.shapes, self.all_steps, strict=True)
            for leaf in jax.tree.leaves(tree)
        ]
        return [jnp.zeros((), jnp.int32), *room]

    def put(self, kept: Sequence[Any], senders: Sequence[Tree]) -> list[Any]:
        """With the tensors of one more step."""
        count, *room = kept
        new = []
        leaves = [(leaf, every) for tree, every in zip(senders, self.all_steps, strict=True) for leaf in _leaves(tree)]
        for old, (leaf, every) in zip(room, leaves, strict=True):
            if leaf.shape != (old.shape[1:] if every else old.shape):
                raise ValueError(
                    f"A tensor that leaves model_fn has shape {leaf.shape} for the last, smaller batch of the data and "
                    f"{old.shape[1:] if every else old.shape} for the others. Drop the last batch in input_fn "
                    "(`drop_remainder=True`), or reduce the tensor to one value per step."
                )
            new.append(jax.lax.dynamic_update_index_in_dim(old, leaf, count, 0) if every else leaf)
        return [count + 1, *new]

    def put_with(self, metrics: Sequence[Any], loss: Any, rows: int, senders: Sequence[Tree]) -> list[Any]:
        """The metrics of a training step, a mean loss and this box, after a micro-batch of so many rows."""
        return [*Mean.add(metrics, loss, rows), *self.put(metrics[Mean.SIZE :], senders)]

    def results(self, kept: Sequence[Any], replicas: Replicas) -> tuple[Any, list[Tree]]:
        """On all replicas: how many steps each had, and each sender's tensors with the replicas in front."""
        count, *room = replicas.gather(list(kept))
        leaves = iter(room)
        return count, [jax.tree.map(lambda _: next(leaves), tree) for tree in self.shapes]


def _leaves(tree: Tree) -> list[Any]:
    return [jnp.asarray(leaf) for leaf in jax.tree.leaves(tree)]


def steps_first(count: Any, tree: Tree, every: bool) -> Tree:
    """A sender's tensors on the host: (steps, replicas, ...) or (replicas, ...), without replicas where there is one.

    Where replicas had different numbers of steps, only steps that all had are given.
    """
    import numpy as np

    counts = np.asarray(count)

    def one(leaf: Any) -> Any:
        array = np.asarray(leaf)
        if every:
            array = np.moveaxis(array, 0, 1)[: counts.min()]
        return array.squeeze(1 if every else 0) if len(counts) == 1 else array

    return jax.tree.map(one, tree)
