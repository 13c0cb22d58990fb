"""Feeds from device programs to the host."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

from openipu import _validate as validate
from openipu.engine.core import enqueued
from openipu.engine.devices.current_system import feed_ordinal
from openipu.engine.host_io.outfeed_buffer import HostBuffer, IPUOutfeedMode, filled
from openipu.engine.keras_compat.api import in_symbolic_scope
from openipu.engine.program.program_trace import in_stage
from openipu.engine.program.user_program import Operation
from openipu.engine.shapes import specs_of
from openipu.engine.types import Tree
from openipu.errors import FailedPreconditionError
from openipu.ipu_infeed_queue import check_use

import jax
import jax.numpy as jnp
import keras
import numpy as np

__all__ = ["IPUOutfeedMode", "IPUOutfeedQueue", "IPUOutfeedQueueIterator", "ScopedIPUOutfeedQueue"]


class IPUOutfeedQueue:
    """Hands values from a running program to the host: `enqueue` in the program, `dequeue` or iterate on the host.

    >>> outfeed = ipu.ipu_outfeed_queue.IPUOutfeedQueue()
    >>> def body(total):
    ...     outfeed.enqueue({"total": total})
    ...     return total + 1
    >>> print(strategy.run(lambda: ipu.loops.repeat(3, body, 0.0)))
    3.0
    >>> print(outfeed.dequeue()["total"][:, 0])  # of the first replica
    [0. 1. 2.]

    `strategy.run` returns when the program has ended. Read what it enqueued after that, or from another thread while it
    runs.

    Args:
        outfeed_mode: `IPUOutfeedMode.ALL` (or None) for every element, `LAST` for the latest one.
        device_ordinal: The number of the system whose programs enqueue; None for the system of the current scope.
        buffer_depth: How many elements can wait on the device, and how many on the host while another thread reads
            them. When both are full, the program waits for the reader. A larger depth costs memory and saves calls of
            the host, which take 0.1 ms each. If no other thread reads, all elements are kept for the thread that runs
            the program.
        optimise_latency: Has no effect: elements reach the host within 0.05 seconds.
    """

    def __init__(
        self,
        outfeed_mode: IPUOutfeedMode | None = None,
        device_ordinal: int | None = None,
        buffer_depth: int = 3,
        optimise_latency: bool = False,
    ) -> None:
        mode = IPUOutfeedMode.ALL if outfeed_mode is None else outfeed_mode
        self.outfeed_mode = validate.member("outfeed_mode", mode, IPUOutfeedMode, by_name=False)
        self.device_ordinal = feed_ordinal(device_ordinal)
        if validate.flag("optimise_latency", optimise_latency):
            validate.no_effect({"optimise_latency of outfeed queues": "elements reach the host within 0.05 seconds"})
        self._buffer = HostBuffer(validate.count("buffer_depth", buffer_depth), only_last=mode is IPUOutfeedMode.LAST)
        self._maker = threading.get_ident()

    # --- in the program

    def enqueue(self, structure: Tree) -> Operation:
        """Hand over a value: an array, or a tuple, list or dict of arrays. A program may do so once per queue.

        While Keras builds a model, this has no effect.
        """
        if in_symbolic_scope():
            return Operation()
        _check_not_symbolic(structure)
        value = jax.tree.map(lambda a: jax.lax.stop_gradient(jnp.asarray(a)), structure)
        if not in_stage() and enqueued.enqueue(self._buffer, value):
            return Operation()
        trace = check_use(self.device_ordinal, "outfeed")
        spec = specs_of(value)
        if not trace.discovering:
            waiting = self._buffer.outlet.put(trace.scope.cell(self._buffer), value, trace.replicas.index())
            trace.scope.set_cell(self._buffer, waiting)
            if not self.enqueued:
                self._buffer.describe(spec, len(trace.replicas.own))
            return Operation()
        if id(self._buffer) in trace.outfeeds:
            raise ValueError(enqueued.TWICE)
        trace.outfeeds[id(self._buffer)] = (self._buffer, spec)
        trace.scope.set_cell(self._buffer, ())
        return Operation()

    def extend(self, rows: Tree) -> None:
        """Add the results of a program that has ended: arrays of (element, replica, ...)."""
        leaves = jax.tree.leaves(rows)
        count, replicas = leaves[0].shape[:2]
        spec = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape[2:], a.dtype), rows)
        with filled([(self._buffer, spec)], range(replicas)):
            for element in range(count):
                for replica in range(replicas):
                    self._buffer.add(replica, [leaf[element, replica] for leaf in leaves])

    @property
    def enqueued(self) -> bool:
        """Whether any program enqueues here."""
        return self._buffer.spec is not None

    # --- on the host

    def dequeue(self, wait_for_completion: bool = False) -> Any:
        """Everything enqueued since the last `dequeue`, as host arrays in the structure that was enqueued.

        In mode ALL, the first axis is the element; it has length 0 if there is nothing new. In mode LAST, every call
        returns the latest element. With several replicas, the next axis is the replica. An instance gets what its own
        replicas have enqueued.

        Args:
            wait_for_completion: Whether to wait until no program that enqueues here is running.
        """
        if not self.enqueued:
            if threading.get_ident() != self._maker:
                return []
            raise ValueError("Nothing has been enqueued yet. Run a program that calls `enqueue` first.")
        if validate.flag("wait_for_completion", wait_for_completion):
            self._buffer.wait_for_programs()
        if self.outfeed_mode is IPUOutfeedMode.ALL:
            return self._all(self._buffer.take())
        latest = self._buffer.latest()
        if latest is None:
            raise FailedPreconditionError("The outfeed queue has no latest element yet. Run the program first.")
        return self._one(latest)

    def __iter__(self) -> IPUOutfeedQueueIterator:
        if self.outfeed_mode is not IPUOutfeedMode.ALL:
            raise RuntimeError(
                "Only an outfeed queue in mode ALL can be iterated over. Use `dequeue` for the latest element."
            )
        return IPUOutfeedQueueIterator(self)

    @property
    def deleter(self) -> Operation:
        """Discard what has not been read."""
        self._buffer.clear()
        return Operation()

    def _next(self) -> Any:
        taken = self._buffer.take(1)
        if not taken:
            raise StopIteration
        return self._one(taken[0])

    def _one(self, replicas: list[list[np.ndarray]]) -> Any:
        joined = replicas[0] if len(replicas) == 1 else [np.stack(parts) for parts in zip(*replicas, strict=True)]
        return jax.tree.unflatten(jax.tree.structure(self._buffer.spec), joined)

    def _all(self, elements: list[list[list[np.ndarray]]]) -> Any:
        if elements:
            return jax.tree.map(lambda *rows: np.stack(rows), *map(self._one, elements))
        front = (0,) if self._buffer.replicas == 1 else (0, self._buffer.replicas)
        return jax.tree.map(lambda a: np.zeros((*front, *a.shape), a.dtype), self._buffer.spec)


class IPUOutfeedQueueIterator(Iterator[Any]):
    """The elements of an outfeed queue, one by one. It ends when there are no more for now, and can be continued.

    >>> outfeed = ipu.ipu_outfeed_queue.IPUOutfeedQueue()
    >>> _ = strategy.run(lambda: outfeed.enqueue(ipu.replication_ops.replication_index()))
    >>> [element.tolist() for element in iter(outfeed)]  # one element, with a value for each replica
    [[0, 1]]
    """

    def __init__(self, queue: IPUOutfeedQueue) -> None:
        self._queue = queue

    def __next__(self) -> Any:
        return self._queue._next()


class ScopedIPUOutfeedQueue(IPUOutfeedQueue):
    """An outfeed queue that frees its memory when it is no longer referenced. All outfeed queues do so here.

    >>> with strategy.scope():
    ...     outfeed = ipu.ipu_outfeed_queue.ScopedIPUOutfeedQueue()
    >>> outfeed.enqueued
    False
    """

    def __init__(self, outfeed_mode: IPUOutfeedMode | None = None, device_ordinal: int | None = None) -> None:
        super().__init__(outfeed_mode, device_ordinal)


def _check_not_symbolic(structure: Tree) -> None:
    if any(isinstance(leaf, keras.KerasTensor) for leaf in keras.tree.flatten(structure)):
        raise TypeError(
            "A symbolic tensor of Keras was enqueued, which has no value. Enqueue in the `call` of a layer, and put "
            "that layer into the model."
        )
