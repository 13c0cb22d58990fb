"""Driving a loop from the host: slab after slab is launched, and the next one is built while an execution runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from openipu.engine.data.prefetch import Prefetch
from openipu.engine.data.slab import Slab

import jax

from .loop import Result

Execute = Callable[[Slab, Callable[[], None]], list[Result]]
"""Launches a slab. The second argument builds the next slabs, for those who wait until the execution has ended."""


@dataclass(frozen=True, slots=True)
class Launched:
    """A slab that was launched, and its results, which may still be under way."""

    slab: Slab
    results: list[Result]
    last: bool
    """Whether it is known that no slab comes after it, where the depth is 1."""


def launches(slabs: Iterator[Slab], execute: Execute, depth: int = 1) -> Iterator[Launched]:
    """Launch all slabs, each when the next launch is asked for, and keep up to `depth` slabs ready.

    At most two executions are under way, so that memory does not grow with the number of steps.
    """
    ready = Prefetch(slabs, depth)
    running: Any = None
    for slab in ready:
        results = execute(slab, ready.prepare)
        ready.prepare()
        jax.block_until_ready(running)
        running = results[-1].value
        yield Launched(slab, results, ready.ended)
