"""How fast a dataset gives its elements, without a program that waits for them."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

from openipu._validate import positive
from openipu.engine.data.dataset_reader import DatasetReader
from openipu.errors import OutOfRangeError
from openipu.ipu_infeed_queue import DEFAULT_DEPTH, IPUInfeedQueue

import jax
import numpy as np

__all__ = ["dataset_benchmark", "infeed_benchmark"]


def dataset_benchmark(
    dataset: Any,
    number_of_epochs: int,
    elements_per_epochs: int,
    print_stats: bool = True,
    apply_debug_options: bool = True,
    do_memcpy: bool = True,
) -> str:
    """Read a dataset as an infeed queue reads it, and measure.

    Args:
        dataset: As for `IPUInfeedQueue`. It must give `number_of_epochs` x `elements_per_epochs` elements.
        number_of_epochs: Measurements, one after the other in one pass through the data.
        elements_per_epochs: Elements in each of them.
        print_stats: Whether to print each of them.
        apply_debug_options: Accepted for scripts that give it; there are none.
        do_memcpy: Whether each element is also copied, as on its way to a device.

    Returns:
        JSON: {"epochs": [{"elements_processed", "total_bytes_processed", "time_elapsed" (seconds),
        "elements_per_second", "bandwidth" (GB/s)}, ...]}
    """
    del apply_debug_options
    epochs, count = _checked(number_of_epochs, elements_per_epochs)
    elements = DatasetReader(dataset, DEFAULT_DEPTH)
    try:
        return _measure(elements, epochs, count, print_stats, do_memcpy)
    finally:
        elements.stop()


def infeed_benchmark(
    infeed_queue: IPUInfeedQueue,
    number_of_epochs: int,
    elements_per_epochs: int,
    print_stats: bool = True,
    do_memcpy: bool = True,
) -> str:
    """Read the elements of an infeed queue and measure; the other arguments and the result as in `dataset_benchmark`.

    The queue begins at its first element, and again when it is used after the benchmark.
    """
    if not isinstance(infeed_queue, IPUInfeedQueue):
        raise TypeError(f"`infeed_queue` is a {type(infeed_queue).__name__}. Give an `IPUInfeedQueue`.")
    epochs, count = _checked(number_of_epochs, elements_per_epochs)
    try:
        return _measure(infeed_queue._elements, epochs, count, print_stats, do_memcpy)
    finally:
        infeed_queue._elements.stop()


def _checked(number_of_epochs: Any, elements_per_epochs: Any) -> tuple[int, int]:
    return positive("number_of_epochs", number_of_epochs), positive("elements_per_epochs", elements_per_epochs)


def _measure(elements: DatasetReader, epochs: int, count: int, print_stats: bool, do_memcpy: bool) -> str:
    elements.restart()
    use: Callable[[Any], Any] = (lambda e: jax.tree.map(np.copy, e)) if do_memcpy else lambda e: e
    results = []
    for number in range(1, epochs + 1):
        results.append(_epoch(elements, count, use))
        if print_stats:
            stats = ", ".join(f"{name} {value:.6g}" for name, value in results[-1].items())
            print(f"Epoch {number}/{epochs}: {stats}", flush=True)  # noqa: T201 - what `print_stats` asks for
    return json.dumps({"epochs": results})


def _epoch(elements: DatasetReader, count: int, use: Callable[[Any], Any]) -> dict[str, float]:
    size, start = 0, time.perf_counter()
    for number in range(count):
        taken = elements.take(1)
        if not taken:
            raise OutOfRangeError(
                f"The dataset ended after {number} of the {count} elements of an epoch. Give a dataset that repeats, "
                "or fewer `elements_per_epochs`."
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
