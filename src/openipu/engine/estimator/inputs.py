"""input_fn -> batches, from any position in the data."""

from __future__ import annotations

import inspect
import itertools
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from openipu.engine.data.adapters import batches
from openipu.engine.data.dataset_reader import normal
from openipu.engine.keras_compat import api as keras_api
from openipu.engine.types import Data, Tree

import jax
import keras
import numpy as np

from .saved_state import Saved

log = logging.getLogger("openipu")

Batch = tuple[Tree, ...]
"""(features,) or (features, labels)."""


@dataclass(frozen=True, slots=True)
class InputContext:
    """What an input_fn with an argument `input_context` learns about its reader.

    >>> def input_fn(input_context):
    ...     mine = slice(input_context.input_pipeline_id, None, input_context.num_input_pipelines)
    ...     return [(x[mine], y[mine])] * 8
    >>> _ = estimator.train(input_fn, steps=2)
    """

    num_input_pipelines: int = 1
    input_pipeline_id: int = 0
    num_replicas_in_sync: int = 1


@dataclass(frozen=True, slots=True, eq=False)
class InputFn:
    """A user's function that returns a dataset. It is called with those of the `given` arguments that it declares."""

    function: Callable[..., Any]
    given: dict[str, Any]

    def open(self) -> Data:
        """A new dataset."""
        declared = inspect.signature(self.function).parameters
        return self.function(**{name: value for name, value in self.given.items() if name in declared})


class InputBatches(keras_api.DataAdapter):
    """The batches of one call of input_fn, as a source for feeds: at most `limit` of them, without the first `skip`.

    A position beyond the end of the data wraps around to the beginning, so training that stopped at the end of a
    finite dataset resumes with its first batch.
    """

    def __init__(self, input_fn: InputFn, skip: int = 0, limit: int | None = None) -> None:
        batches = itertools.islice(_from(input_fn, skip), limit)
        first = next(batches, None)
        if first is None:
            raise ValueError("input_fn returned a dataset with 0 batches. Return one with at least 1 batch.")
        self.first = first
        self._batches = itertools.chain([first], batches)

    def get_jax_iterator(self) -> Iterator[Batch]:
        """The batches. They can be read only once."""
        return self._batches

    @property
    def num_batches(self) -> None:
        """None: unknown until the data ends."""
        return None

    @property
    def batch_size(self) -> int:
        """Rows of the first batch."""
        return int(jax.tree.leaves(self.first)[0].shape[0])


def _from(input_fn: InputFn, skip: int) -> Iterator[Batch]:
    dataset = _checked(input_fn.open())
    length = _length(dataset)
    skip = skip % length if length else skip
    batches = _batches(dataset, skip)
    first = next(batches, None)
    if first is None and skip:
        # `skip` is beyond the end of data of unknown length. Count its batches and wrap around.
        length = sum(1 for _ in _batches(_checked(input_fn.open()), 0))
        batches = _batches(_checked(input_fn.open()), skip % length if length else 0)
        first = next(batches, None)
    if first is not None:
        yield from itertools.chain([first], batches)


def _batches(dataset: Data, skip: int) -> Iterator[Batch]:
    """The batches of a dataset after the first `skip`, which are not read if the dataset can skip them itself."""
    elements: Iterator[Any]
    if skip and hasattr(dataset, "cardinality") and hasattr(dataset, "skip"):  # tf.data
        dataset, skip = dataset.skip(skip), 0
    if isinstance(dataset, keras.utils.PyDataset) and dataset.workers <= 1:
        numbers = itertools.count(skip) if dataset.num_batches is None else range(skip, dataset.num_batches)
        elements, skip = (dataset[number] for number in numbers), 0
    elif _is_plain(dataset):
        elements = iter(dataset)
    else:
        elements = batches(keras_api.get_data_adapter(dataset))
    return map(_element, itertools.islice(elements, skip, None))


def _length(dataset: Data) -> int | None:
    """The number of batches in a pass; None if it is unknown or infinite."""
    if isinstance(dataset, keras.utils.PyDataset):
        return None if dataset.num_batches is None else int(dataset.num_batches)
    if hasattr(dataset, "cardinality"):
        return max(int(dataset.cardinality()), 0) or None
    return None


def _checked(dataset: Data) -> Data:
    """`dataset`, or an error if it is not a dataset of batches."""
    arrays = isinstance(dataset, dict | tuple | str | bytes) or hasattr(dataset, "shape") or hasattr(dataset, "dtype")
    if arrays or not (hasattr(dataset, "__iter__") or isinstance(dataset, keras.utils.PyDataset)):
        raise ValueError(
            f"input_fn returned a value of type {type(dataset).__name__}. Return a dataset of batches: tf.data, grain, "
            "a PyDataset (such as `openipu.data.repeat(x, y, batch_size=32)`), a DataLoader or a generator."
        )
    return dataset


def _is_plain(dataset: Data) -> bool:
    """Whether this is a plain Python iterable, not something that Keras has an adapter for."""
    known = ("tensorflow", "grain", "torch")
    return not isinstance(dataset, keras.utils.PyDataset) and not any(
        cls.__module__.split(".")[0] in known for cls in type(dataset).__mro__
    )


def _element(element: Tree) -> Batch:
    """An element of the dataset as a batch, with arrays of the dtypes that devices use."""
    if not isinstance(element, tuple):
        element = (element,)
    if len(element) not in (1, 2):
        raise ValueError(
            f"input_fn yields tuples of {len(element)} elements. Yield features or a tuple (features, labels), with "
            "several features in a dict."
        )
    if len(element) == 2 and element[1] is None:
        element = element[:1]
    return tuple(normal(jax.tree.map(_batched, part)) for part in element)


def _batched(leaf: object) -> np.ndarray:
    array = np.asarray(leaf)
    if array.ndim == 0 or array.dtype == object:
        raise ValueError(
            f"input_fn yields a {type(leaf).__name__} of shape {array.shape} instead of a batch. Batch the dataset, so "
            "that the first axis of every array is the example."
        )
    return array


def resumed(input_fn: InputFn, found: Saved | None, limit: int) -> tuple[InputBatches, int]:
    """The next `limit` training batches after those that a checkpoint has seen, and the size of a full batch."""
    if found is None:
        data = InputBatches(input_fn, 0, limit)
        return data, data.batch_size
    data = InputBatches(input_fn, found.batches, limit)
    if data.batch_size == found.batch_size:
        return data, found.batch_size
    size = InputBatches(input_fn, 0, 1).batch_size  # training may resume at a smaller last batch
    if found.batch_size in (0, size):
        return data, size
    skip, rest = divmod(found.examples, size)
    level, again = (logging.WARNING, f", so it sees {rest} examples again") if rest else (logging.INFO, "")
    log.log(
        level, "The checkpoint has seen %d examples in batches of %d. With batches of %d, training resumes after %d "
        "batches%s.", found.examples, found.batch_size, size, skip, again,
    )  # fmt: skip
    return InputBatches(input_fn, skip, limit), size
