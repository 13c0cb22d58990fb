"""Random layers that several stages share draw what they would on one device.

There, a seed counts up over all calls of a micro-batch. In a pipeline, every stage has a seed of its own, which begins
each micro-batch where the calls of earlier stages would have left it, and ends where those of all stages would have.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from weakref import WeakKeyDictionary

from openipu.engine.keras_compat.patches import SEEDS

import jax.numpy as jnp

from .graph import Graph, Node
from .run_nodes import abstract_values, spec_of

_draws: WeakKeyDictionary[Graph, dict[Any, dict[tuple[int, int], int]]] = WeakKeyDictionary()


@contextlib.contextmanager
def own_seeds(
    graph: Graph, cut: Sequence[int], stage: int, seeds: Sequence[Any], inputs: Sequence[Any], training: bool
) -> Iterator[None]:
    """Inside, `seeds`, variables of random layers that several stages share, are those of one stage.

    Args:
        graph: The whole model.
        cut: The stage of each node.
        stage: The stage that is run.
        seeds: The variables.
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
    yield
    for seed, start, total in starts:
        seed.assign(_counted_up(start, total))


def _counted_up(seed: Any, draws: int) -> Any:
    return seed + jnp.array([0, draws], seed.dtype)


def _drawn(graph: Graph, cut: tuple[int, ...], inputs: Sequence[Any], training: bool) -> dict[tuple[int, int], int]:
    """How often each stage asks each seed generator, by the identity of its variable and the number of the stage."""
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
    """How often each seed generator, known by the identity of its variable, is asked for a seed by this thread."""
    counts: Counter[int] = Counter()

    def counted(original: Callable[..., Any], generator: Any, *args: Any, **kwargs: Any) -> Any:
        counts[id(generator.state)] += 1
        return original(generator, *args, **kwargs)

    with SEEDS.using(counted):
        yield counts
