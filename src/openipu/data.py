"""Three ways to get whole batches out of arrays: `trim` drops the rest, `repeat` loops forever, `pad` adds zeros.

OpenIPU's `fit`, `evaluate` and `predict` take data of any length and never drop a sample. These functions are for code
that was written for static shapes, and for data that is repeated.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar, overload

from openipu import _validate as validate
from openipu._unavailable import unavailable

import numpy as np

if TYPE_CHECKING:
    from openipu.engine.types import Tree

    from numpy.typing import ArrayLike

__all__ = ["make_divisible", "pad", "repeat", "trim"]

T = TypeVar("T")
__path__: list[str] = []  # `ipu.data.ops` of the original can be imported, too


def make_divisible(number: int, divisor: int) -> int:
    """The largest multiple of `divisor` that is not larger than `number`.

    >>> ipu.data.make_divisible(60000, 64)
    59968
    """
    number = validate.count("number", number, least=0)
    return number - number % validate.count("divisor", divisor)


@overload
def trim(data: T, /, *, batch_size: int, multiple: int = ...) -> T: ...
@overload
def trim(*data: Any, batch_size: int, multiple: int = ...) -> tuple[Any, ...]: ...
def trim(*data: Any, batch_size: int, multiple: int = 1) -> Any:
    """The same arrays without the last rows, which do not fill a batch.

    >>> x_whole, y_whole = ipu.data.trim(x, y, batch_size=10)
    >>> len(x), len(x_whole)
    (32, 30)

    Args:
        data: Arrays, or (nested) tuples, lists and dicts of arrays, all with the same number of rows. The result has
            the same structure; its arrays are views, so nothing is copied.
        batch_size: Rows in one micro-batch.
        multiple: Micro-batches that belong together, for example replicas x gradient-accumulation count.
    """
    rows = _rows(data)
    group = validate.count("batch_size", batch_size) * validate.count("multiple", multiple)
    keep = make_divisible(rows, group)
    if keep == 0:
        raise ValueError(
            f"{rows} rows are fewer than one group of {batch_size=} x {multiple=} = {group} rows, so nothing would be "
            "left. Use a smaller batch_size or multiple, or add rows with openipu.data.pad."
        )
    trimmed = _map(lambda array: array[:keep], data)
    return trimmed[0] if len(data) == 1 else trimmed


def repeat(*data: Any, batch_size: int, shuffle: bool = False, seed: int = 0) -> Any:
    """An endless `keras.utils.PyDataset` that loops over the rows in batches of exactly `batch_size`.

    No row is lost: a batch that reaches the end continues at the beginning, so every loop delivers every row once. With
    `shuffle`, each loop has its own order, which is the same in every run with the same `seed`.

    Tell Keras how long an epoch is, and to keep the order. An epoch continues where the last one stopped; a new `fit`
    starts again at the first batch:

    >>> batches = ipu.data.repeat(x, y, batch_size=10, shuffle=True)
    >>> history = model.fit(batches, steps_per_epoch=4, epochs=2, shuffle=False, verbose=0)

    Args:
        data: `x`, or `x, y`, or `x, y, sample_weight`, each an array or tuples, lists and dicts of arrays.
        batch_size: Rows in one batch.
        shuffle: Draw a new order for every loop.
        seed: Determines the orders that are drawn.
    """
    rows = _rows(data)
    batch_size = validate.count("batch_size", batch_size)
    seed = validate.count("seed", seed, least=0)
    shuffle = validate.flag("shuffle", shuffle)
    if len(data) > 3:
        raise ValueError(
            f"`repeat` takes x, y and sample_weight at most, but got {len(data)} structures. Put several inputs into "
            "one tuple or dict."
        )
    if rows == 0:
        raise ValueError("The arrays have 0 rows, so there is nothing to repeat. Pass at least one row.")
    return _looped_class()(data, rows, batch_size, seed if shuffle else None)


def pad(x: Tree, y: Tree = None, *, batch_size: int, sample_weight: Tree = None) -> tuple[Tree, Tree, Tree]:
    """`(x, y, sample_weight)`, padded with rows of zeros to a whole number of batches.

    `sample_weight` is 1 for real rows (or the weight you give) and 0 for added ones, so that these do not count in the
    weighted loss and weighted metrics. Keras still divides the loss of a batch by the number of all its rows, added
    ones included, and `metrics=` (unlike `weighted_metrics=`) ignores weights.

    >>> x_more, y_more, sample_weight = ipu.data.pad(x, y, batch_size=10)
    >>> len(x_more), float(sample_weight.sum())
    (40, 32.0)
    >>> loss = model.evaluate(x_more, y_more, sample_weight=sample_weight, batch_size=10, verbose=0)

    Args:
        x: An array, or tuples, lists and dicts of arrays.
        y: The same for the targets; None stays None.
        batch_size: Rows in one micro-batch.
        sample_weight: Weights of the real rows.
    """
    given = [part for part in (x, y, sample_weight) if part is not None]
    rows = _rows(tuple(given))
    missing = -rows % validate.count("batch_size", batch_size)
    weight = np.ones(rows, np.float32) if sample_weight is None else _map(_as_float, sample_weight)

    def fill(array: ArrayLike) -> np.ndarray[Any, Any]:
        array = np.asarray(array)
        return np.concatenate([array, np.zeros((missing, *array.shape[1:]), array.dtype)])

    return _map(fill, x), None if y is None else _map(fill, y), _map(fill, weight)


def _as_float(array: ArrayLike) -> np.ndarray[Any, Any]:
    """Weights as floats: an integer weight would truncate what Keras multiplies it with."""
    weights: np.ndarray[Any, Any] = np.asarray(array)
    return weights if np.issubdtype(weights.dtype, np.floating) else weights.astype(np.float32)


@functools.cache
def _looped_class() -> type[Any]:
    """The class of the datasets that `repeat` returns. Created on first use, because its base class needs Keras."""
    import keras

    class Looped(keras.utils.PyDataset):
        """Batch i starts at row i * batch_size of the endless sequence of loops, so any batch can be read directly."""

        num_batches = None

        def __init__(self, data: tuple[Any, ...], rows: int, batch_size: int, seed: int | None) -> None:
            super().__init__()
            self._data, self._rows, self._batch_size = data, rows, batch_size
            # Two loops are in use at a time: one ends in a batch, and the next one begins there.
            self._order = functools.lru_cache(maxsize=2)(functools.partial(_order, rows, seed))

        def __getitem__(self, index: int) -> Any:
            first = index * self._batch_size
            loops, positions = np.divmod(np.arange(first, first + self._batch_size), self._rows)
            picked = np.concatenate(
                [self._order(loop)[positions[loops == loop]] for loop in range(loops[0], loops[-1] + 1)]
            )
            return _map(lambda array: np.asarray(array)[picked], self._data)

    return Looped


def _order(rows: int, seed: int | None, loop: int) -> np.ndarray[Any, Any]:
    """The order of the rows in one loop: unchanged without a seed, else a permutation drawn from (seed, loop)."""
    if seed is None:
        return np.arange(rows)
    return np.random.default_rng((seed, loop)).permutation(rows)


def _map(function: Callable[[Any], Any], tree: Tree) -> Tree:
    """The same structure with `function` applied to every array."""
    if isinstance(tree, dict):
        return {key: _map(function, value) for key, value in tree.items()}
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(_map(function, value) for value in tree))
    if isinstance(tree, tuple | list):
        return type(tree)(_map(function, value) for value in tree)
    return function(tree)


def _leaves(tree: Tree, path: str) -> Iterator[tuple[str, Any]]:
    """Every array of a structure, with a name that tells a user where it is."""
    if isinstance(tree, dict):
        for key, value in tree.items():
            yield from _leaves(value, f"{path}[{key!r}]")
    elif isinstance(tree, tuple | list):
        for position, value in enumerate(tree):
            yield from _leaves(value, f"{path}[{position}]")
    else:
        yield path, tree


def _rows(data: tuple[Any, ...]) -> int:
    """The number of rows, which is the same for all arrays."""
    rows: dict[str, int] = {}
    for path, array in _leaves(data, "data"):
        shape = getattr(array, "shape", None)
        if not shape:
            raise ValueError(
                f"{path} must be an array with at least one axis, but it is {validate.a(array)}. Convert it with "
                "numpy.asarray; for a tf.data, grain or torch dataset, use its own methods."
            )
        rows[path] = shape[0]
    if not rows:
        raise ValueError("There is no data. Give at least one array.")
    if len(set(rows.values())) > 1:
        counts = ", ".join(f"{path} has {count}" for path, count in rows.items())
        raise ValueError(
            f"All arrays must have the same number of rows, but {counts}. Cut them to the same length first."
        )
    return next(iter(rows.values()))


def __getattr__(name: str) -> Any:
    return unavailable("data", name)
