"""How fast a dataset delivers its elements when no program is waiting for them."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from openipu import _validate as validate
from openipu.engine.data.dataset_reader import DatasetReader
from openipu.engine.types import Data
from openipu.errors import OutOfRangeError
from openipu.ipu_infeed_queue import DEFAULT_DEPTH, IPUInfeedQueue

import jax
import numpy as np

__all__ = ["dataset_benchmark", "infeed_benchmark"]


class Statistics(str):
    """JSON text that can also be read like a tensor."""

    __slots__ = ()

    def numpy(self) -> bytes:
        """The text as bytes, which `json.loads` takes, too."""
        return self.encode()


def dataset_benchmark(
    dataset: Data,
    number_of_epochs: int,
    elements_per_epochs: int,
    print_stats: bool = True,
    apply_debug_options: bool = True,
    do_memcpy: bool = True,
) -> Statistics:
    """Measure how fast a dataset delivers its elements, reading it the way an infeed queue does.

    >>> import json
    >>> text = ipu.dataset_benchmark.dataset_benchmark(input_fn(), 2, elements_per_epochs=4, print_stats=False)
    >>> [epoch["elements_processed"] for epoch in json.loads(text)["epochs"]]
    [4, 4]

    Args:
        dataset: As for `IPUInfeedQueue`. It must have at least `number_of_epochs` x `elements_per_epochs` elements.
        number_of_epochs: How many measurements to make, one after another in one pass over the data.
        elements_per_epochs: How many elements to read in each measurement.
        print_stats: Whether to print each measurement.
        apply_debug_options: Ignored; there are no such options here.
        do_memcpy: Whether to copy each element, as when it is sent to a device.

    Returns:
        JSON: {"epochs": [{"elements_processed", "total_bytes_processed", "time_elapsed" (seconds),
        "elements_per_second", "bandwidth" (GB/s)}, ...]}
    """
    del apply_debug_options
    plan = _Plan(number_of_epochs, elements_per_epochs, print_stats, do_memcpy)
    elements = DatasetReader(dataset, DEFAULT_DEPTH)
    try:
        return _measure(elements, plan)
    finally:
        elements.stop()


def infeed_benchmark(
    infeed_queue: IPUInfeedQueue,
    number_of_epochs: int,
    elements_per_epochs: int,
    print_stats: bool = True,
    do_memcpy: bool = True,
) -> Statistics:
    """Measure how fast an infeed queue delivers its elements. Arguments and result are as in `dataset_benchmark`.

    The queue starts at its first element, and does so again when it is next used.

    >>> import json
    >>> infeed = ipu.ipu_infeed_queue.IPUInfeedQueue(input_fn())
    >>> text = ipu.dataset_benchmark.infeed_benchmark(infeed, 2, elements_per_epochs=4, print_stats=False)
    >>> json.loads(text)["epochs"][0]["elements_processed"]
    4
    """
    validate.instance("infeed_queue", infeed_queue, IPUInfeedQueue)
    plan = _Plan(number_of_epochs, elements_per_epochs, print_stats, do_memcpy)
    try:
        return _measure(infeed_queue._elements, plan)
    finally:
        infeed_queue._elements.stop()


@dataclass(frozen=True, slots=True)
class _Plan:
    """The arguments of a benchmark, checked."""

    number_of_epochs: int
    elements_per_epochs: int
    print_stats: bool
    do_memcpy: bool

    def __post_init__(self) -> None:
        for name in ("number_of_epochs", "elements_per_epochs"):
            validate.count(name, getattr(self, name))
        for name in ("print_stats", "do_memcpy"):
            validate.flag(name, getattr(self, name))


def _measure(elements: DatasetReader, plan: _Plan) -> Statistics:
    elements.restart()
    use: Callable[[Any], Any] = (lambda e: jax.tree.map(np.copy, e)) if plan.do_memcpy else lambda e: e
    results = []
    for number in range(1, plan.number_of_epochs + 1):
        results.append(_epoch(elements, int(plan.elements_per_epochs), use))
        if plan.print_stats:
            stats = ", ".join(f"{name} {value:.6g}" for name, value in results[-1].items())
            print(f"Epoch {number}/{plan.number_of_epochs}: {stats}", flush=True)  # noqa: T201 - asked for
    return Statistics(json.dumps({"epochs": results}))


def _epoch(elements: DatasetReader, count: int, use: Callable[[Any], Any]) -> dict[str, float]:
    size, start = 0, time.perf_counter()
    for number in range(count):
        taken = elements.take(1)
        if not taken:
            raise OutOfRangeError(
                f"The dataset ended after {number} of the {count} elements of an epoch. Repeat the dataset, or give a "
                "smaller `elements_per_epochs`."
            )
        size += sum(a.nbytes for a in jax.tree.leaves(use(taken[0])))
    seconds = max(time.perf_counter() - start, 1e-9)
    return {
        "elements_processed": count,
        "total_bytes_processed": size,
        "time_elapsed": seconds,
        "elements_per_second": count / seconds,
        "bandwidth": size / seconds / 1e9,
    }
