"""Feeds from the host to device programs."""

from __future__ import annotations

import copy
from collections.abc import Hashable
from typing import Any, Self

from openipu import _validate as validate
from openipu.engine.data.dataset_reader import DatasetReader
from openipu.engine.devices.current_system import feed_ordinal
from openipu.engine.devices.placement import Placement
from openipu.engine.program.infeed import FeedArgument, InfeedSource, slabs_of
from openipu.engine.program.program_trace import ProgramTrace, current, in_stage
from openipu.engine.program.user_program import Operation
from openipu.engine.types import Data, Tree
from openipu.errors import NotFoundError

import jax

__all__ = ["IPUInfeedQueue", "IPUIterator", "IPUOwnedIterator"]

DEFAULT_DEPTH = 3


class IPUInfeedQueue:
    """Feeds the elements of a dataset to device programs, one after another.

    >>> infeed = ipu.ipu_infeed_queue.IPUInfeedQueue([np.float32(i) for i in range(20)])
    >>> def body(total, element):
    ...     return total + element
    >>> print(strategy.run(lambda: ipu.loops.repeat(10, body, 0.0, infeed)))  # 0 + 2 + ... + 18 on this replica
    90.0

    A thread reads elements ahead. With R replicas, element i goes to replica i mod R. Each program continues where the
    last one stopped.

    Args:
        dataset: A `tf.data.Dataset`, a grain dataset, any other iterable of elements, or a function that returns one.
            An element is an array, or a tuple or dict of arrays; all elements have the same shapes. Nothing else may
            read the dataset while the queue is in use. Each instance feeds its own replicas; with
            `PopDistStrategy(shard="auto")`, all instances give the same dataset.
        device_ordinal: The number of the system whose programs are fed; None for the system of the current scope.
        prefetch_depth: How many elements to keep ready, 1 to 255. A program that fetches elements while it runs gets
            them in groups of this size. None for 3.
        optimise_latency: Has no effect: elements are never held back.
    """

    def __init__(
        self,
        dataset: Data,
        device_ordinal: int | None = None,
        prefetch_depth: int | None = None,
        optimise_latency: bool = False,
        **kwargs: Any,
    ) -> None:
        if kwargs:
            raise TypeError(f"An infeed queue has no arguments {sorted(kwargs)}. Leave them out.")
        self.device_ordinal = feed_ordinal(device_ordinal)
        self.prefetch_depth = prefetch_option(prefetch_depth)
        if validate.flag("optimise_latency", optimise_latency):
            validate.no_effect({"optimise_latency of infeed queues": "elements are never held back"})
        self._elements = DatasetReader(dataset, self.prefetch_depth)
        self._source = InfeedSource(self._elements.spec, self._elements, self.prefetch_depth)
        self._dequeued = self._deleted = False

    @property
    def element_spec(self) -> Any:
        """Shapes and dtypes of one element."""
        return self._source.spec

    @property
    def number_of_tuple_elements(self) -> int:
        """How many arrays the body of a loop gets from one element."""
        spec = self.element_spec
        return len(spec) if isinstance(spec, tuple | list | dict) else 1

    @property
    def initializer(self) -> Operation:
        """Start (again) at the first element. A queue that is used without this starts by itself."""
        self._elements.restart()
        self._deleted = False
        return Operation()

    @property
    def deleter(self) -> Operation:
        """Stop reading. Access `initializer` before you use the queue again."""
        if not self._elements.started:
            raise NotFoundError("The infeed queue has not started, so there is nothing to delete. Use it first.")
        self._elements.stop()
        self._deleted = True
        return Operation()

    @property
    def dequeued(self) -> bool:
        """Whether any program takes elements from this queue."""
        return self._dequeued

    def get_next(self) -> Any:
        """Not available: programs get elements as arguments of the body of a loop."""
        raise ValueError(
            "`get_next` of an infeed queue is obsolete. Give the queue to `ipu.loops.repeat` or "
            "`ipu.loops.while_loop`, or use an `IPUIterator`."
        )

    def take(self, count: int, place: Placement) -> Tree:
        """The next `count` elements for each replica, sent to the devices, for programs that take them all at once."""
        self._dequeued = True
        [slab] = slabs_of([(self._source, count)], place)
        return slab

    def _dequeue(self) -> Any:
        """The next element, inside a program."""
        trace = check_use(self.device_ordinal, "infeed")
        return self._used().next(trace)

    def _used(self) -> InfeedSource:
        """What a program takes elements from."""
        if self._deleted:
            raise NotFoundError("The infeed queue was deleted. Access its `initializer` to start again.")
        self._dequeued = True
        return self._source

    def _stand_in(self) -> IPUInfeedQueue:
        """The same queue without its elements."""
        queue = copy.copy(self)
        queue._source = self._source.stand_in()
        del queue._elements
        return queue


