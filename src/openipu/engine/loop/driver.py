"""Drives a loop from the host: launches slab after slab, and builds the next slab while an execution runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from openipu.engine.data.prefetch import Prefetch
from openipu.engine.data.slab import Slab
from openipu.engine.devices.launching import Wait
from openipu.engine.facts import calls
from openipu.engine.interrupts import interruptible, interruptibly

from .loop import Result

Execute = Callable[[Slab, Callable[[], None]], list[Result]]
"""Launches a slab. The second argument builds the next slabs; call it if the launch waits for the execution to end."""


@dataclass(frozen=True, slots=True)
class Launched:
    """A slab that was launched, and its results, which the devices may still be computing."""

    slab: Slab
    results: list[Result]
    last: bool
    """Whether the end of the data has been reached. With a depth of 1, this is then the last slab."""


def launches(slabs: Iterator[Slab], execute: Execute, depth: int = 1) -> Iterator[Launched]:
    """Launch the slabs one by one, as the iterator is advanced, and keep up to `depth` slabs ready.

    At most two executions are under way at a time, so that memory does not grow with the number of steps.
    """
    ready = Prefetch(calls.feeding(slabs), depth)
    if (run := calls.current()) is not None and calls.is_own():
        run.ready = lambda: ready.found
    running: Any = None
    wait = Wait()
    for slab in interruptibly(ready):
        results = execute(slab, ready.prepare)
        with interruptible():
            ready.prepare()
        wait(running)
        running = results[-1].value
        yield Launched(slab, results, ready.ended)
