"""Reads the elements of a dataset ahead, in a thread, so that programs need not wait for them."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

from openipu.engine.devices.dtypes import is_numeric, narrowed
from openipu.engine.shapes import specs_of
from openipu.engine.types import Data, Tree
from openipu.errors import InvalidArgumentError

import jax
import numpy as np
from jax.typing import DTypeLike

from .slab import as_arrays

if TYPE_CHECKING:
    import tensorflow as tf


def opener(dataset: Data) -> Callable[[], Iterator[Tree]]:
    """How to start a pass over `dataset`: a `tf.data.Dataset`, an iterable, or a function that returns one."""
    if hasattr(dataset, "as_numpy_iterator"):
        return lambda: iter(dataset.as_numpy_iterator())
    if callable(dataset) and not isinstance(dataset, Iterable):
        return lambda: iter(dataset())
    if hasattr(dataset, "__iter__") or hasattr(dataset, "__getitem__"):
        return lambda: iter(dataset)
    raise ValueError(
        f"{type(dataset).__name__!r} is not a dataset. Give a `tf.data.Dataset`, a grain dataset, another iterable of "
        "elements, or a function that returns one."
    )


def normal(element: Tree) -> Tree:
    """An element as NumPy arrays of its own, in dtypes that devices use. A source may use its memory for the next."""
    arrays = jax.tree.map(lambda a: a.copy() if a.flags.writeable else a, as_arrays(element))
    for array in jax.tree.leaves(arrays):
        _check_numbers(array.dtype)
    return narrowed(arrays)


def _check_numbers(dtype: DTypeLike) -> None:
    if not is_numeric(dtype):
        raise ValueError(
            f"The dataset's elements have dtype {np.dtype(dtype).name}, but devices compute with numbers. Turn text or "
            "objects into numbers in the dataset, for example with a `keras.layers.TextVectorization` in its `map`."
        )


def describe(dataset: Data, open_: Callable[[], Iterator[Tree]]) -> tuple[Tree, Iterator[Tree] | None]:
    """The shapes of one element, and the pass that was started to see one, with that element still in it."""
    spec = getattr(dataset, "element_spec", None)
    if spec is not None:
        return _checked(jax.tree.map(_from_tensor_spec, spec)), None
    elements = open_()
    first = next(elements, None)
    if first is None:
        raise ValueError("The dataset has no elements. Give at least one.")
    first = normal(first)
    return _checked(specs_of(first)), _chain(first, elements)


def _chain(first: Tree, rest: Iterator[Tree]) -> Iterator[Tree]:
    yield first
    yield from rest


def _from_tensor_spec(spec: tf.TensorSpec) -> jax.ShapeDtypeStruct:
    shape = spec.shape
    if shape.rank is None or not shape.is_fully_defined():
        raise ValueError(
            f"The dataset's elements have shape {shape}, which is not fully defined. Give all elements the same shape: "
            "`batch(size, drop_remainder=True)`, or `padded_batch`."
        )
    dtype = spec.dtype.as_numpy_dtype
    _check_numbers(dtype)
    return jax.ShapeDtypeStruct(tuple(shape), jax.dtypes.canonicalize_dtype(dtype))


def _checked(spec: Tree) -> Tree:
    if isinstance(spec, list | tuple) and any(isinstance(part, list) for part in spec):
        raise ValueError("The dataset's elements have lists inside. Use tuples or dicts of arrays.")
    for leaf in jax.tree.leaves(spec):
        if 0 in leaf.shape:
            raise InvalidArgumentError(
                f"The dataset's elements have shape {leaf.shape}, in which a dimension is 0. Leave out empty arrays."
            )
    return spec


class _Shared:
    """What the reading thread shares with those who take elements. It does not keep the reader alive."""

    def __init__(self, ahead: int) -> None:
        self.changed = threading.Condition()
        self.ready: deque[Tree] = deque()
        self.ahead = ahead
        self.end: BaseException | None = None
        self.stopped = False

    def stop(self) -> None:
        with self.changed:
            self.stopped = True
            self.changed.notify_all()


def _read(shared: _Shared, elements: Iterator[Tree], spec: Tree) -> None:
    number = 0
    while True:
        with shared.changed:
            while len(shared.ready) >= shared.ahead and not shared.stopped:
                shared.changed.wait()
            if shared.stopped:
                return
        try:
            element = _alike(number, normal(next(elements)), spec)
        except BaseException as error:  # raised when this element is asked for
            with shared.changed:
                shared.end = error
                shared.changed.notify_all()
            return
        number += 1
        with shared.changed:
            shared.ready.append(element)
            shared.changed.notify_all()


def _alike(number: int, element: Tree, spec: Tree) -> Tree:
    expected, actual = jax.tree.leaves(spec), jax.tree.leaves(element)
    same = bool(jax.tree.structure(element) == jax.tree.structure(spec)) and all(  # type: ignore[operator]
        a.shape == b.shape and a.dtype == b.dtype for a, b in zip(actual, expected, strict=True)
    )
    if not same:
        raise ValueError(
            f"Element {number} of the dataset has {_text(actual)}, but the first one has {_text(expected)}. A program "
            "has fixed shapes: drop the last partial batch, or pad it (see `openipu.data`)."
        )
    return element


def _text(leaves: list[np.ndarray | jax.ShapeDtypeStruct]) -> str:
    return ", ".join(f"{np.dtype(a.dtype).name}{list(a.shape)}" for a in leaves)


class DatasetReader:
    """Hands out the elements of a dataset in order, while a thread keeps the next ones ready.

    It starts with `ahead` of them and grows to the most that were ever taken at once, so that a loop's next slab is
    read while the current one runs.
    """

    def __init__(self, dataset: Data, ahead: int) -> None:
        self._open = opener(dataset)
        self.spec, self._begun = describe(dataset, self._open)
        self._ahead = ahead
        self._shared: _Shared | None = None
        self._back: deque[Tree] = deque()

    def restart(self) -> None:
        """Start again at the first element."""
        self.stop()
        shared = self._shared = _Shared(self._ahead)
        weakref.finalize(self, shared.stop)
        begun, self._begun = self._begun, None
        elements = begun if begun is not None else self._open()
        threading.Thread(target=_read, args=(shared, elements, self.spec), name="openipu-infeed", daemon=True).start()

    @property
    def started(self) -> bool:
        """Whether a pass is under way."""
        return self._shared is not None

    def stop(self) -> None:
        """End the pass that is under way, if there is one."""
        if self._shared is not None:
            self._shared.stop()
        self._shared = None
        self._back.clear()

    def take(self, count: int) -> list[Tree]:
        """The next `count` elements, or fewer at the end of the data. An error in the dataset is raised here."""
        if self._shared is None:
            self.restart()
        taken = [self._back.popleft() for _ in range(min(count, len(self._back)))]
        shared = self._shared
        assert shared is not None
        with shared.changed:
            self._ahead = shared.ahead = max(shared.ahead, count)
            while len(taken) < count:
                if shared.ready:
                    taken.append(shared.ready.popleft())
                elif isinstance(shared.end, StopIteration):
                    break
                elif shared.end is not None:
                    self._back.extendleft(reversed(taken))
                    raise shared.end
                else:
                    shared.changed.notify_all()
                    shared.changed.wait()
            shared.changed.notify_all()
        return taken

    @property
    def at_hand(self) -> int:
        """The number of elements that can be taken without waiting."""
        return len(self._back) + (len(self._shared.ready) if self._shared is not None else 0)

    def put_back(self, elements: list[Tree]) -> None:
        """Return elements, which are then the next ones to be taken."""
        self._back.extendleft(reversed(elements))
