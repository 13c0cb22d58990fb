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
    length, which takes 20 microseconds on an H200. So full executions get a program with a loop of `known` length
    there, and a short last one gets another program. `unroll` is the number of iterations in a row without the loop's
    own kernels. That makes small steps faster (an MLP's fell from 31 to 26 microseconds) but multiplies compile time.
    """

    known: bool = False
    unroll: int = 1

    def repeat(self, body: Callable[[Any, Tree], Tree], carry: Tree, count: Array | int, most: int) -> Tree:
        """Run `body(index, carry)` for each index below `count`, which is between 1 and `most`."""
        if most == 1:
            return body(0, carry)
        if not self.known:
            return lax.fori_loop(0, count, body, carry)
        return lax.fori_loop(0, most, body, carry, unroll=min(self.unroll, most))


def prefers_known_length(platform: str) -> bool:
    """Whether a loop of known length is faster on `platform`."""
    return platform == "gpu"


def loop_shape(known: bool, equations: Callable[[], int]) -> LoopShape:
    """The best form of a loop whose length is known or not. `equations` counts those of the step, where it matters."""
    return LoopShape(True, 4 if equations() <= SMALL_STEP else 1) if known else LoopShape()
