"""Orders the launches of programs that run on several devices.

[Note: one program at a time] A program on several devices has points where each device waits for the others. If two
such programs are launched at the same time, one device may begin with the first and another with the second, and both
wait forever. On GPUs the order must be the same on all devices, so launches take turns. XLA:CPU runs all devices in one
pool of threads and may begin any program whose inputs are there: with JAX 0.10.2, two programs that do not depend on
each other hang within seconds, even if one thread launches them. So there a launch also waits for the end of the one
before, unless its inputs come from it.
"""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from openipu.engine.interrupts import LISTEN, let_through, wait_until
from openipu.engine.types import Tree

import jax

from . import group, standing

SHORT_EXECUTION = 0.02
"""An execution that takes fewer seconds is short."""

_turn = threading.RLock()
_last: tuple[weakref.ref[object] | None, Tree] = None, None
"""The chain of the latest launch, and an array that is there when its program has ended."""
_local = threading.local()


def in_turn(
    chain: object, devices: Sequence[jax.Device], call: Callable[..., tuple[Any, ...]], name: str
) -> Callable[..., tuple[Any, ...]]:
    """The call of the program `name`, made when it is its turn. See [Note: one program at a time].

    Each launch of a `chain` takes what the one before has returned, so it need not wait for it. None is no chain.
    """
    if len(devices) == 1:
        return call
    joint = 1 < group.count() == len({device.process_index for device in devices})

    def launch(*args: Any) -> tuple[Any, ...]:
        global _last
        _wait_for_turn()
        try:
            before, running = _last
            follows = chain is not None and before is not None and before() is chain
            if devices[0].platform == "cpu" and not follows and not is_ready(running):
                _about_to_wait()
                wait_until(lambda: is_ready(running))
            if joint:
                standing.launching(name)
            result = call(*args)
            # Results come first. They are not donated to another launch, as the state is.
            leaves = jax.tree.leaves(result[0]) or jax.tree.leaves(result)
            _last = None if chain is None else weakref.ref(chain), min(leaves, key=lambda a: a.nbytes, default=None)
            return result
        finally:
            _turn.release()

    return launch


@contextlib.contextmanager
def before_waiting(call: Callable[[], None]) -> Iterator[None]:
    """Until the block ends, `call` is called before this thread waits for another program to end.

    A program that waits for something that only this thread does, such as calling callbacks, would never end.
    """
    calls = _local.__dict__.setdefault("calls", [])
    calls.append(call)
    try:
        yield
    finally:
        calls.remove(call)


class Wait:
    """Waits for one execution after the other. Ctrl-C is let through unless they are short.

    Looking again and again whether an execution has ended costs a part of a millisecond, which is nothing for a long
    one. Short ones are waited for in C++, where nothing is heard.
    """

    def __init__(self) -> None:
        self._seconds = SHORT_EXECUTION  # of the latest wait

    def __call__(self, tree: Tree) -> None:
        """Wait until all arrays have been computed. Raises the error of a program that has failed."""
        began = time.perf_counter()
        if self._seconds >= SHORT_EXECUTION:
            wait_until(lambda: is_ready(tree))
        jax.block_until_ready(tree)
        self._seconds = time.perf_counter() - began


def is_ready(tree: Tree) -> bool:
    """Whether all arrays have been computed, or have failed, or are gone."""
    arrays: list[Any] = [leaf for leaf in jax.tree.leaves(tree) if isinstance(leaf, jax.Array)]
    return all(array.is_deleted() or array.is_ready() for array in arrays)


def _wait_for_turn() -> None:
    """Wait until no other thread is launching. Ctrl-C is let through."""
    if _turn.acquire(blocking=False):
        return
    _about_to_wait()
    while not _turn.acquire(timeout=LISTEN):
        let_through()


def _about_to_wait() -> None:
    for call in _local.__dict__.get("calls", ()):
        call()
