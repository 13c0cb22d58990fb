"""Feeds from the host to device programs."""

from __future__ import annotations

from typing import Any

from openipu import _validate as validate
from openipu.engine.data.dataset_reader import DatasetReader
from openipu.engine.devices.current_system import feed_ordinal
from openipu.engine.devices.replicas import Replicas
from openipu.engine.program.infeed import InfeedSource
from openipu.engine.program.program_trace import ProgramTrace, current, in_stage
from openipu.engine.program.user_program import Operation
from openipu.engine.types import Data, Tree
from openipu.errors import NotFoundError

__all__ = ["IPUInfeedQueue", "IPUIterator", "IPUOwnedIterator"]

DEFAULT_DEPTH = 3


class IPUInfeedQueue:
    """Feeds the elements of a dataset to device programs, one after the other.

    >>> infeed = IPUInfeedQueue(dataset)                                                # doctest: +SKIP
    >>> strategy.run(lambda: ipu.loops.repeat(100, body, [0.0], infeed))                # doctest: +SKIP

    Elements are read ahead by a thread. With R replicas, element i goes to replica i mod R. A program goes on where
    the last one stopped.

    Args:
        dataset: A `tf.data.Dataset`, a grain dataset, another iterable of elements, or a function that returns one.
            An element is an array, or a tuple or dict of arrays; all elements have the same shapes. Do not read the
            dataset elsewhere meanwhile.
        device_ordinal: The number of the system whose programs are fed; None for that of the current scope.
        prefetch_depth: Elements that are kept ready, 1 to 255; a program that fetches while it runs gets as many at a
            time. None for 3.
        optimise_latency: Accepted for scripts that give it; elements are never held back.
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
            raise TypeError(f"Unknown arguments {sorted(kwargs)} of an infeed queue. Leave them out.")
        self.device_ordinal = feed_ordinal(device_ordinal)
        self.prefetch_depth = prefetch_option(prefetch_depth)
        if validate.flag("optimise_latency", optimise_latency):
            validate.no_effect({"optimise_latency of infeed queues": "elements are never held back"})
        self._elements = DatasetReader(dataset, self.prefetch_depth)
        self._source = InfeedSource(self._elements, self.prefetch_depth)
        self._dequeued = self._deleted = False

    @property
    def element_spec(self) -> Any:
        """Shapes and dtypes of one element."""
        return self._elements.spec

    @property
    def number_of_tuple_elements(self) -> int:
        """Arrays that a loop's body gets from one element."""
        spec = self.element_spec
        return len(spec) if isinstance(spec, tuple | list | dict) else 1

    @property
    def initializer(self) -> Operation:
        """Begin (again) at the first element. A queue that is used without it begins by itself."""
        self._elements.restart()
        self._deleted = False
        return Operation()

    @property
    def deleter(self) -> Operation:
        """Stop reading. Using the queue again needs `initializer`."""
        if not self._elements.started:
            raise NotFoundError("The infeed queue has not started, so there is nothing to delete. Use it first.")
        self._elements.stop()
        self._deleted = True
        return Operation()

    @property
    def dequeued(self) -> bool:
        """Whether a program that takes elements of this queue has been made."""
        return self._dequeued

    def get_next(self) -> Any:
        """Not available: programs get elements as arguments of a loop's body."""
        raise ValueError(
            "`get_next` of an infeed queue is obsolete. Give the queue to `ipu.loops.repeat` or "
            "`ipu.loops.while_loop`, or use an `IPUIterator`."
        )

    def take(self, count: int, replicas: Replicas) -> Tree:
        """The next `count` elements for each replica, sent to their devices, for a program that takes them at once."""
        self._dequeued = True
        return self._source.slab(count, replicas)

    def _dequeue(self) -> Any:
        """The next element, inside a program."""
        trace = check_use(self.device_ordinal, "infeed")
        if self._deleted:
            raise NotFoundError("The infeed queue was deleted. Access its `initializer` to begin again.")
        self._dequeued = True
        return self._source.next(trace)


class IPUIterator:
    """The elements of a dataset inside a device program: `next(iterator)` there gives the next one.

    Args:
        dataset: As for `IPUInfeedQueue`.
        infeed_spec: With `element_spec` in place of a dataset, as the `element_spec` of an iterator. Elements then come
            from the `IPUInfeedQueue` given as `infeed_spec`.
        element_spec: What the elements of that queue look like.
        **kwargs: Further arguments of the `IPUInfeedQueue`.
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
        return self._infeed.element_spec

    def __iter__(self) -> IPUIterator:
        return self

    def __next__(self) -> Any:
        return self._infeed._dequeue()

    def get_next(self) -> Any:
        """The next element; only inside a program."""
        return next(self)

    def get_next_as_optional(self) -> Any:
        """Not available: a program has to know that there is an element."""
        raise NotImplementedError("Programs cannot test for the end of the data. Give a dataset that repeats.")

    def _serialize_to_tensors(self) -> Any:
        raise NotImplementedError("The position of an iterator cannot be saved. Save that of its dataset.")


class IPUOwnedIterator(IPUIterator):
    """An `IPUIterator` that stops reading when nothing refers to it any more, as all of them do here."""


def prefetch_option(value: int | None) -> int:
    """The number of elements to keep ready."""
    return validate.count("prefetch_depth", value, optional=True, most=255) or DEFAULT_DEPTH


def check_use(ordinal: int, kind: str) -> ProgramTrace:
    """What is being traced; an error outside of programs, and in programs of another system."""
    trace = current()
    if trace is None and in_stage():
        remedy = {
            "infeed": "Give `infeed_queue=` to the pipeline; the first stage gets its elements as arguments.",
            "outfeed": "Give `outfeed_queue=` to the pipeline, and return the value from the last stage.",
        }
        raise RuntimeError(f"An {kind} was used in a stage of a pipeline, where it cannot take part. {remedy[kind]}")
    if trace is None:
        raise RuntimeError(
            f"An {kind} was used outside of a device program. Use it in a function that is given to "
            "`strategy.run` or `ipu.ipu_compiler.compile`."
        )
    if trace.ordinal != ordinal:
        raise ValueError(
            f"The {kind} belongs to system {ordinal}, but the program runs on system {trace.ordinal}. Make it with "
            f"`device_ordinal={trace.ordinal}`, or inside the scope of the program's strategy."
        )
    return trace
