"""Replicas: copies of the model that run one program, each on its own micro-batches.

The program is written for a single replica and runs on all devices of the mesh axis "replica" (`jax.shard_map`).
Gradients are reduced once per update, which keeps weights and optimizer state equal on all replicas.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from openipu.engine.types import Array, Tree

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from . import transfer

REPLICA_AXIS = "replica"
STAGE_AXIS = "stage"
"""The mesh axis over which the devices of one replica lie."""


@dataclass(frozen=True, slots=True)
class Replicas:
    """The devices of all replicas of a model. A single device is one replica, at no extra cost.

    Arrays that are split over replicas have an extra axis for them: axis 1 in the rows of a slab, axis 0 in metrics.
    """

    devices: tuple[jax.Device, ...]
    each: int = 1
    """How many devices each replica has: those of its pipeline."""
    average: bool = False
    """Whether gradients are averaged over replicas, whatever the optimizer asks for."""

    @property
    def count(self) -> int:
        """How many replicas there are."""
        return len(self.devices) // self.each

    @property
    def platform(self) -> str:
        """The kind of device they run on: "cpu", "gpu" or "tpu"."""
        return str(self.devices[0].platform)

    @property
    def mesh(self) -> Mesh:
        """The devices as a JAX mesh."""
        return Mesh(np.array(self.devices).reshape(self.count, self.each), (REPLICA_AXIS, STAGE_AXIS))

    # --- outside the program

    def everywhere(self) -> jax.Device | NamedSharding:
        """The placement of arrays that are the same on all replicas."""
        return self.devices[0] if len(self.devices) == 1 else NamedSharding(self.mesh, P())

    def split(self, axis: int) -> jax.Device | NamedSharding:
        """The placement of arrays that are split over the replicas along `axis`."""
        return self.devices[0] if len(self.devices) == 1 else NamedSharding(self.mesh, P(*[None] * axis, REPLICA_AXIS))

    @property
    def is_local(self) -> bool:
        """Whether all devices belong to this process."""
        return len(self.devices) == 1 or len(self.own_devices) == len(self.devices)

    @property
    def own_devices(self) -> list[jax.Device]:
        """The devices that belong to this process."""
        here = jax.process_index()
        return [device for device in self.devices if device.process_index == here]

    @property
    def own(self) -> list[int]:
        """The numbers of the replicas that have devices in this process."""
        here = jax.process_index()
        return [number for number in range(self.count) if here in self._processes(number)]

    def _processes(self, number: int) -> list[int]:
        """The processes to which the devices of a replica belong."""
        return [device.process_index for device in self.devices[number * self.each : (number + 1) * self.each]]

    def send(self, tree: Tree, axis: int | None = None) -> Tree:
        """Put arrays on the devices: split over the replicas along `axis`, or the same on all of them."""
        return transfer.send(tree, self.everywhere() if axis is None else self.split(axis))

    def program(self, run: Callable[..., Any], inputs: Tree, outputs: Tree) -> Callable[..., Any]:
        """`run`, written for one replica, as a function that runs on all of them.

        `inputs` and `outputs` are trees of axis numbers: the axis that is split over replicas, or None for values that
        are the same on all of them.
        """
        if self.count == 1:
            return run
        specs = [jax.tree.map(_spec, tree, is_leaf=lambda leaf: leaf is None) for tree in (inputs, outputs)]
        return jax.shard_map(run, mesh=self.mesh, in_specs=specs[0], out_specs=specs[1], check_vma=False)

    # --- inside the program

    def index(self) -> Array:
        """The number of this replica."""
        return jnp.int32(0) if self.count == 1 else lax.axis_index(REPLICA_AXIS)

    def sum(self, tree: Tree) -> Tree:
        """The sum over all replicas."""
        if self.count == 1:
            return tree
        if self.platform != "cpu":
            return lax.psum(tree, REPLICA_AXIS)
        leaves, structure = jax.tree.flatten(tree)
        return jax.tree.unflatten(structure, _sum_joined(leaves))

    def mean(self, tree: Tree) -> Tree:
        """The mean over all replicas."""
        if self.count == 1:
            return tree
        return _narrowed(jax.tree.map(lambda a: a / self.count, self.sum(_widened(tree))), tree)

    def reduced(self, gradients: Tree, averaged: bool) -> Tree:
        """The sum or the mean of all replicas' gradients."""
        return self.mean(gradients) if averaged else self.sum(gradients)

    def mean_of_active(self, tree: Tree, active: Array | bool | int, group: int | None = None) -> Tree:
        """The mean over the `active` replicas: among all, or within each group of `group` consecutive ones."""
        if self.count == 1:
            return tree
        groups = None if group is None else consecutive(self.count, group)

        def total(a: Array) -> Any:
            return lax.psum(a, REPLICA_AXIS, axis_index_groups=groups)

        if active is True and group is None:
            return self.mean(tree)
        if active is True:
            return jax.tree.map(lambda a: total(a) / group, tree)
        # If no replica is active, the mean is not used, but it still has to be a number.
        number = jnp.maximum(total(jnp.asarray(active, jnp.float32)), 1)
        means = jax.tree.map(lambda a: total(jnp.where(active, a, jnp.zeros_like(a))) / number, _widened(tree))
        return _narrowed(means, tree)

    def speaks(self) -> Array | bool:
        """Whether this replica is the first one of its process, which tells Python what all of them have in common."""
        if self.count == 1:
            return True
        first: dict[int, int] = {}
        for number in range(self.count):
            first.setdefault(self._processes(number)[0], number)
        return jnp.isin(self.index(), np.array([*first.values()], np.int32)) if len(first) > 1 else self.index() == 0

    def of_first(self, tree: Tree) -> Tree:
        """The values of the first replica."""
        return jax.tree.map(lambda a: self.sum(jnp.where(self.index() == 0, a, jnp.zeros_like(a))), tree)

    def gather(self, tree: Tree) -> Tree:
        """The values of all replicas, stacked along a new first axis."""
        return jax.tree.map(lambda a: a[None], tree) if self.count == 1 else lax.all_gather(tree, REPLICA_AXIS)


