"""Cutting models into stages: running them one after another gives what the model gives."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import openipu  # noqa: F401 - chooses Keras' backend
from openipu.engine.keras_compat.api import drop_values, has_value
from openipu.engine.pipeline.partition.graph import graph_of
from openipu.engine.pipeline.partition.nodes import Graph
from openipu.engine.pipeline.partition.split import Stage, run_stage, split

import jax
import keras
import numpy as np
import pytest
from keras import layers, ops

import pipeline_zoo as zoo
from stage_runs import equal, evenly, made, reference, run_all


def stages_of(name: str, count: int, training: bool = True) -> tuple[tuple[Stage, ...], Any]:
    model, x = made(zoo.MODELS[name])
    graph = graph_of(model, x, training)
    return split(graph, evenly(graph, count)), x


# What depends on the mode is most visible in training; these have a branch, nested modes, or a mask in the loss.
BOTH = ("subclassed", "mixed_inside", "masked_subclassed")


@pytest.mark.parametrize(
    ("name", "training"),
    [(name, True) for name in zoo.MODELS]
    + [pytest.param(n, False, marks=[] if n in BOTH else pytest.mark.slow) for n in zoo.MODELS],
)
def test_stages_give_what_the_model_gives(name: str, training: bool) -> None:
    model, x = made(zoo.MODELS[name])
    graph = graph_of(model, x, training)
    most = min(4, sum(node.is_layer for node in graph.nodes))
    cuts = [split(graph, evenly(graph, count)) for count in {2, most}]
    # One program, which compiles faster than all its operations one by one.
    expected, results = jax.jit(
        lambda x: (reference(model, x, training), [run_all(stages, x, training) for stages in cuts]),
        compiler_options={"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True},
    )(x)
    for stages, actual in zip(cuts, results, strict=True):
        assert all(stage.nodes for stage in stages)
        equal(actual._replace(loss=None), expected._replace(loss=None))
        np.testing.assert_allclose(actual.loss, expected.loss, rtol=1e-6)


def test_stages_can_be_compiled_and_differentiated() -> None:
    stages, x = stages_of("tied", 3)
    model = stages[0].graph.model
    weights = [v.value for v in model.trainable_variables]

    def by_stages(weights: list[Any]) -> Any:
        boundary: Any = ()
        for stage in stages:
            with keras.StatelessScope(list(zip(model.trainable_variables, weights, strict=True))):
                boundary = run_stage(stage, boundary, x, training=True)
        return (boundary**2).mean()

    def whole(weights: list[Any]) -> Any:
        return (model.stateless_call(weights, [v.value for v in model.non_trainable_variables], x)[0] ** 2).mean()

    actual, expected = (jax.jit(jax.grad(f))(weights) for f in (by_stages, whole))
    for a, b in zip(actual, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7)
    assert all(np.abs(g).max() > 0 for g in actual)


def test_boundaries_hold_what_is_still_needed() -> None:
    stages, x = stages_of("skips", 4)
    graph = stages[0].graph
    inputs = {id(tensor) for tensor in graph.inputs}
    for before, after in pairwise(stages):
        assert before.sends == after.receives
        assert before.sends
        assert not inputs & {id(tensor) for tensor in before.sends}
    first = next(n for n in graph.nodes if n.is_layer)
    add = next(n for n in graph.nodes if n.operation.name.startswith("add"))
    used_in = stages[-1].cut[graph.nodes.index(add)]
    rides = [id(first.outputs[0]) in {id(t) for t in stage.receives} for stage in stages]
    assert rides == [0 < stage.index <= used_in for stage in stages]
    shapes = jax.eval_shape(lambda x: run_stage(stages[0], (), x, training=False), x)
    assert [value.shape for value, _ in shapes] == [(zoo.BATCH, *t.shape[1:]) for t in stages[0].sends]


def test_masks_are_leaves_of_the_boundary() -> None:
    stages, x = stages_of("masked", 2)
    boundary = run_stage(stages[0], (), x, training=False)
    masks = [mask for _, mask in boundary if mask is not None]
    assert masks
    assert len(jax.tree.leaves(boundary)) == len(boundary) + len(masks)
    np.testing.assert_array_equal(masks[0], x != 0)


def test_first_stage_that_uses_a_variable_owns_it() -> None:
    for name in ("tied", "tied_layers", "tied_operation"):
        stages, _ = stages_of(name, 2)
        model = stages[0].graph.model
        owned = [v for stage in stages for v in stage.variables]
        assert sorted(map(id, owned)) == sorted(map(id, model.variables)), name
        assert not stages[0].borrows
        assert [v.name for v in stages[1].borrows] == ["embeddings"], name
        assert {id(v) for v in stages[1].borrows} <= {id(v) for v in stages[0].variables}


def test_unused_variables_have_an_owner() -> None:
    class Spare(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.last = layers.Dense(2), layers.Dense(2)
            self.extra = self.add_weight(shape=(3,))

        def call(self, inputs: Any) -> Any:
            return self.last(self.used(inputs))

    model = Spare()
    model(x := np.ones((2, 3), "float32"))
    graph = graph_of(model, x)
    stages = split(graph, [0, 1])
    assert id(model.extra) in map(id, stages[-1].variables)


def test_a_traced_model_is_traced_again_for_other_shapes() -> None:
    stages, x = stages_of("subclassed", 3, training=False)
    smaller = keras.tree.map_structure(lambda a: a[:3], x)
    equal(run_all(stages, smaller, False).outputs, reference(stages[0].graph.model, smaller, False).outputs)


def test_tracing_leaves_no_traces() -> None:
    model, x = made(zoo.MODELS["subclassed"])
    before = [(len(la._inbound_nodes), len(la._outbound_nodes)) for la in model._flatten_layers()]
    value = model.blocks[0].kernel.value
    graph_of(model, x)
    assert [(len(la._inbound_nodes), len(la._outbound_nodes)) for la in model._flatten_layers()] == before
    assert model.blocks[0].kernel.value is value
    equal(ops.transpose(model.blocks[0].kernel), value.T)


def test_a_model_is_traced_while_its_variables_are_empty() -> None:
    """As in the middle of `fit`, where their values are on the devices."""

    class Norm(layers.Layer):
        def __init__(self) -> None:
            super().__init__()
            self.norm = layers.LayerNormalization()

        def call(self, inputs: Any) -> Any:
            return self.norm(inputs)

    class Norms(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = Norm(), Norm()

        def call(self, inputs: Any) -> Any:
            return self.last(self.first(inputs))

    model = Norms()
    model(np.ones((2, 4, 6), "float32"))
    values = [v.value for v in model.variables]
    drop_values(model.variables)
    graph = graph_of(model, np.ones((3, 4, 6), "float32"))
    assert graph.outputs.shape == (3, 4, 6)
    assert not any(map(has_value, model.variables))
    for variable, value in zip(model.variables, values, strict=True):
        variable.assign(value)


def test_what_call_does_with_layers_is_in_the_order_of_calls() -> None:
    model, x = made(zoo.MODELS["subclassed"])
    names = [str(node) for node in graph_of(model, x).nodes if node.is_layer]
    inside = model.head.name
    assert [name.split("/")[0] for name in names] == [
        *(block.name for block in model.blocks), model.drop.name, model.norm.name, inside, inside,
    ]  # fmt: skip


# --- what cannot be traced -------------------------------------------------------------------------------------------


class Untraceable(keras.Model):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.layer, self.seeds = how, layers.Dense(3), keras.random.SeedGenerator(1)
        self.scale = self.add_weight(shape=(), initializer="ones")

    def call(self, inputs: Any) -> Any:
        x = self.layer(inputs)
        if self.how == "jax":
            return jax.numpy.sin(x)
        if self.how == "value":
            return x * ops.convert_to_tensor(self.scale)
        if self.how == "random":
            return x + keras.random.normal((3,), seed=self.seeds)
        if self.how == "assign":
            self.scale.assign(self.scale + 1.0)
        if self.how == "loss":
            self.add_loss(ops.mean(x))
        if self.how == "constant":
            return np.zeros(3)
        return x


@pytest.mark.parametrize("how", ["jax", "value", "random", "assign", "loss", "constant"])
def test_errors_of_call_name_the_line(how: str) -> None:
    model = Untraceable(how)
    model(x := np.ones((2, 3), "float32"))
    with pytest.raises(ValueError, match="cannot be traced") as error:
        graph_of(model, x)
    assert "into the `call` of a layer" in str(error.value)
    if how != "constant":
        assert "test_split.py:" in str(error.value)


def test_a_model_that_was_never_called_has_no_stages() -> None:
    with pytest.raises(RuntimeError, match="before it is built"):
        graph_of(Untraceable("nothing"))


def test_a_graph_with_a_call_of_its_own_is_refused() -> None:
    class Both(keras.Model):
        def call(self, inputs: Any) -> Any:
            return 2.0 * super().call(inputs)

    inputs = keras.Input((3,))
    with pytest.raises(RuntimeError, match="`call` of its own"):
        graph_of(Both(inputs, layers.Dense(2)(inputs)))


# --- rules about stages ----------------------------------------------------------------------------------------------


def layer_stages(graph: Graph, stages: Sequence[int | None]) -> list[int | None]:
    given = iter(stages)
    return [next(given) if node.is_layer else None for node in graph.nodes]


@pytest.mark.parametrize(
    ("stages", "error", "words"),
    [
        ([0, 0, 2, 2, 3], RuntimeError, ["stages up to 3", "nothing in stage 1"]),
        ([1, 1, 2, 2, 2], RuntimeError, ["nothing in stage 0"]),
        ([0, 1, 0, 1, 1], ValueError, ["dense_2", "stage 0", "dense_1", "stage 1"]),
        ([0, 0, None, None, 1], ValueError, ["'dense_2', 'dense_3'", "PipelineStage"]),
        ([0, 0, 0, 0, 0], ValueError, ["at least 2 stages", "stage 0"]),
        ([-1, 0, 0, 1, 1], ValueError, ["stage -1"]),
    ],
)
def test_rules(stages: list[int | None], error: type[Exception], words: list[str]) -> None:
    names = ["dense", "dense_1", "dense_2", "dense_3", "dense_4"]
    model = keras.Sequential([keras.Input((4,)), *(layers.Dense(4, name=name) for name in names)])
    with pytest.raises(error) as raised:
        split(graph_of(model), stages)
    assert all(word in str(raised.value) for word in words), raised.value


def test_operations_go_where_the_latest_of_their_inputs_is() -> None:
    inputs = keras.Input((4,))
    first = layers.Dense(4)(inputs)
    second = layers.Dense(4)(first)
    early, late, none = ops.tanh(first), first + second, ops.sin(inputs)
    third = layers.Dense(4)(early * late + none)
    graph = graph_of(keras.Model(inputs, third))
    stages = split(graph, layer_stages(graph, [0, 1, 2]))
    found = {node.operation.name.split("_")[0]: stage for node, stage in zip(graph.nodes, stages[0].cut, strict=True)}
    # `sin` uses only the inputs, so it goes where it is used.
    assert {name: found[name] for name in ("tanh", "sin", "multiply")} == {"tanh": 0, "sin": 1, "multiply": 1}
    adds = [s for node, s in zip(graph.nodes, stages[0].cut, strict=True) if node.operation.name.startswith("add")]
    assert adds == [1, 1]


def test_inputs_of_a_nested_model_are_converted_where_they_are_used() -> None:
    inner_in = keras.Input((4,), dtype="float16")
    inner = keras.Model(inner_in, layers.Dense(4)(inner_in))
    x = layers.Dense(4)(inputs := keras.Input((4,)))
    graph = graph_of(keras.Model(inputs, inner(x) + x))
    stages = split(graph, layer_stages(graph, [0, 1]))
    assert len(stages[0].sends) == 1
    assert stages[0].sends[0].dtype == "float32"
