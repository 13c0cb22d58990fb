"""`IPUEstimator` with `num_shards`: the model is cut by itself, and gives the numbers of one device."""

from __future__ import annotations

import logging
from typing import Any

import openipu as ipu
from openipu.estimator import (
    EstimatorSpec,
    IPUEstimator,
    IPUEstimatorSpec,
    IPULoggingTensorHook,
    IPURunConfig,
    LoggingMode,
    ModeKeys,
    RunConfig,
    get_global_step,
    group,
)

import keras
import numpy as np
import pytest

import zoo
from estimators import (
    SYSTEMS,
    Y,
    adam,
    assert_same,
    cross_entropy,
    looped,
    model_fn,
    once,
    replicated,
    run_config,
    variables,
)

pytestmark = zoo.KERAS_WARNINGS
STEPS = 8


@pytest.fixture(scope="module", autouse=True)
def configured():
    run_config().ipu_run_config.ipu_options.configure_ipu_system()


def tangled(features):
    """Layers that skip others, use weights twice, keep statistics and draw random numbers."""
    x = keras.layers.Dense(6, activation="relu")(features)
    x = keras.layers.Dropout(0.25)(x)
    twice = keras.layers.Dense(6, activation="tanh")
    x = keras.layers.BatchNormalization(momentum=0.5)(twice(x) + features)
    x = keras.layers.Dense(6)(x) + 0.1 * twice(features)
    return keras.layers.Dense(3)(keras.layers.Dropout(0.25)(x))


def plain(features):
    """Without statistics, which are others for half a batch."""
    x = keras.layers.Dense(6, activation="relu")(features)
    x = keras.layers.Dropout(0.25)(x)
    return keras.layers.Dense(3)(keras.layers.Dense(5, activation="tanh")(x))


def sharded(folder: Any, shards: int, replicas: int = 1, function: Any = model_fn, **settings: Any) -> IPUEstimator:
    options = ipu.config.IPUConfig()
    options.auto_select_ipus = list(SYSTEMS)
    params = {"optimizer": replicated() if replicas > 1 else adam, "net": tangled, **settings.pop("params", {})}
    ipu_config = IPURunConfig(
        settings.pop("iterations", 4),
        options,
        replicas,
        shards,
        SYSTEMS.index(shards * replicas),
        autosharding=shards > 1,
    )
    config = RunConfig(ipu_config, **{"tf_random_seed": 5, "save_summary_steps": None, **settings})
    return IPUEstimator(function, folder, config, params)


@pytest.fixture(scope="module")
def single(tmp_path_factory):
    """One device after 12 micro-batches, the last of 2 rows. Tests read it, and must not train it."""
    return sharded(tmp_path_factory.mktemp("single"), 1).train(once(8, rows=90), steps=16)


