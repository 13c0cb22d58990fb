"""Looking into layers that are made of layers: their parts, cut anywhere, give what the layer gives."""

from __future__ import annotations

from typing import Any

import openipu  # noqa: F401 - chooses Keras' backend
from openipu.engine.core.options import Opening
from openipu.engine.keras_compat.api import all_layers
from openipu.engine.pipeline.partition.graph import graph_of
from openipu.engine.pipeline.partition.nodes import Graph
from openipu.engine.pipeline.partition.opened_layer import has_parts
from openipu.engine.pipeline.partition.split import split

import jax
import keras
import numpy as np
import pytest
from keras import layers, ops

import composite_zoo as zoo
from stage_runs import Result, equal, evenly, made, reference, run_all


def ours(layer: keras.Layer) -> bool:
    return has_parts(layer) and not type(layer).__module__.startswith("keras.")


def opened(model: keras.Model, x: Any, training: bool) -> Graph:
    """The graph that looks into everything that is not a layer of Keras."""
    numbers = tuple(i for i, layer in enumerate(all_layers(model)) if ours(layer))
    shapes = tuple((tuple(leaf.shape), str(leaf.dtype)) for leaf in keras.tree.flatten(x))
    return graph_of(model, x, training, Opening(numbers, shapes))


def same(actual: Result, expected: Result) -> None:
    equal(actual._replace(loss=None), expected._replace(loss=None))
    np.testing.assert_allclose(actual.loss, expected.loss, rtol=1e-6)


# What depends on the mode is most visible in training; what is left out by default has its like among the others.
SLOW = ("subclassed", "mixed_blocks", "shared_norm", "own_weight")
BOTH = ("noise", "masked")


@pytest.mark.parametrize(
    ("name", "training"),
    [pytest.param(n, True, marks=pytest.mark.slow if n in SLOW else []) for n in zoo.MODELS]
    + [pytest.param(n, False, marks=[] if n in BOTH else pytest.mark.slow) for n in zoo.MODELS],
)
def test_parts_give_what_the_layer_gives(name: str, training: bool) -> None:
    model, x = made(zoo.MODELS[name])
    graph = opened(model, x, training)
    assert not graph.refused
    inside = {
        nested.model for node in graph.nodes for nested in node.within if not isinstance(nested.model, keras.Model)
    }
    assert len(inside) == zoo.MODELS[name].opened
    most = min(5, sum(node.is_layer for node in graph.nodes))
    cuts = [split(graph, evenly(graph, count)) for count in {2, most}]
    expected, results = jax.jit(
        lambda x: (reference(model, x, training), [run_all(stages, x, training) for stages in cuts]),
        compiler_options={"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True},
    )(x)
    for actual in results:
        same(actual, expected)


# --- what stays in one piece -----------------------------------------------------------------------------------------


class Stubborn(layers.Layer):
    def __init__(self, how: str, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.how, self.seeds, self.seen = how, keras.random.SeedGenerator(1), []
        self.first, self.last = layers.Dense(3), layers.Dense(3)
        self.scale = self.add_weight(shape=(3,), initializer="ones")
        self.count = self.add_weight(shape=(), initializer="zeros", trainable=False)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        outputs = super().__call__(*args, **kwargs)
        return outputs * 2.0 if self.how == "around" else outputs

    def call(self, inputs: Any) -> Any:
        x = self.first(inputs)
        match self.how:
            case "random":
                x = x + keras.random.normal((3,), seed=self.seeds)
            case "state":
                self.count.assign(self.count + 1.0)
            case "value":
                x = x * ops.convert_to_tensor(self.scale)
            case "jax":
                x = jax.numpy.sin(x)
            case "loss":
                self.add_loss(ops.mean(x))
            case "attribute":
                self.kept = x
            case "list":
                self.seen.append(x)
        return self.last(x)


STUBBORN = {
    "random": "cannot be traced",
    "state": "cannot be traced",
    "value": "cannot be traced",
    "jax": "cannot be traced",
    "loss": "cannot be traced",
    "attribute": "sets the attribute 'kept'",
    "list": "sets the attribute 'seen'",
    "around": "computes something else",
    "activity": "activity regularizer",
}


@pytest.mark.parametrize("how", STUBBORN)
def test_what_cannot_be_replayed_stays_in_one_piece(how: str) -> None:
    keras.utils.set_random_seed(3)
    x = layers.Dense(3)(inputs := keras.Input((3,)))
    layer = Stubborn(how, activity_regularizer="l2" if how == "activity" else None)
    model = keras.Model(inputs, layers.Dense(3)(layer(x)))
    x = np.random.default_rng(1).normal(size=(4, 3)).astype("float32")
    graph = opened(model, x, True)
    [(refused, reason)] = graph.refused
    assert refused is layer
    assert STUBBORN[how] in reason
    assert not isinstance(getattr(layer, "kept", None), keras.KerasTensor)
    assert [node.operation for node in graph.nodes if node.is_layer] == model.layers[1:]
    stages = split(graph, evenly(graph, 2))
    same(run_all(stages, x, True), reference(model, x, True))
