"""Models of KerasHub, unchanged: on replicas and in automatic stages they train as on one device."""

from __future__ import annotations

import functools
import re
from typing import Any

import openipu as ipu

import keras
import numpy as np
import pytest

import hub_models
import replication
from zoo import KERAS_WARNINGS

pytestmark = [
    pytest.mark.slow,
    KERAS_WARNINGS,
    # These models are far too small to be cut evenly.
    pytest.mark.filterwarnings("ignore:Stage . of model:UserWarning"),
    # KerasHub and the packages that it imports.
    pytest.mark.filterwarnings("ignore:Layer '.*' .* was passed an input with a mask:UserWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

BATCH, STEPS = 2, 4
ROWS = 2 * BATCH * STEPS
"""Two updates."""


def make(name: str, optimizer: Any, **settings: Any) -> keras.Model:
    case = hub_models.CASES[name]
    keras.utils.set_random_seed(3)
    model = case.make()
    loss = case.loss() if callable(case.loss) else case.loss
    model.compile(optimizer=optimizer, loss=loss, **settings)
    return model


def optimizer() -> keras.optimizers.Optimizer:
    return keras.optimizers.SGD(0.02, momentum=0.9)


def trained(name: str, model: keras.Model, batch: int) -> tuple[list[Any], dict[str, Any], list[Any]]:
    x, y = hub_models.CASES[name].data(ROWS, np.random.default_rng(5))
    history = model.fit(x, y, batch_size=batch, shuffle=False, verbose=0).history
    predicted = model.predict(x, batch_size=batch, verbose=0)
    return [v.numpy() for v in model.weights], history, keras.tree.flatten(predicted)


@functools.cache
def plain(name: str, strength: int, rows: int) -> tuple[list[Any], dict[str, Any], list[Any]]:
    """Plain Keras on one device, with gradients of the given strength, and micro-batches of `rows` if they matter."""
    model = make(name, replication.amplified(optimizer(), strength))
    if hub_models.CASES[name].mixes:
        replication.in_micro_batches(model, rows)
    return trained(name, model, BATCH * STEPS)


def configure(devices: int) -> None:
    config = ipu.config.IPUConfig()
    config.auto_select_ipus = devices
    config.configure_ipu_system()


def assert_same(actual: tuple[Any, Any, Any], expected: tuple[Any, Any, Any]) -> None:
    replication.assert_close(actual[0], expected[0])
    replication.assert_same_history(actual[1], expected[1])
    replication.assert_close(actual[2], expected[2], what="predictions")


@pytest.mark.parametrize("name", hub_models.CASES)
def test_two_replicas(name: str) -> None:
    configure(2)
    with ipu.ipu_strategy.IPUStrategy().scope():
        model = make(name, optimizer(), steps_per_execution=2)
    rows = BATCH * STEPS // 2
    assert_same(trained(name, model, rows), plain(name, 2, rows))


@pytest.mark.parametrize("stages", [2, 4])
@pytest.mark.parametrize("name", hub_models.CASES)
def test_automatic_stages(name: str, stages: int) -> None:
    configure(stages)
    with ipu.ipu_strategy.IPUStrategy().scope():
        model = make(name, optimizer(), steps_per_execution=2 * STEPS)
        x, _ = hub_models.CASES[name].data(BATCH, np.random.default_rng(5))
        model.set_pipeline_stage_assignment("auto", stages=stages, inputs=x, print_fn=None)
        model.set_pipelining_options(
            gradient_accumulation_steps_per_replica=STEPS,
            gradient_accumulation_reduction_method="mean",
            pipeline_schedule="GPipe",
        )
    assert_same(trained(name, model, BATCH), plain(name, 1, BATCH))


def test_the_encoder_of_a_vision_transformer_is_cut_into_even_stages() -> None:
    """It is one layer, which holds almost all of the cost: without looking inside, stages have 6, 94, 0 and 0 %."""
    from keras_hub import models

    lines: list[str] = []
    configure(4)
    with ipu.ipu_strategy.IPUStrategy().scope():
        backbone = models.ViTBackbone((32, 32, 3), 8, 8, 4, 64, 128, dropout_rate=0.0, attention_dropout=0.0)
        model = models.ViTImageClassifier(backbone=backbone, num_classes=3)
        image = np.zeros((2, 32, 32, 3), "float32")
        model.set_pipeline_stage_assignment("auto", stages=4, inputs=image, print_fn=lines.append)
    shares = [int(share) for share in re.findall(r"(\d+)% of the cost", "\n".join(lines))]
    assert len(shares) == 4
    assert max(shares) <= 35
