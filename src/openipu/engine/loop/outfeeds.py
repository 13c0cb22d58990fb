"""The outfeeds that a program of a loop fills.

[Note: unforeseen outfeeds] Elements wait in buffers that the loop carries along, so their shapes must be known before
the loop is traced. But what a step enqueues is known only when it has been traced. Most steps enqueue nothing, and no
step should be traced twice. So a program is traced without outfeeds first. If one is met, `UnforeseenError` ends that
trace, and the program is traced again with a buffer for it.

[Note: complete elements] The n-th elements of all replicas make one element, and all elements of a queue have the same
shapes. So a step in which only some replicas have a micro-batch enqueues nothing. A smaller last batch enqueues only on
a single replica, and only if the shapes do not depend on the number of samples.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from openipu import _validate as validate
from openipu.engine.core.enqueued import Enqueued
from openipu.engine.devices.replicas import Replicas
from openipu.engine.host_io.outfeed_buffer import HostBuffer, Waiting
from openipu.engine.shapes import specs_of
from openipu.engine.types import Array, Tree

from jax import lax

from .remainder import Number

Specs = Mapping[HostBuffer, Tree]
"""Outfeeds, and the shapes of their elements."""
Cells = tuple[Waiting, ...]
"""The elements of each outfeed that still wait on the device."""


class UnforeseenError(Exception):
    """A step enqueues into outfeeds for which its program has no buffers. See [Note: unforeseen outfeeds]."""

    def __init__(self, specs: Specs) -> None:
        super().__init__()
        self.specs = specs


@dataclass(frozen=True, slots=True)
class Outfeeds:
    """The outfeeds of one program, on one replica. If `specs` is None, nothing is handed over."""

    specs: Specs | None
    replicas: Replicas

    def start(self) -> Cells:
        """Empty buffers."""
        return tuple(outfeed.outlet.start(spec) for outfeed, spec in (self.specs or {}).items())

    def foresee(self, specs: Specs) -> None:
        """Raise unless there are buffers for these outfeeds."""
        if self.specs is not None and any(outfeed not in self.specs for outfeed in specs):
            raise UnforeseenError(specs)

    def put(self, cells: Cells, enqueued: Enqueued, complete: Number = True) -> Cells:
        """Add what a step or an update has enqueued, if it is `complete`. See [Note: complete elements]."""
        if self.specs is None or not enqueued.outfeeds:
            return cells
        found, me = dict(enqueued.items()), self.replicas.index()
        return tuple(
            _put(outfeed, cell, spec, found[outfeed], me, complete) if outfeed in found else cell
            for (outfeed, spec), cell in zip(self.specs.items(), cells, strict=True)
        )

    def flush(self, cells: Cells) -> None:
        """Hand over what still waits."""
        for outfeed, cell in zip(self.specs or {}, cells, strict=True):
            outfeed.outlet.flush(cell, self.replicas.index())


def mention_incomplete() -> None:
    """Say once that some samples have no element. See [Note: complete elements]."""
    validate.notice(
        "Outfeed queues get no element from the last batches of the data: they are smaller, or only some replicas have "
        "one. To get elements for all samples, make their number a multiple of batch size x replicas."
    )


def _put(outfeed: HostBuffer, cell: Waiting, spec: Tree, element: Tree, me: Array, complete: Number) -> Waiting:
    if complete is False or specs_of(element) != spec:
        mention_incomplete()
        return cell
    if complete is True:
        return outfeed.outlet.put(cell, element, me)
    after: Any = lax.cond(complete, lambda c: outfeed.outlet.put(c, element, me), lambda c: c, cell)
    return after  # type: ignore[no-any-return]
