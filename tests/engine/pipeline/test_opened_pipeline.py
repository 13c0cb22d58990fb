"""Pipelines that cut inside layers train, evaluate and predict as one device does."""

from __future__ import annotations

import dataclasses
from typing import Any

import openipu as ipu
from openipu.engine.core.options import Opening
from openipu.engine.keras_compat.api import all_layers
from openipu.engine.pipeline.partition.graph import graph_of
from openipu.engine.pipeline.partition.opened_layer import has_parts

import keras
import numpy as np
import pytest

import composite_zoo as composites
import replication
from stage_runs import evenly
from zoo import KERAS_WARNINGS, policy

pytestmark = KERAS_WARNINGS

BATCH, STEPS = 4, 6
ROWS = 2 * BATCH * STEPS + BATCH + 3
"""Two full updates, a full micro-batch and a partial one."""
DEFAULT = ("own_weight", "losses")
ONE_DEVICE = ("losses", "shared_losses", "shared_norm")
"""Layers with state are called in several stages, so these have to share a device."""


def data(name: str) -> tuple[Any, Any]:
    case, rng = composites.MODELS[name], np.random.default_rng(2)
    x = np.concatenate([case.inputs(rng) for _ in range(-(-ROWS // BATCH))])[:ROWS]
    shape = case.make().output_shape if name != "subclassed" else (None, 4, 3)
    return x, rng.normal(size=(ROWS, *shape[1:])).astype("float32")


def made(name: str) -> keras.Model:
    keras.utils.set_random_seed(11)
    with policy(composites.MODELS[name].policy):
        return composites.MODELS[name].make()


def cut_inside(model: Any, x: Any, stages: int) -> None:
    """Equal numbers of layers for each stage, looking into everything that is not a layer of Keras."""
    ours = (i for i, la in enumerate(all_layers(model)) if has_parts(la) and type(la).__module__ == "composite_zoo")
    opening = Opening(tuple(ours), ((x.shape, str(x.dtype)),))
    graph = graph_of(model, x, True, opening)
    layers = ((node, stage) for node, stage in zip(graph.nodes, evenly(graph, stages), strict=True) if node.is_layer)
    table = tuple((node.operation.name, stage) for node, stage in layers)
    session = model._ipu_session
    session.set_options(dataclasses.replace(session.options, stages=table, opening=opening))


def trained(model: keras.Model, x: Any, y: Any, batch: int) -> Any:
    history = model.fit(x, y, batch_size=batch, epochs=2, shuffle=False, verbose=0).history
    weights = [v.numpy() for v in model.variables]
    evaluated = model.evaluate(x, y, batch_size=BATCH, verbose=0, return_dict=True)
    return weights, history, evaluated, model.predict(x, batch_size=BATCH, verbose=0)


NAMES = [name for name in composites.MODELS if "mixed" not in name]


@pytest.mark.parametrize("name", [n if n in DEFAULT else pytest.param(n, marks=pytest.mark.slow) for n in NAMES])
def test_equals_one_device(name: str) -> None:
    x, y = data(name)
    config = ipu.config.IPUConfig()
    config.auto_select_ipus = 1 if name in ONE_DEVICE else 3
    config.configure_ipu_system()
    with ipu.ipu_strategy.IPUStrategy().scope():
        model = made(name)
        cut_inside(model, x[:BATCH], 3)
        model.set_pipelining_options(
            gradient_accumulation_steps_per_replica=STEPS, gradient_accumulation_reduction_method="mean",
            pipeline_schedule="GPipe", device_mapping=[0, 0, 0] if name in ONE_DEVICE else None,
        )  # fmt: skip
        model.compile(keras.optimizers.SGD(0.005, 0.9), "mse", steps_per_execution=STEPS)
    weights, history, evaluated, predicted = trained(model, x, y, BATCH)
    plain = made(name)
    # Batch statistics, random numbers and the losses of layers depend on the micro-batches.
    plain.compile(keras.optimizers.SGD(0.005, 0.9), "mse")
    replication.in_micro_batches(plain, BATCH)
    expected = trained(plain, x, y, BATCH * STEPS)
    replication.assert_close(weights, expected[0])
    replication.assert_same_history(history, expected[1])
    replication.assert_same_history(evaluated, expected[2])
    replication.assert_close([predicted], [expected[3]], what="predictions")
