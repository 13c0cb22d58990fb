"""Replicas: copies of the model that each process their own micro-batches of one program.

The program is written once, for one replica, and runs on all devices of the mesh axis "replica" (`jax.shard_map`).
What must be equal on all replicas (weights, optimizer state) is kept equal by reducing gradients once per update.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

AXIS = "replica"
STAGE_AXIS = "stage"
"""The mesh axis over which the devices of one replica lie."""
Tree = Any


@dataclass(frozen=True, slots=True)
class Replicas:
    """The devices of all replicas of a model; a single device is one replica and costs nothing extra.

    Arrays that each replica has its own part of carry the replicas as an extra axis: the rows of a slab as axis 1,
    metrics as axis 0.
    """

    devices: tuple[Any, ...]
    each: int = 1
    """Devices of one replica: those of its pipeline."""

    @property
    def count(self) -> int:
        """How many there are."""
        return len(self.devices) // self.each

    @property
    def platform(self) -> str:
        """The kind of device they run on: "cpu", "gpu" or "tpu"."""
        return str(self.devices[0].platform)

    @property
    def mesh(self) -> Mesh:
        """The devices as JAX's mesh."""
        return Mesh(np.array(self.devices).reshape(self.count, self.each), (AXIS, STAGE_AXIS))

    # --- outside the program

    def everywhere(self) -> Any:
        """Where arrays live that are the same on all replicas."""
        return self.devices[0] if len(self.devices) == 1 else NamedSharding(self.mesh, P())

    def split(self, axis: int) -> Any:
        """Where arrays live that are split over the replicas along `axis`."""
        return self.devices[0] if len(self.devices) == 1 else NamedSharding(self.mesh, P(*[None] * axis, AXIS))

    def program(self, run: Callable[..., Any], inputs: Tree, outputs: Tree) -> Callable[..., Any]:
        """`run`, written for one replica, as a function on all of them. `inputs` and `outputs` say the split axes.

        They are trees of axis numbers, with None for what is the same everywhere.
        """
        if self.count == 1:
            return run
        specs = [jax.tree.map(_spec, tree, is_leaf=lambda leaf: leaf is None) for tree in (inputs, outputs)]
        return jax.shard_map(run, mesh=self.mesh, in_specs=specs[0], out_specs=specs[1], check_vma=False)

    # --- inside the program

    def index(self) -> Any:
        """The number of the replica that asks."""
        return jnp.int32(0) if self.count == 1 else lax.axis_index(AXIS)

    def sum(self, tree: Tree) -> Tree:
        """The sum over all replicas."""
        return tree if self.count == 1 else lax.psum(tree, AXIS)

    def mean(self, tree: Tree) -> Tree:
        """The mean over all replicas."""
        return tree if self.count == 1 else lax.pmean(tree, AXIS)

    def mean_of_active(self, tree: Tree, active: Any, group: int | None = None) -> Tree:
        """The mean over those replicas that are `active`: of all, or of each group of that many consecutive ones."""
        if self.count == 1:
            return tree
        groups = None if group is None else consecutive(self.count, group)

        def total(a: Any) -> Any:
            return lax.psum(a, AXIS, axis_index_groups=groups)

        if active is True:
            return jax.tree.map(lambda a: total(a) / (group or self.count), tree)
        # Where nobody is active nobody uses the mean, but it has to be a number.
        number = jnp.maximum(total(jnp.asarray(active, jnp.float32)), 1)
        return jax.tree.map(lambda a: total(jnp.where(active, a, jnp.zeros_like(a))) / number, tree)

    def of_first(self, tree: Tree) -> Tree:
        """The values of the first replica."""
        return jax.tree.map(lambda a: self.sum(jnp.where(self.index() == 0, a, jnp.zeros_like(a))), tree)

    def gather(self, tree: Tree) -> Tree:
        """The values of all replicas, stacked in front."""
        return jax.tree.map(lambda a: a[None], tree) if self.count == 1 else lax.all_gather(tree, AXIS)


def consecutive(count: int, size: int) -> list[list[int]]:
    """The numbers below `count` in groups of `size`."""
    return [list(range(start, start + size)) for start in range(0, count, size)]


def _spec(axis: int | None) -> P:
    return P() if axis is None else P(*[None] * axis, AXIS)
