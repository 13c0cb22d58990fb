"""Cutting models into stages: running them one after another gives what the model gives."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import openipu  # noqa: F401 - chooses Keras' backend
from openipu.engine.model import get_keras_mask
from openipu.engine.pipeline.graph import Graph, graph_of
from openipu.engine.pipeline.split import Stage, run_stage, split

import jax
import keras
import numpy as np
import pytest
from tests import pipeline_zoo as zoo
from tests.zoo import policy


def make(name: str) -> tuple[keras.Model, Any]:
    case = zoo.MODELS[name]
    keras.utils.set_random_seed(3)
    with policy(case.policy):
        model = case.make()
    return model, case.inputs(np.random.default_rng(1))


def evenly(graph: Graph, count: int) -> list[int | None]:
    """The layers in equal parts; operations go where they can."""
    total = sum(node.is_layer for node in graph.nodes)
    seen, stages = 0, []
    for node in graph.nodes:
        stages.append(min(seen * count // total, count - 1) if node.is_layer else None)
        seen += node.is_layer
    return stages


def state(model: keras.Model) -> dict[int, Any]:
    return {id(v): v.value for v in (*model.trainable_variables, *model.non_trainable_variables)}


def run_all(stages: Sequence[Stage], x: Any, training: bool) -> tuple[Any, dict[int, Any], list[Any]]:
    """Outputs, new state and losses. Each stage is given the variables that it owns or borrows, and no others."""
    model, boundary, losses = stages[0].graph.model, (), []
    values = state(model)
    for stage in stages:
        mine = {id(v) for v in (*stage.variables, *stage.borrows)}
        mapping = [(v, values[id(v)]) for v in model.variables if id(v) in mine]
        with keras.StatelessScope(mapping, collect_losses=True) as scope:
            boundary = run_stage(stage, boundary, x, training)
        values |= {id(v): scope.get_current_value(v) for v, _ in mapping}
        losses += scope.losses
    return boundary, values, losses


def reference(model: keras.Model, x: Any, training: bool) -> tuple[Any, list[Any]]:
    values = [v.value for v in model.trainable_variables], [v.value for v in model.non_trainable_variables]
    told = {"training": training} if model._call_has_training_arg else {}
    return model.stateless_call(*values, x, **told)


def equal(actual: Any, expected: Any) -> None:
    keras.tree.assert_same_structure(actual, expected)
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(np.asarray(a, "float64"), np.asarray(b, "float64"))


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("name", zoo.MODELS)
def test_stages_give_what_the_model_gives(name: str, training: bool) -> None:
    model, x = make(name)
    graph = graph_of(model, x, training)
    expected, updated = reference(model, x, training)
    most = min(4, sum(node.is_layer for node in graph.nodes))
    for count in {2, most}:
        stages = split(graph, evenly(graph, count))
        assert len(stages) == count
        actual, values, _ = run_all(stages, x, training)
        equal(actual, expected)
        equal([values[id(v)] for v in model.non_trainable_variables], updated)
        for a, b in zip(keras.tree.flatten(actual), keras.tree.flatten(expected), strict=True):
            masks = get_keras_mask(a), get_keras_mask(b)
            assert (masks[0] is None) == (masks[1] is None)
            equal(*masks)
