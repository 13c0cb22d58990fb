"""Questions that feeds ask Keras' data adapters, which read arrays, datasets, generators and loaders."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

from openipu.engine.core.state import Batch
from openipu.engine.keras_compat.api import (
    ArrayDataAdapter,
    DataAdapter,
    PyDataset,
    PyDatasetAdapter,
    TFDatasetAdapter,
    adapted_arrays,
    get_data_adapter,
)
from openipu.engine.types import Data

import jax


def adapter_of(*data: Data, **settings: Any) -> DataAdapter:
    """Keras' adapter for the data. Raises if it is known to be empty; `empty_source` is for those that are not."""
    try:
        adapter = get_data_adapter(*data, **settings)
    except ValueError as error:
        if "at least one structure" in str(error):  # what an empty Grain dataset leads to
            raise empty_source() from None
        raise
    if adapter.num_batches == 0:
        if isinstance(adapter, ArrayDataAdapter):
            raise ValueError("The data has 0 samples. Give arrays with at least one row.")
        raise empty_source()
    return adapter


def empty_source() -> ValueError:
    """The error about a source without batches."""
    return ValueError(
        "The data source is empty: it gave 0 batches. Give at least one batch; a generator that is already used up "
        "cannot be read a second time."
    )


def resident_bytes(adapter: ArrayDataAdapter) -> int | None:
    """The bytes that the adapter's arrays take on a device, or None if they cannot live there (sparse arrays)."""
    leaves = jax.tree.leaves(adapted_arrays(adapter), is_leaf=lambda leaf: hasattr(leaf, "shape"))
    if any(hasattr(leaf, "todense") or hasattr(leaf, "dense_shape") for leaf in leaves):
        return None
    sizes: list[int] = [getattr(getattr(leaf, "dtype", None), "itemsize", 8) for leaf in leaves]
    return sum(int(math.prod(leaf.shape)) * size for leaf, size in zip(leaves, sizes, strict=True))


def batches(adapter: DataAdapter) -> Iterator[Batch]:
    """One pass over the batches of a source."""
    return iter(adapter.get_jax_iterator())


def reads_ahead(adapter: DataAdapter) -> bool:
    """Whether workers fill a queue behind the adapter, so that a pass, once started, has to be continued."""
    return getattr(adapter, "enqueuer", None) is not None


def opens_once(adapter: DataAdapter) -> bool:
    """Whether a pass, once started, cannot be restarted: the source shuffles itself, or workers are reading it."""
    return isinstance(adapter, TFDatasetAdapter) or reads_ahead(adapter)


def changes(adapter: DataAdapter) -> bool:
    """Whether the source does something of its own when an epoch begins or ends, such as shuffling."""
    return changes_at_begin(adapter) or _kind(adapter).on_epoch_end is not PyDataset.on_epoch_end


def changes_at_begin(adapter: DataAdapter) -> bool:
    """Whether the source does something of its own when an epoch begins, so that batches read before may be others."""
    return _kind(adapter).on_epoch_begin is not PyDataset.on_epoch_begin


def _kind(adapter: DataAdapter) -> type[PyDataset]:
    return type(adapter.py_dataset) if isinstance(adapter, PyDatasetAdapter) else PyDataset


def replay_epochs(adapter: DataAdapter, before_ends: list[Callable[[], None]]) -> None:
    """Let a PyDataset begin and end past epochs without reading them; `before_ends` has one call for each end."""
    for before_end in before_ends:
        adapter.py_dataset.on_epoch_begin()
        before_end()
        adapter.py_dataset.on_epoch_end()


def replay_passes(adapter: DataAdapter, passes: int) -> None:
    """Open a source `passes` times. Reading the first batch of a pass may draw a new order."""
    if not isinstance(adapter, PyDatasetAdapter):
        for _ in range(passes):
            next(batches(adapter), None)
