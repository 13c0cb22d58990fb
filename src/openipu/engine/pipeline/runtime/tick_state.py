"""What the ticks of a pipeline read and change inside the program of one device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from openipu.engine.core.enqueued import Enqueued
from openipu.engine.core.state import Spot
from openipu.engine.loop.outfeeds import Cells
from openipu.engine.loop.remainder import Number
from openipu.engine.loop.results import Kept
from openipu.engine.types import Array, Scalar, Tree

from .mailbox import Vectors
from .packing import Buffers

Writes = dict[str, Any]
"""What one forward or backward changes, by the names that `Tick.written` knows."""


class TickState(NamedTuple):
    """What micro-batches change on their way through the stages."""

    total: Buffers
    """The gradients so far, packed like the weights. Empty if nothing is trained."""
    state: Buffers
    """The variables that are not trained."""
    metrics: list[Array]
    kept: Kept
    """The results of the last stage so far, and what the device's stages have enqueued."""


class Boxes(NamedTuple):
    """Memory for what is in flight. Its initial contents do not matter, so all updates can use the same boxes."""

    mailbox: Vectors
    outbox: Vectors
    residuals: Buffers


class Flow(NamedTuple):
    """Which micro-batches run, and how their gradients count."""

    batch: Callable[[Array], Tree]
    """`batch(m)` returns micro-batch number m."""
    most: Number
    """How many micro-batches the replica with the most has."""
    mine: Number
    """How many this replica has."""
    scale: Scalar
    """How often each gradient counts."""
    whole: Scalar
    """Whether every replica has all of them."""
    keep: Callable[[Kept, Array, Tree, Array, list[Array]], Kept]
    """`keep(kept, m, result, active, metrics)` returns `kept` with the results of micro-batch m."""
    put: Callable[[Cells, Array, Enqueued], Cells]
    """`put(cells, m, enqueued)` returns `cells` with what a stage has enqueued for micro-batch m."""
    spot: Spot | None = None
    """Where a tail lies in the batch of all replicas."""


class Fixed(NamedTuple):
    """What one device knows during a run through the table. No tick changes it."""

    me: Array
    """The number of the device within its replica."""
    weights: Buffers
    optimizer: list[Array]
    """The optimizer's variables that belong to no weight."""
    flow: Flow


class Tick(NamedTuple):
    """Everything that a tick changes."""

    carry: TickState
    mailbox: Vectors
    outbox: Vectors
    residuals: Buffers

    def written(self, new: Writes) -> Tick:
        """This with what a forward or backward has written."""
        kept = new.get("kept", self.carry.kept)
        carry = self.carry._replace(
            total=self.carry.total | new.get("total", {}),
            state=self.carry.state | new.get("state", {}),
            metrics=new.get("metrics", self.carry.metrics),
            kept=kept._replace(cells=new.get("cells", kept.cells)),
        )
        return Tick(
            carry,
            new.get("mailbox", self.mailbox),
            new.get("outbox", self.outbox),
            self.residuals | new.get("residuals", {}),
        )
