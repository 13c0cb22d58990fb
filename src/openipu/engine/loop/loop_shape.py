"""The form of the loop over updates, chosen by measurements on each platform."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from openipu.engine.types import Array, Tree

from jax import lax

SMALL_STEP = 300
"""A step with at most this many equations is small: launching its kernels costs more than running them."""


@dataclass(frozen=True, slots=True)
class LoopShape:
    """The form of the loop over updates.

    A GPU runs a loop of known length without the host, but asks the host before each iteration of a loop of unknown
    length, which takes 20 microseconds on an H200. With `known`, full executions use a loop of known length, and only a
    short last one uses the other. `unroll` is the number of iterations in a row without the loop's own kernels. That
    makes small steps faster (an MLP's fell from 31 to 26 microseconds) but multiplies compile time.
    """

    known: bool = False
    unroll: int = 1

    def repeat(self, body: Callable[[Any, Tree], Tree], carry: Tree, count: Array | int, most: int) -> Tree:
        """Run `body(index, carry)` for each index below `count`, which is `most` in all but the last execution."""

        def any_number(carry: Tree) -> Tree:
            return lax.fori_loop(0, count, body, carry)

        def full(carry: Tree) -> Tree:
            return lax.fori_loop(0, most, body, carry, unroll=min(self.unroll, most))

        if not self.known or most == 0:
            return any_number(carry)
        return lax.cond(count == most, full, any_number, carry)


def loop_shape(platform: str, equations: Callable[[], int]) -> LoopShape:
    """The best form on `platform`. `equations` counts those of the step and is only called where it matters."""
    if platform != "gpu":
        return LoopShape()
    return LoopShape(True, 4 if equations() <= SMALL_STEP else 1)