@pytest.mark.parametrize("shards", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_shards_equal_one_device(single, tmp_path, caplog, shards):
    """Also at the end of the data, in evaluation, in prediction, and when training goes on from a checkpoint."""
    with caplog.at_level(logging.INFO, "openipu"):
        sharded(tmp_path, shards).train(once(8, rows=90), steps=8)
    assert f"model_fn is cut into {shards} parts, which begin with 'dense" in caplog.text
    several = sharded(tmp_path, shards).train(once(8, rows=90), steps=8)
    assert variables(several)["global_step"] == 12
    assert_same(several, single, 1e-5)
    assert several.evaluate(once(8, rows=90)) == pytest.approx(single.evaluate(once(8, rows=90)), abs=1e-5)
    logits = [[example["logits"] for example in e.predict(once(8, rows=90))] for e in (several, single)]
    np.testing.assert_allclose(*logits, rtol=0, atol=1e-5)


def test_shards_of_replicas_with_accumulation(tmp_path):
    """Two replicas of two devices, 2 micro-batches of 4 in an update: one device with batches of 16."""

    def accumulating():
        optimizer = ipu.optimizers.CrossReplicaGradientAccumulationOptimizerV2
        return optimizer(adam(), 2, reduction_method="mean", replicated_optimizer_state_sharding=True)

    def without_dropout(x):
        return keras.layers.Dense(3)(keras.layers.Dense(5, activation="tanh")(x))

    params = {"net": without_dropout}
    many = sharded(tmp_path / "many", 2, 2, params=params | {"optimizer": accumulating}).train(looped(4), steps=STEPS)
    one = sharded(tmp_path / "one", 1, params=params).train(looped(16), steps=4)
    for name in ("dense/kernel", "dense_1/bias", "adam/iteration", "adam/dense_kernel_velocity"):
        np.testing.assert_allclose(variables(many)[name], variables(one)[name], rtol=0, atol=1e-5, err_msg=name)


@pytest.mark.slow
def test_dropout_of_replicas_is_that_of_one(tmp_path):
    many = sharded(tmp_path / "many", 2, 2, params={"net": plain}).train(looped(4), steps=STEPS)
    one = sharded(tmp_path / "one", 1, params={"net": plain}).train(looped(8), steps=STEPS)
    for name in ("dense/kernel", "dense_1/bias", "dense_2/kernel"):
        np.testing.assert_allclose(variables(many)[name], variables(one)[name], rtol=0, atol=1e-5, err_msg=name)


@pytest.mark.slow
def test_tensors_and_metrics_of_shards(tmp_path):
    """What hooks log, the global step, and metrics on the host."""
    texts = []

    def fn(features, labels, mode, params):
        del params
        logits = plain(features)
        loss = cross_entropy(labels, logits)
        if mode == ModeKeys.EVAL:
            return IPUEstimatorSpec(
                mode, loss=loss, eval_metrics=(lambda y, z: {"rows": len(y) + len(z)}, [labels, logits])
            )
        hook = IPULoggingTensorHook(
            every_n_iter=1, formatter=lambda v: str(texts.append(v)), logging_mode=LoggingMode.ALL
        )
        op = group(adam().minimize(loss), hook.log({"step": get_global_step(), "labels": labels}))
        return EstimatorSpec(mode, loss=loss, train_op=op, training_hooks=[hook])

    two = sharded(tmp_path, 2, function=fn).train(looped(8), steps=STEPS)
    np.testing.assert_array_equal([text["step"] for text in texts], np.arange(8).reshape(2, 4))
    np.testing.assert_array_equal(texts[0]["labels"].reshape(-1), Y[:32])
    assert two.evaluate(once(8, rows=90))["rows"] == 180


def test_a_learning_rate_of_each_step_is_refused(tmp_path):
    def fn(features, labels, mode, params):
        del params
        loss, optimizer = cross_entropy(labels, plain(features)), adam()
        optimizer.learning_rate = 0.1 / (1 + get_global_step())
        return EstimatorSpec(mode, loss=loss, train_op=optimizer.minimize(loss))

    with pytest.raises(
        NotImplementedError, match="learning rate in each step, which is not possible with `num_shards`"
    ):
        sharded(tmp_path, 2, function=fn).train(looped(8), steps=STEPS)


def test_more_shards_than_places_to_cut(tmp_path):
    with pytest.raises(
        ValueError, match="`num_shards` is 4, but the number of places where the model can be cut is 1:"
    ):
        sharded(tmp_path, 4, params={"net": lambda x: keras.layers.Dense(3)(keras.layers.Dense(4)(x))}).train(
            looped(8), steps=4
        )


def test_state_that_is_used_from_beginning_to_end(tmp_path):
    """One seed for all random numbers cannot be on two devices."""

    def net(x):
        noise = keras.layers.GaussianNoise(0.1)
        return noise(keras.layers.Dense(3)(keras.layers.Dense(4)(noise(x))))

    with pytest.raises(ValueError, match="where the model can be cut is 0:"):
        sharded(tmp_path, 2, params={"net": net}).train(looped(8), steps=4)


def test_outfeeds_are_refused(tmp_path):
    outfeed = ipu.ipu_outfeed_queue.IPUOutfeedQueue()

    def net(x):
        outfeed.enqueue(x)
        return keras.layers.Dense(3)(keras.layers.Dense(4)(x))

    with pytest.raises(RuntimeError, match=r"`num_shards` cuts it into parts. Use `IPULoggingTensorHook`"):
        sharded(tmp_path, 2, params={"net": net}).train(looped(8), steps=4)