SMALL = 4096
"""Arrays of up to this many elements are joined before they are summed over CPU replicas."""


def _widened(tree: Tree) -> Tree:
    """The same numbers, in a type in which a sum over replicas does not overflow before it is divided."""
    return jax.tree.map(lambda a: a.astype(jnp.float32) if jnp.result_type(a) == jnp.float16 else a, tree)


def _narrowed(wide: Tree, tree: Tree) -> Tree:
    """The inverse of `_widened`."""
    return jax.tree.map(lambda w, a: w.astype(jnp.float16) if jnp.result_type(a) == jnp.float16 else w, wide, tree)


def _sum_joined(leaves: list[Any]) -> list[Array]:
    """The sum over replicas, with small arrays of the same dtype joined into one.

    XLA:CPU synchronizes all replicas once for each array of an all-reduce, which takes about 15 us. Copying a small
    array costs less. Copying a large one costs more (100 times more for a weight of 784 x 128 inside a loop).
    """
    leaves = [jnp.asarray(leaf) for leaf in leaves]
    groups: dict[Any, list[int]] = {}
    for i, leaf in enumerate(leaves):
        groups.setdefault(leaf.dtype if leaf.size <= SMALL else i, []).append(i)
    parts = []
    for group in groups.values():
        # The barrier keeps what makes the arrays, such as a matrix product, from being fused into the join.
        members = lax.optimization_barrier([leaves[i] for i in group])
        parts.append(jnp.concatenate([a.reshape(-1) for a in members]) if len(group) > 1 else leaves[group[0]])
    sums: dict[int, Array] = {}
    for group, total in zip(groups.values(), lax.psum(parts, REPLICA_AXIS), strict=True):
        ends = np.cumsum([leaves[i].size for i in group])
        pieces = jnp.split(total, ends[:-1].tolist()) if len(group) > 1 else [total]
        sums |= {i: piece.reshape(leaves[i].shape) for i, piece in zip(group, pieces, strict=True)}
    return [sums[i] for i in range(len(leaves))]


def consecutive(count: int, size: int) -> list[list[int]]:
    """The numbers below `count` in groups of `size`."""
    return [list(range(start, start + size)) for start in range(0, count, size)]


def _spec(axis: int | None) -> P:
    return P() if axis is None else P(*[None] * axis, REPLICA_AXIS)
