"""Makes random layers that several stages share draw the same numbers as on one device.

On one device, a seed counts up over all calls of a micro-batch. In a pipeline, every stage has its own copy of the
seed. In each micro-batch, the copy starts where the calls of earlier stages would have left the seed, and ends where
the calls of all stages would have.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any
from weakref import WeakKeyDictionary

from openipu.engine.keras_compat.patches import SEEDS
from openipu.engine.types import Array

import jax.numpy as jnp
import keras

from .nodes import Graph, Node
from .run_nodes import abstract_values, spec_of

Draws = dict[tuple[int, int], int]
"""How often each stage draws from each seed generator, by the identity of its variable and the stage's number."""

_draws: WeakKeyDictionary[Graph, dict[Hashable, Draws]] = WeakKeyDictionary()


@contextlib.contextmanager
def own_seeds(
    graph: Graph, cut: Sequence[int], stage: int, seeds: Sequence[keras.Variable], inputs: Sequence[Any], training: bool
) -> Iterator[set[int]]:
    """While active, shared seeds have the values that one stage would see if all ran on one device.

    Yields the identities of these seeds.

    Args:
        graph: The whole model.
        cut: The stage of each node.
        stage: The stage that is run.
        seeds: Variables that several stages share. Those that nothing draws from are left alone.
        inputs: The flat inputs of the graph.
        training: The mode.
    """
    starts = []
    for seed in seeds:
        drawn = _drawn(graph, tuple(cut), inputs, training)
        counts = [drawn.get((id(seed), i), 0) for i in range(max(cut) + 1)]
        if sum(counts):
            starts.append((seed, seed.value, sum(counts)))
            seed.assign(_counted_up(seed.value, sum(counts[:stage])))
    yield {id(seed) for seed, _, _ in starts}
    for seed, start, total in starts:
        seed.assign(_counted_up(start, total))


def _counted_up(seed: Array, draws: int) -> Array:
    return seed + jnp.array([0, draws], seed.dtype)


def _drawn(graph: Graph, cut: tuple[int, ...], inputs: Sequence[Any], training: bool) -> Draws:
    """The draws of all stages, counted once per graph, cut, mode and shape of the inputs."""
    known = _draws.setdefault(graph, {})
    key = training, cut, tuple(map(str, map(spec_of, inputs)))
    if key not in known:
        found: Counter[tuple[int, int]] = Counter()
        numbers = {id(node): stage for node, stage in zip(graph.nodes, cut, strict=True)}
        with _counted_draws() as counts:

            def visit(node: Node) -> None:
                for variable, count in counts.items():
                    found[variable, numbers[id(node)]] += count
                counts.clear()

            abstract_values(graph, inputs, training, visit)
        known[key] = found
    return known[key]


@contextlib.contextmanager
def _counted_draws() -> Iterator[Counter[int]]:
    """Counts how often this thread draws from each seed generator, by the identity of its variable."""
    counts: Counter[int] = Counter()

    def counted(original: Callable[..., Any], generator: keras.random.SeedGenerator, *args: Any, **kwargs: Any) -> Any:
        counts[id(generator.state)] += 1
        return original(generator, *args, **kwargs)

    with SEEDS.using(counted):
        yield counts
