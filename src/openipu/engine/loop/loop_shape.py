"""How the loop over updates is laid out, by what was measured on each platform."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from openipu.engine.types import Tree

from jax import lax

SMALL_STEP = 300
"""Equations up to which a step is small: launching its kernels costs more than running them."""


@dataclass(frozen=True, slots=True)
class LoopShape:
    """How the loop over updates is laid out.

    A GPU runs a loop of known length without the host, but asks the host before each turn of a loop of unknown length,
    20 microseconds each on an H200. `known` gives a full execution a loop of its own, of known length; only a short
    last one runs in the other. `unroll` turns in a row take the loop's own kernels off small steps (an MLP's fell from
    31 to 26 microseconds) but multiply compile time.
    """

    known: bool = False
    unroll: int = 1

    def repeat(self, body: Callable[[Any, Tree], Tree], carry: Tree, count: Any, most: int) -> Tree:
        """`body(index, carry)` for each index below `count`, which is `most` in all but the last execution."""

        def any_number(carry: Tree) -> Tree:
            return lax.fori_loop(0, count, body, carry)

        def full(carry: Tree) -> Tree:
            return lax.fori_loop(0, most, body, carry, unroll=min(self.unroll, most))

        if not self.known or most == 0:
            return any_number(carry)
        return lax.cond(count == most, full, any_number, carry)


def loop_shape(platform: str, equations: Callable[[], int]) -> LoopShape:
    """The measured rule for `platform`; `equations` counts those of the step and is only asked where it matters."""
    if platform != "gpu":
        return LoopShape()
    return LoopShape(True, 4 if equations() <= SMALL_STEP else 1)
