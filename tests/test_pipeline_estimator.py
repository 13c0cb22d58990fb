"""Pipelined estimators: the numbers of an `IPUEstimator` on one device, for every schedule, cut and number of replicas."""

from __future__ import annotations

import logging
from typing import Any

import openipu as ipu
from openipu.estimator import (
    EvalSpec,
    IPUEstimator,
    IPULoggingTensorHook,
    IPUPipelineEstimator,
    IPUPipelineEstimatorSpec,
    IPURunConfig,
    LoggingMode,
    ModeKeys,
    RunConfig,
    SessionRunArgs,
    SessionRunHook,
    TrainSpec,
    get_global_step,
    train_and_evaluate,
)
from openipu.ops.pipelining_ops import OptimizerFunctionOutput, PipelineSchedule

import keras
import numpy as np
import pytest

import zoo
from estimators import X, Y, adam, assert_same, cross_entropy, estimator, looped, model_fn, once, run_config, variables

pytestmark = zoo.KERAS_WARNINGS

SYSTEMS = (1, 2, 4)
COUNT = 4
STEPS = 16


def parts():
    """The network of the other estimator's tests, with statistics and random numbers in different stages."""
    return [
        keras.layers.Dense(8, activation="relu"),
        keras.layers.Dropout(0.25),
        keras.layers.BatchNormalization(momentum=0.5),
        keras.layers.Dense(5, activation="tanh"),
        keras.layers.Dropout(0.25),
        keras.layers.Dense(3),
    ]


def whole(features):
    for layer in parts():
        features = layer(features)
    return features


def staged_fn(mode, params):
    """`params`: where to `cut` the layers, which `optimizer` to make, and arguments of the spec."""
    layers = parts()
    cuts = [0, *params.get("cuts", (3,)), len(layers)]

    def stage(begin, end):
        def run(x, labels=None):
            for layer in layers[begin:end]:
                x = layer(x)
            if end < len(layers):
                return x, labels
            if mode == ModeKeys.PREDICT:
                return {"logits": x, "class": keras.ops.argmax(x, axis=-1)}
            return cross_entropy(labels, x), x, labels

        return run

    def optimizer_function(loss, *_):
        return OptimizerFunctionOutput(params.get("optimizer", adam)(), loss)

    stages = [stage(begin, end) for begin, end in zip(cuts, cuts[1:], strict=False)]
    return IPUPipelineEstimatorSpec(
        mode,
        stages,
        **{
            "gradient_accumulation_count": COUNT,
            "optimizer_function": optimizer_function,
            "eval_metrics_fn": on_host,
            "reduction_method": "mean",
        }
        | params.get("spec", {}),
    )


def on_host(loss, logits, labels):
    accuracy = keras.metrics.SparseCategoricalAccuracy()
    accuracy.update_state(labels, logits)
    return {"loss": np.mean(loss), "accuracy": accuracy, "rows": len(labels)}


def averaged():
    return ipu.optimizers.CrossReplicaOptimizer(adam())


def config(shards: int = 2, replicas: int = 1, iterations: int = 2 * COUNT, **settings: Any) -> RunConfig:
    options = ipu.config.IPUConfig()
    options.auto_select_ipus = list(SYSTEMS)
    ipu_config = IPURunConfig(iterations, options, replicas, shards, SYSTEMS.index(shards * replicas))
    return RunConfig(ipu_config, **{"tf_random_seed": 5, "save_summary_steps": None, **settings})


def pipelined(folder: Any, shards: int = 2, replicas: int = 1, function: Any = staged_fn, **settings: Any) -> Any:
    params = {"optimizer": averaged if replicas > 1 else adam, **settings.pop("params", {})}
    return IPUPipelineEstimator(function, folder, config(shards, replicas, **settings), params)


@pytest.fixture(scope="module", autouse=True)
def configured():
    run_config().ipu_run_config.ipu_options.configure_ipu_system()


@pytest.fixture(scope="module")
def single(tmp_path_factory):
    """An `IPUEstimator` on one device after the same updates. Tests read it, and must not train it."""

    def accumulating():
        return ipu.optimizers.GradientAccumulationOptimizerV2(adam(), COUNT, reduction_method="mean")

    folder = tmp_path_factory.mktemp("single")
    one = estimator(folder, optimizer=accumulating, params={"net": whole}, iterations=2 * COUNT)
    return one.train(looped(8), steps=STEPS)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A pipeline of two stages after the same updates. Tests read it, and must not train it."""
    return pipelined(tmp_path_factory.mktemp("trained")).train(looped(8), steps=STEPS)


# --- the same numbers ------------------------------------------------------------------------------------------------


def test_a_pipeline_equals_one_device(single, trained):
    """Weights, moving statistics, seeds, the optimizer's state, the position: everything that is saved."""
    assert_same(trained, single, 1e-5)
    expected = single.evaluate(once(8, rows=90))
    result = trained.evaluate(once(8, rows=90))
    assert result["global_step"] == STEPS
    assert result["rows"] == 90
    assert result["accuracy"] == pytest.approx(expected["accuracy"], abs=1e-6)
    classes = [example["class"] for example in trained.predict(once(8, rows=90))]
    assert classes == [example["class"] for example in single.predict(once(8, rows=90))]


@pytest.mark.parametrize(
    ("shards", "replicas", "cuts", "spec"),
    [
        (2, 1, (3,), {"pipeline_schedule": PipelineSchedule.Sequential}),
        (2, 2, (3,), {"pipeline_schedule": "OneFOneB"}),
        (1, 2, (1, 3), {"pipeline_schedule": "Sequential", "device_mapping": [0, 0, 0]}),
        pytest.param(4, 1, (1, 3, 5), {"pipeline_schedule": "Interleaved"}, marks=pytest.mark.slow),
        pytest.param(4, 1, (1, 3), {"pipeline_schedule": "GPipe"}, marks=pytest.mark.slow),
        pytest.param(2, 2, (3,), {"replicated_optimizer_state_sharding": True}, marks=pytest.mark.slow),
    ],
)
def test_every_way_to_run_gives_the_same(single, tmp_path, shards, replicas, cuts, spec):
    params = {"cuts": cuts, "spec": spec}
    several = pipelined(tmp_path, shards, replicas, params=params).train(looped(8 // replicas), steps=STEPS)
    mine, theirs = variables(several), variables(single)
    for name, value in theirs.items():
        if name != "batches" and "moving_variance" not in name:  # the variance of half a batch is another one
            np.testing.assert_allclose(mine[name], value, rtol=0, atol=1e-5, err_msg=name)
