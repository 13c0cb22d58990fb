"""Slabs of a group of processes, each of which reads its own part of the data.

Batches are dealt to replicas in turn, so in a full slab each process sends what its own replicas need. When the data of
some processes ends earlier, or with partial batches, what is left is dealt anew among all of them: each sample is used
once, whatever the processes had.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

from openipu.engine.devices import group
from openipu.engine.devices.replicas import Replicas
from openipu.engine.devices.transfer import of_all_processes, send_own
from openipu.engine.keras_compat import api as keras_api
from openipu.engine.shapes import signature
from openipu.engine.types import Tree

import jax
import numpy as np

from .slab import Slab, deal, send_slab, stack_rows

NEXT: Final = "the next batches"
"""Where processes are when they read data."""
_SAME: Final = (
    'With `shard="auto"`, all instances have to be given the same data in the same order: give shuffles a seed.'
)


@dataclass(frozen=True, slots=True)
class OwnParts:
    """How the batches of this process become slabs of the group."""

    replicas: Replicas

    def shares(self, steps: int) -> Iterator[int]:
        """How many of the next `steps` batches, over all replicas, this process reads: about as many as the others.

        If there are fewer batches than processes, some of them read nothing. When the others have none left, it is
        their turn: so there is one number for each round, until a round finds something.
        """
        count, index = group.count(), group.index()
        for first in range(0, count, steps):
            yield steps // count + (0 <= index - first < steps % count)

    def slab(self, begin: int, steps: int, width: int, alike: list[Tree], tail: Tree, full: Tree) -> Slab | None:
        """The group's next slab, of up to `steps` batches. None if no process has any data left.

        This process has read the batches `alike` and possibly a smaller `tail`. `full` says how a full batch looks.
        """
        shapes = None if full is None else _text(full)
        rows = 0 if tail is None else len(jax.tree.leaves(tail)[0])
        found = group.exchange(NEXT, [len(alike), rows, shapes])
        counts = [count for count, _, _ in found]
        if not any(counts) and not any(rows for _, rows, _ in found):
            return None
        _check_shapes([text for _, _, text in found])
        whole, rest = divmod(steps, self.replicas.count)
        if not rest and counts == [whole * self._own] * group.count():
            return replace(self._full(begin, sum(counts), width, alike), own=len(alike))
        batches, partial = _dealt_anew(counts, [rows for _, rows, _ in found], alike, tail, full, self._own)
        body = jax.tree.map(lambda *b: stack_rows(b, width), *batches) if batches else None
        slab = send_slab(begin, len(batches), body, partial, self.replicas)
        return replace(slab, own=len(alike) + (tail is not None))

    @property
    def _own(self) -> int:
        """How many replicas each process has."""
        return self.replicas.count // group.count()

    def _full(self, begin: int, count: int, width: int, alike: list[Tree]) -> Slab:
        """A slab to which every process contributes what its own replicas need."""
        own = width // group.count()

        body = jax.tree.map(lambda *rows: deal(stack_rows(rows, own), self._own), *alike)
        return Slab(begin, count, send_own(body, self.replicas.split(1), 1), None)


def _text(batch: Tree) -> str:
    structure, leaves = signature(batch)
    return f"{structure}: " + ", ".join(f"{dtype.name}{list(shape)}" for shape, dtype in leaves)


def _check_shapes(texts: Sequence[str | None]) -> None:
    for index, text in enumerate(texts):
        if text is None:
            raise ValueError(
                f"The data of instance {index} is empty. Give each instance at least one full batch, or let "
                '`PopDistStrategy(shard="auto")` divide the data.'
            )
        if text != texts[0]:
            raise ValueError(
                f"Instance 0 has batches of {texts[0]}, but instance {index} of {text}. Use the same batch size, and "
                "drop partial batches that are not at the end of the data."
            )


def _dealt_anew(
    counts: Sequence[int], rows: Sequence[int], alike: list[Tree], tail: Tree, full: Tree, own: int
) -> tuple[list[Tree], Tree]:
    """The full batches of all processes in the order of their replicas, and a last partial batch or None."""
    most = max(counts)

    def gathered(*parts: np.ndarray) -> np.ndarray:
        return of_all_processes(stack_rows(parts, most + 1))

    empty = jax.tree.map(lambda a: np.zeros(a.shape, a.dtype), full)
    padded = empty if tail is None else jax.tree.map(_padded, tail, full)
    everything = jax.tree.map(gathered, *[*alike, *[empty] * (most - len(alike)), padded])
    batches = [jax.tree.map(lambda a, i=i, n=n: a[i, n], everything) for i, n in _in_turn(counts, own)]
    left = [jax.tree.map(lambda a, i=i, n=n: a[i, most, :n], everything) for i, n in enumerate(rows) if n]
    joined = jax.tree.map(lambda *parts: np.concatenate(parts), *left) if left else None
    size = jax.tree.leaves(full)[0].shape[0]
    whole, rest = divmod(sum(rows), size)
    batches += [jax.tree.map(lambda a, n=n: a[n * size : (n + 1) * size], joined) for n in range(whole)]
    return batches, jax.tree.map(lambda a: a[whole * size :], joined) if rest else None


def _in_turn(counts: Sequence[int], own: int) -> Iterator[tuple[int, int]]:
    """Which batch of which process comes next, if each process has `own` replicas: pairs of (process, batch)."""
    for first in range(0, max(counts), own):
        for index, count in enumerate(counts):
            yield from ((index, number) for number in range(first, min(first + own, count)))


def _padded(tail: np.ndarray, full: jax.ShapeDtypeStruct) -> np.ndarray:
    padded = np.zeros(full.shape, full.dtype)
    padded[: len(tail)] = tail
    return padded


def check_same_size(adapter: keras_api.DataAdapter, steps: int | None) -> None:
    """Raise unless all instances are given data of the same size."""
    facts = {"The number of batches": adapter.num_batches, "The batch size": adapter.batch_size, "`steps`": steps}
    group.agree("the size of the data", {name: str(value) for name, value in facts.items()}, _SAME)


def check_same(data: Tree, name: str = NEXT) -> None:
    """Raise unless all instances have the same data, or have read the same batches of it."""
    group.agree_on_bytes(
        name,
        name,
        (np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(data)),
        _SAME,
    )