class IPUIterator(FeedArgument):
    """The elements of a dataset inside a device program, where `next(iterator)` returns the next one.

    >>> elements = ipu.ipu_infeed_queue.IPUIterator([np.float32(i) for i in range(8)])
    >>> print(strategy.run(lambda: next(elements)), strategy.run(lambda: next(elements)))
    0.0 2.0

    Args:
        dataset: As for `IPUInfeedQueue`.
        infeed_spec: Instead of a dataset, an `IPUInfeedQueue` that delivers the elements.
        element_spec: The `element_spec` of that queue.
        **kwargs: Further arguments of `IPUInfeedQueue`.
    """

    def __init__(
        self,
        dataset: Data | None = None,
        infeed_spec: IPUInfeedQueue | None = None,
        element_spec: Tree | None = None,
        **kwargs: Any,
    ) -> None:
        if dataset is not None and infeed_spec is None and element_spec is None:
            self._infeed = IPUInfeedQueue(dataset, **kwargs)
        elif dataset is None and isinstance(infeed_spec, IPUInfeedQueue) and element_spec is not None:
            self._infeed = infeed_spec
        else:
            raise ValueError("Give either a `dataset`, or both `infeed_spec` (an infeed queue) and `element_spec`.")

    @property
    def element_spec(self) -> Any:
        """Shapes and dtypes of one element."""
        return self._queue().element_spec

    def _queue(self) -> IPUInfeedQueue:
        """The queue that delivers the elements."""
        return self._infeed

    def feed_key(self) -> Hashable:
        """What a program that takes elements from this iterator has compiled into it."""
        leaves, structure = jax.tree.flatten(self.element_spec)
        return type(self), structure, tuple(leaves), self._queue().device_ordinal, self._queue().prefetch_depth

    def stand_in(self) -> Self:
        """The same iterator without its elements."""
        twin = copy.copy(self)
        twin._infeed = self._queue()._stand_in()
        return twin

    def source(self) -> InfeedSource:
        """What programs take elements from."""
        return self._queue()._used()

    def __iter__(self) -> IPUIterator:
        if current() is not None:
            raise RuntimeError(
                "A program cannot loop over an iterator, because it cannot see the end of the data while it is traced. "
                "Loop over a range, and call `next(iterator)` in the loop."
            )
        return self

    def __next__(self) -> Any:
        return self._queue()._dequeue()

    def get_next(self) -> Any:
        """The next element. Call it inside a program."""
        return next(self)

    def get_next_as_optional(self) -> Any:
        """Not available: a program cannot test for the end of the data."""
        raise NotImplementedError("Programs cannot test for the end of the data. Use a dataset that repeats.")

    def _serialize_to_tensors(self) -> Any:
        raise NotImplementedError("The position of an iterator cannot be saved. Save the position of its dataset.")


class IPUOwnedIterator(IPUIterator):
    """An `IPUIterator` that stops reading when it is no longer referenced. All iterators do so here.

    >>> elements = ipu.ipu_infeed_queue.IPUOwnedIterator([np.float32(i) for i in range(8)])
    >>> print(strategy.run(lambda: next(elements)))
    0.0
    """


def prefetch_option(value: int | None) -> int:
    """The number of elements to keep ready."""
    return validate.count("prefetch_depth", value, optional=True, most=255) or DEFAULT_DEPTH


def check_use(ordinal: int, kind: str) -> ProgramTrace:
    """The program being traced. Raise outside of programs and in programs of another system."""
    trace = current()
    if trace is None and in_stage():
        remedy = {
            "infeed": "Give the pipeline an `infeed_queue=`; its first stage gets the elements as arguments.",
            "outfeed": "Give the pipeline an `outfeed_queue=`, and return the value from the last stage.",
        }
        raise RuntimeError(f"An {kind} was used in a stage of a pipeline, which is not possible. {remedy[kind]}")
    if trace is None:
        model = " or in a layer of a model of the strategy, which `fit`, `evaluate` and `predict` run"
        raise RuntimeError(
            f"An {kind} was used outside of a device program. Use it in a function that you give to `strategy.run` or "
            f"`ipu.ipu_compiler.compile`{model if kind == 'outfeed' else ''}."
        )
    if trace.ordinal != ordinal:
        raise ValueError(
            f"The {kind} belongs to system {ordinal}, but the program runs on system {trace.ordinal}. Create it with "
            f"`device_ordinal={trace.ordinal}`, or inside the scope of the program's strategy."
        )
    return trace
