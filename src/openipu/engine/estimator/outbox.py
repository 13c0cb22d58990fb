"""What leaves a training or evaluation program: values that the state's `metrics` hold while it runs.

Each replica has its own values. They are reduced or gathered over replicas once, at the end of an execution.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from openipu.engine.devices.replicas import Replicas
from openipu.engine.types import Array, Tree

import jax
import jax.numpy as jnp
import numpy as np


class Mean:
    """The mean of a value over all examples, as two numbers: the weighted sum and the sum of weights."""

    SIZE = 2

    @staticmethod
    def start() -> list[Array]:
        """The numbers before the first example."""
        return [jnp.zeros(()), jnp.zeros(())]

    @staticmethod
    def add(kept: Sequence[Array], value: Array, rows: int) -> list[Array]:
        """The numbers after one more batch of `rows` rows, whose mean is `value`."""
        return [kept[0] + jnp.reshape(value, ()).astype(jnp.float32) * rows, kept[1] + rows]

    @staticmethod
    def result(kept: Sequence[Array]) -> Array:
        """The mean."""
        return kept[0] / jnp.maximum(kept[1], 1)


@dataclass(frozen=True, slots=True)
class Outbox:
    """Tensors from the steps of an execution: from the last step, or from all steps (at most `rows`).

    A sender is a logging hook or a `host_call`.
    """

    shapes: tuple[Tree, ...]
    """The shapes of each sender's tensors."""
    all_steps: tuple[bool, ...]
    """Whether each sender wants the tensors of all steps."""
    rows: int

    def start(self) -> list[Array]:
        """An empty box: the number of steps so far, and room for each tensor."""
        room = [
            jnp.zeros((self.rows, *leaf.shape) if every else leaf.shape, leaf.dtype)
            for tree, every in zip(self.shapes, self.all_steps, strict=True)
            for leaf in jax.tree.leaves(tree)
        ]
        return [jnp.zeros((), jnp.int32), *room]

    def put(self, kept: Sequence[Array], senders: Sequence[Tree]) -> list[Array]:
        """The box with the tensors of one more step."""
        count, *room = kept
        new = []
        leaves = [(leaf, every) for tree, every in zip(senders, self.all_steps, strict=True) for leaf in _leaves(tree)]
        for old, (leaf, every) in zip(room, leaves, strict=True):
            if leaf.shape != (old.shape[1:] if every else old.shape):
                raise ValueError(
                    f"A tensor that leaves model_fn has shape {leaf.shape} for the last, smaller batch of the data but "
                    f"{old.shape[1:] if every else old.shape} for the others. Drop the last batch in input_fn "
                    "(`drop_remainder=True`), or reduce the tensor to one value per step."
                )
            new.append(jax.lax.dynamic_update_index_in_dim(old, leaf, count, 0) if every else leaf)
        return [count + 1, *new]

    def put_with(self, metrics: Sequence[Array], loss: Array, rows: int, senders: Sequence[Tree]) -> list[Array]:
        """The metrics of training (the mean loss and this box) after one more micro-batch of `rows` rows."""
        return [*Mean.add(metrics, loss, rows), *self.put(metrics[Mean.SIZE :], senders)]

    def results(self, kept: Sequence[Array], replicas: Replicas) -> tuple[Array, list[Tree]]:
        """How many steps each replica had, and each sender's tensors with the replica as first axis."""
        count, *room = replicas.gather(list(kept))
        leaves = iter(room)
        return count, [jax.tree.map(lambda _: next(leaves), tree) for tree in self.shapes]


def _leaves(tree: Tree) -> list[Array]:
    return [jnp.asarray(leaf) for leaf in jax.tree.leaves(tree)]


def steps_first(count: Array, tree: Tree, every: bool) -> Tree:
    """A sender's tensors on the host, with axes (steps, replicas, ...), or (replicas, ...) unless `every` step counts.

    The axis of a single replica is dropped. If replicas had different numbers of steps, the result has only the steps
    that all of them had.
    """
    counts = np.asarray(count)

    def one(leaf: Array) -> np.ndarray:
        array = np.asarray(leaf)
        if every:
            array = np.moveaxis(array, 0, 1)[: counts.min()]
        return array.squeeze(1 if every else 0) if len(counts) == 1 else array

    return jax.tree.map(one, tree)
