"""Runs the stages of a model one after another, to compare them with the model in one piece."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import openipu  # noqa: F401 - chooses Keras' backend
from openipu.engine.keras_compat.api import get_keras_mask
from openipu.engine.pipeline.partition.nodes import Graph
from openipu.engine.pipeline.partition.split import Stage, run_stage

import jax
import keras
import numpy as np

from zoo import policy


def made(case: Any) -> tuple[keras.Model, Any]:
    """The model of a case, with the same weights each time, and inputs for it."""
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


class Result(NamedTuple):
    """What a step leaves behind."""

    outputs: Any
    masks: list[Any]
    state: list[Any]
    loss: Any


def result(outputs: Any, state: list[Any], losses: list[Any]) -> Result:
    return Result(outputs, [get_keras_mask(leaf) for leaf in keras.tree.flatten(outputs)], state, sum(losses))


def run_all(stages: Sequence[Stage], x: Any, training: bool) -> Result:
    """Each stage is given the variables that it owns or borrows, and no others. Seeds are its own."""
    model, boundary, losses = stages[0].graph.model, (), []
    start = {id(v): v.value for v in model.variables}
    values = dict(start)
    for stage in stages:
        mine = {id(v) for v in (*stage.variables, *stage.borrows)}
        known = values | {id(v): start[id(v)] for v in model.variables if v.dtype == "uint32"}
        mapping = [(v, known[id(v)]) for v in model.variables if id(v) in mine]
        with keras.StatelessScope(mapping, collect_losses=True) as scope:
            boundary = run_stage(stage, boundary, x, training)
        values |= {id(v): scope.get_current_value(v) for v, _ in mapping}
        losses += [*scope.losses, *(v.regularizer(v) for v in stage.variables if getattr(v, "regularizer", None))]
    return result(boundary, [values[id(v)] for v in model.non_trainable_variables], losses)


def reference(model: keras.Model, x: Any, training: bool) -> Result:
    values = [v.value for v in model.trainable_variables], [v.value for v in model.non_trainable_variables]
    told = {"training": training} if model._call_has_training_arg else {}
    return result(*model.stateless_call(*values, x, return_losses=True, **told))


def equal(actual: Any, expected: Any) -> None:
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(np.asarray(a, "float64"), np.asarray(b, "float64"))
