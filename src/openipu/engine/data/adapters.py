"""What feeds ask of Keras' data adapters, which read arrays, datasets, generators and loaders."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

from openipu.engine.core.state import Batch
from openipu.engine.keras_compat.api import (
    ArrayDataAdapter,
    DataAdapter,
    PyDataset,
    PyDatasetAdapter,
    TFDatasetAdapter,
    adapted_arrays,
)

import jax


def resident_bytes(adapter: ArrayDataAdapter) -> int | None:
    """Bytes that the adapter's arrays take on a device, or None when they cannot be kept there (sparse arrays)."""
    leaves = jax.tree.leaves(adapted_arrays(adapter), is_leaf=lambda leaf: hasattr(leaf, "shape"))
    if any(hasattr(leaf, "todense") or hasattr(leaf, "dense_shape") for leaf in leaves):
        return None
    sizes: list[int] = [getattr(getattr(leaf, "dtype", None), "itemsize", 8) for leaf in leaves]
    return sum(int(math.prod(leaf.shape)) * size for leaf, size in zip(leaves, sizes, strict=True))


def batches(adapter: DataAdapter) -> Iterator[Batch]:
    """One pass over the batches of a source."""
    return iter(adapter.get_jax_iterator())


def reads_ahead(adapter: DataAdapter) -> bool:
    """Whether workers fill a queue behind the adapter, so that a pass that was begun has to be gone on with."""
    return getattr(adapter, "enqueuer", None) is not None


def opens_once(adapter: DataAdapter) -> bool:
    """Whether a pass that was begun cannot be begun anew: its order comes from inside, or workers are at it."""
    return isinstance(adapter, TFDatasetAdapter) or reads_ahead(adapter)


def changes(adapter: DataAdapter) -> bool:
    """Whether the source has something of its own to do when an epoch ends, such as to shuffle."""
    kind = type(adapter.py_dataset) if isinstance(adapter, PyDatasetAdapter) else PyDataset
    return kind.on_epoch_begin is not PyDataset.on_epoch_begin or kind.on_epoch_end is not PyDataset.on_epoch_end


def replay_epochs(adapter: DataAdapter, before_ends: list[Callable[[], None]]) -> None:
    """Let a PyDataset do what it does around epochs, without reading them; each ends after one of `before_ends`."""
    for before_end in before_ends:
        adapter.py_dataset.on_epoch_begin()
        before_end()
        adapter.py_dataset.on_epoch_end()


def replay_passes(adapter: DataAdapter, passes: int) -> None:
    """Open a source that often: it may draw a new order then, which is when its first batch is read."""
    if not isinstance(adapter, PyDatasetAdapter):
        for _ in range(passes):
            next(batches(adapter), None)
