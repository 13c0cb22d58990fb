"""Estimators: the same numbers as `fit`, however they are run, interrupted, replicated and fed."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

import openipu as ipu
from openipu.estimator import (
    EstimatorSpec,
    IPUEstimator,
    ModeKeys,
    WarmStartSettings,
    get_global_step,
)

import keras
import numpy as np
import pytest

import zoo
from estimators import (
    X,
    Y,
    adam,
    assert_same,
    assert_same_weights,
    cross_entropy,
    estimator,
    layers,
    looped,
    model_fn,
    network,
    once,
    replicated,
    run_config,
    variables,
)

pytestmark = zoo.KERAS_WARNINGS


STEPS = 8
KILLS = int(os.environ.get("OPENIPU_KILLS", "10"))


@pytest.fixture(scope="module", autouse=True)
def configured():
    run_config().ipu_run_config.ipu_options.configure_ipu_system()


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """An estimator after 8 steps. Tests read it, and must not train it."""
    return estimator(tmp_path_factory.mktemp("trained")).train(looped(), steps=STEPS)


# --- the same numbers ------------------------------------------------------------------------------------------------


def test_training_equals_fit(trained):
    random.seed(5)
    keras.backend.clear_session()
    with ipu.ipu_strategy.IPUStrategy().scope():
        model = keras.Sequential(layers())
        model.compile(
            adam(), keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"],
            steps_per_execution=4,
        )  # fmt: skip
        model.fit(ipu.data.repeat(X, Y, batch_size=16), steps_per_epoch=STEPS, shuffle=False, verbose=0)
        expected = model.evaluate(X[:90], Y[:90], batch_size=16, verbose=0, return_dict=True)
    assert len(model.weights) == 4
    for weight in model.weights:
        value = trained.get_variable_value(weight.path.removeprefix(f"{model.name}/"))
        np.testing.assert_allclose(value, np.asarray(weight.value), rtol=0, atol=1e-6)
    result = trained.evaluate(once(rows=90))
    assert result["global_step"] == STEPS
    assert result["loss"] == pytest.approx(expected["loss"], abs=1e-6)
    assert result["accuracy"] == pytest.approx(expected["accuracy"], abs=1e-6)
    logits = np.stack([example["logits"] for example in trained.predict(once(rows=90))])
    np.testing.assert_allclose(logits, model.predict(X[:90], batch_size=16, verbose=0), rtol=0, atol=1e-6)


@pytest.mark.parametrize("replicas", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_replicas_equal_one(trained, tmp_path, replicas):
    several = estimator(tmp_path, replicas).train(looped(16 // replicas), steps=STEPS)
    assert_same_weights(several, trained)
    expected = trained.evaluate(once(rows=90))
    # 90 rows in batches of 8 or 4: the last ones do not reach all replicas, and the very last is smaller.
    result = several.evaluate(once(16 // replicas, rows=90))
    assert result == pytest.approx(expected, abs=1e-5)
    classes = [example["class"] for example in several.predict(once(16 // replicas, rows=90))]
    assert classes == [example["class"] for example in trained.predict(once(rows=90))]


@pytest.mark.parametrize("replicas", [1, 2])
def test_training_again_is_bit_identical(trained, tmp_path, replicas):
    """Stopped in the middle of a pass (6 batches of 16) and of everything else, with checkpoints in between."""
    parts = estimator(tmp_path / "parts", replicas, save_checkpoints_steps=4)
    parts.train(looped(16 // replicas), steps=4)
    random.seed(99)  # nothing in the process may matter
    again = estimator(tmp_path / "parts", replicas).train(looped(16 // replicas), max_steps=STEPS)
    whole = trained
    if replicas > 1:
        whole = estimator(tmp_path / "whole", replicas).train(looped(16 // replicas), steps=STEPS)
    assert_same(again, whole)


KILLED = """
import sys, time
sys.path.insert(0, sys.argv[2])
from estimators import estimator, looped
from openipu.estimator import SessionRunHook

class Slowly(SessionRunHook):
    def after_run(self, run_context, run_values):
        time.sleep(0.02)
        print(run_context.global_step, flush=True)

estimator(sys.argv[1], save_checkpoints_steps=4).train(looped(), hooks=[Slowly()], max_steps=400)
"""


@pytest.mark.slow
def test_killed_training_ends_with_the_same_bytes(tmp_path):
    """Killed without warning, also while saving, a training goes on from a whole checkpoint to the same end.

    Set OPENIPU_KILLS to the number of kills.
    """
    rng = random.Random(1)

    def run(folder, seconds):
        """Whether a training in `folder` ended before it was killed, so many seconds after its first execution."""
        command = [sys.executable, "-c", KILLED, str(folder), str(Path(__file__).parents[2] / "support")]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            process.stdout.readline()
            try:
                assert process.wait(seconds) == 0
            except subprocess.TimeoutExpired:
                process.kill()
                return False
            return True

    assert run(tmp_path / "whole", 300)
    ended = kills = 0
    while kills < KILLS:
        folder = tmp_path / f"killed-{ended}"
        if run(folder, rng.uniform(0.1, 1.0)):
            assert_same(estimator(folder), estimator(tmp_path / "whole"))
            ended += 1
        else:
            kills += 1
    assert ended, "training gets on between kills"


def test_gradient_accumulation_and_sharded_state(tmp_path):
    """Four micro-batches of 4 on each of two replicas are one update of 32."""

    def accumulating():
        return ipu.optimizers.CrossReplicaGradientAccumulationOptimizerV2(
            adam(), 4, replicated_optimizer_state_sharding=True, reduction_method="mean"
        )

    dense = {"net": lambda x: keras.layers.Dense(3)(x) * 1.0}
    big = estimator(tmp_path / "one", params=dense, iterations=2).train(looped(32), steps=4)
    small = estimator(tmp_path / "many", 2, optimizer=accumulating, params=dense, iterations=8)
    small.train(looped(4), steps=16)
    np.testing.assert_allclose(
        small.get_variable_value("dense/kernel"), big.get_variable_value("dense/kernel"), rtol=0, atol=1e-6
    )


def test_batch_normalization_trains_and_evaluates_by_mode(tmp_path):
    def normalized(x):
        return keras.layers.Dense(3)(keras.layers.BatchNormalization(momentum=0.5)(x))

    one = estimator(tmp_path, params={"net": normalized}).train(looped(), steps=4)
    expected = np.zeros(6)
    for begin in range(0, 64, 16):
        expected = 0.5 * expected + 0.5 * X[begin : begin + 16].mean(0)
    mean = one.get_variable_value("batch_normalization/moving_mean")
    np.testing.assert_allclose(mean, expected, rtol=0, atol=1e-6)
    one.evaluate(once())
    [first, *_] = one.predict(once(rows=16))
    [alone] = one.predict(once(batch=1, rows=1))
    np.testing.assert_allclose(first["logits"], alone["logits"], rtol=0, atol=1e-6)


def test_keras_models_and_losses_inside_model_fn(tmp_path):
    """A functional model with a regularizer, a scaled loss, and the global step as a number in the loss."""

    def fn(features, labels, mode):
        inputs = keras.Input((6,))
        outputs = keras.layers.Dense(3, kernel_regularizer=keras.regularizers.L2(0.1))(inputs)
        model = keras.Model(inputs, keras.Sequential([keras.layers.Dense(3)])(outputs))
        logits = model(features)
        loss = cross_entropy(labels, logits) + sum(model.losses)
        step = keras.ops.cast(get_global_step(), "float32")
        optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1))
        op = optimizer.minimize(loss) if mode == ModeKeys.TRAIN else None
        metrics = {"step": step, "penalty": sum(model.losses)}
        return EstimatorSpec(mode, loss=loss, train_op=op, eval_metric_ops=metrics)

    one = IPUEstimator(fn, tmp_path, run_config()).train(looped(), steps=8)
    result = one.evaluate(once())
    kernel = one.get_variable_value("dense/kernel")
    assert result["step"] == 8
    assert result["penalty"] == pytest.approx(0.1 * np.square(kernel).sum(), rel=1e-5)
    plain = cross_entropy(Y, X @ kernel @ one.get_variable_value("sequential/dense_1/kernel"))
    assert result["loss"] == pytest.approx(float(plain) + result["penalty"], abs=0.3)


@pytest.mark.parametrize("make", [keras.optimizers.Nadam, keras.optimizers.Adafactor], ids=lambda make: make.__name__)
def test_optimizers_that_make_variables_without_a_name_scope(tmp_path, make):
    """As in `fit`: what they keep in such variables begins anew in each step."""
    with ipu.ipu_strategy.IPUStrategy().scope():
        model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(3, kernel_initializer="ones")])
    model.compile(make(0.01), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    model.fit(ipu.data.repeat(X, Y, batch_size=16), steps_per_epoch=STEPS, shuffle=False, verbose=0)
    params = {"net": lambda x: keras.layers.Dense(3, kernel_initializer="ones")(x)}  # noqa: PLW0108 - a new one each time
    for steps in (STEPS // 2, STEPS):
        found = estimator(tmp_path, optimizer=lambda: make(0.01), params=params).train(looped(), max_steps=steps)
    np.testing.assert_allclose(found.get_variable_value("dense/kernel"), model.layers[0].kernel.numpy(), atol=1e-6)


@pytest.mark.parametrize("wrap", [lambda o: o, lambda o: keras.optimizers.LossScaleOptimizer(o, initial_scale=1.0)])
def test_another_learning_rate_counts_when_training_goes_on(tmp_path, wrap):
    def goes_on(rate):
        net = {"net": lambda x: keras.layers.Dense(3)(x) * 1.0}
        return estimator(tmp_path, optimizer=lambda: wrap(keras.optimizers.SGD(rate)), params=net)

    def kernel():
        return goes_on(0.0).get_variable_value("dense/kernel")

    goes_on(0.5).train(looped(), steps=4)
    before = kernel()
    goes_on(0.0).train(looped(), steps=4)
    np.testing.assert_array_equal(kernel(), before)
    goes_on(0.0).train(looped(), steps=4)  # the checkpoint knows which rate it has now
    goes_on(0.5).train(looped(), steps=4)
    assert np.abs(kernel() - before).max() > 0.01


def test_a_learning_rate_that_model_fn_halves_in_each_step_goes_on(tmp_path):
    def fn(features, labels, mode):
        loss = cross_entropy(labels, keras.layers.Dense(3)(features))
        optimizer = keras.optimizers.SGD(0.5)
        optimizer.learning_rate = optimizer.learning_rate * 0.5
        return EstimatorSpec(mode, loss=loss, train_op=optimizer.minimize(loss))

    for steps in (4, 4):
        parts = IPUEstimator(fn, tmp_path / "parts", run_config()).train(looped(), steps=steps)
    assert_same(parts, IPUEstimator(fn, tmp_path / "whole", run_config()).train(looped(), steps=8))


@pytest.mark.slow
@pytest.mark.parametrize("replicas", [1, 2])
def test_model_fn_computes_the_learning_rate(tmp_path, replicas):
    """As if the optimizer had a schedule."""

    def fn(features, labels, mode, params):
        loss = cross_entropy(labels, keras.layers.Dense(3)(keras.layers.Dense(4)(features)))
        decay = keras.optimizers.schedules.ExponentialDecay(0.5, 2, 0.5)
        optimizer = keras.optimizers.SGD(0.1 if params["own"] else decay)
        if params["own"]:
            optimizer.learning_rate = decay(get_global_step())
        return EstimatorSpec(mode, loss=loss, train_op=ipu.optimizers.CrossReplicaOptimizer(optimizer).minimize(loss))

    own, scheduled = (
        IPUEstimator(fn, tmp_path / str(own), run_config(replicas), {"own": own}).train(looped(), steps=8)
        for own in (True, False)
    )
    assert_same_weights(own, scheduled)


# --- data ------------------------------------------------------------------------------------------------------------


def as_tf_data():
    tf = pytest.importorskip("tensorflow")
    return tf.data.Dataset.from_tensor_slices((X, Y)).batch(16)


def as_grain():
    grain = pytest.importorskip("grain")
    return grain.MapDataset.source([(x, y) for x, y in zip(X, Y, strict=True)]).batch(16)


def as_generator():
    return once()()


def as_list():
    return list(once()())


@pytest.mark.parametrize("source", [as_tf_data, as_grain, as_generator, as_list])
def test_every_source_and_its_end(trained, tmp_path, source):
    """6 batches: training ends with them, and the next call begins with the first; after 8 steps in all, as `trained`.

    The first part stops in the middle of the data, so its position counts.
    """
    one = estimator(tmp_path, iterations=2)
    one.train(source, steps=4)
    one.train(source, steps=8)
    assert variables(one)["global_step"] == 6
    one.train(source, steps=2)
    assert_same_weights(one, trained)


def test_features_alone_and_dicts(tmp_path):
    def fn(features, mode):
        logits = keras.layers.Dense(3)(features["x"])
        loss = cross_entropy(features["y"], logits)
        op = adam().minimize(loss) if mode == ModeKeys.TRAIN else None
        return EstimatorSpec(mode, loss=loss, train_op=op, predictions=logits)

    def batches():
        for _ in range(4):
            yield {"x": X[:16].astype("float64"), "y": Y[:16].astype("int64")}

    one = IPUEstimator(fn, tmp_path, run_config()).train(batches, steps=4)
    assert len(list(one.predict(batches, num_predictions=20))) == 20
    blocks = list(one.predict(batches, yield_single_examples=False))
    assert [block.shape for block in blocks] == [(64, 3)]


def test_global_batch_sizes_and_what_functions_are_given(tmp_path):
    seen = []

    def input_fn(mode, params, config, input_context):
        seen.append(
            (mode, params["batch_size"], config.ipu_run_config.num_replicas, input_context.num_replicas_in_sync)
        )
        return ipu.data.repeat(X, Y, batch_size=params["batch_size"])

    def fn(features, labels, mode, params, config):
        assert features.shape[0] == params["batch_size"]
        assert config.tf_random_seed == 5
        return model_fn(features, labels, mode, params)

    params = {"optimizer": replicated()}
    one = IPUEstimator(fn, tmp_path, run_config(2), params, train_batch_size=32, eval_batch_size=8)
    one.train(input_fn, steps=4)
    one.evaluate(input_fn, steps=4)
    assert seen == [("train", 16, 2, 2), ("eval", 4, 2, 2)]
    assert params.keys() == {"optimizer"}


# --- programs and state ----------------------------------------------------------------------------------------------


def test_one_program_per_mode_and_few_traces(tmp_path):
    calls = []

    def fn(features, labels, mode, params):
        calls.append(mode)
        return model_fn(features, labels, mode, params)

    one = estimator(tmp_path, function=fn)
    for _ in range(2):
        one.train(looped(), steps=8)
        one.evaluate(once(rows=64))
        assert len(list(one.predict(once(rows=64), predict_keys="class"))) == 64
    # In training once more, to see that all variables have a gradient.
    assert {mode: calls.count(mode) for mode in calls} == {"train": 3, "eval": 2, "infer": 2}
    assert [len(program.loop.programs) for program in one._core._programs.values()] == [1, 1, 1]


def test_tracing_leaves_keras_as_it_was(trained):
    before = keras.layers.Dense(1).name
    state = random.getstate()
    trained.evaluate(once(4, rows=8))
    assert random.getstate() == state, "a mode that is traced with a seed of its own draws none"
    number = int(before.rpartition("_")[2]) if "_" in before else 0
    assert keras.layers.Dense(1).name == f"dense_{number + 1}"
    assert not hasattr(keras.optimizers.Optimizer, "minimize")
    assert float(keras.Variable(2.0).value) == 2.0
    layer = keras.layers.Dropout(0.5)
    np.testing.assert_array_equal(layer(np.ones(9)), np.ones(9))


def test_warm_start_and_variables(trained, tmp_path):
    settings = WarmStartSettings(trained.model_dir, "dense/")
    params = {"optimizer": adam}
    one = IPUEstimator(model_fn, tmp_path / "a", run_config(), params, warm_start_from=settings)
    one.train(looped(), steps=4)
    assert variables(one)["global_step"] == 4
    for names in (["dense/kernel", "^dense/b"], ("dense/.*",)):
        settings = WarmStartSettings(trained.model_dir, names)
        other = IPUEstimator(model_fn, tmp_path / str(len(names)), run_config(), params, warm_start_from=settings)
        assert_same(other.train(looped(), steps=4), one)
    all_of_it = IPUEstimator(model_fn, tmp_path / "b", run_config(), params, warm_start_from=trained.model_dir)
    assert all_of_it.evaluate(once())["loss"] == pytest.approx(trained.evaluate(once())["loss"], abs=1e-6)
    assert one.latest_checkpoint() == str(tmp_path / "a" / "checkpoints" / "4")
    assert one.get_variable_value("global_step") == 4
    assert "dense/kernel" in one.get_variable_names()
    with pytest.raises(ValueError, match="There is no variable 'dense_9/kernel'"):
        one.get_variable_value("dense_9/kernel")


def test_modes_may_leave_out_dropout(tmp_path):
    """A layer without weights may be there in training only."""

    def fn(features, labels, mode, params):
        params = {**params, "net": network if mode == ModeKeys.TRAIN else plain}
        return model_fn(features, labels, mode, params)

    def plain(features):
        first, _, last = layers()
        return last(first(features))

    one = estimator(tmp_path, function=fn).train(looped(), steps=4)
    same = estimator(tmp_path)
    assert one.evaluate(once()) == same.evaluate(once())


@pytest.mark.parametrize("replicas", [1, 2])
def test_model_fn_sees_the_number_of_every_step(tmp_path, replicas):
    """Also inside an execution, and after training has gone on from a checkpoint."""

    def fn(features, labels, mode):
        weight = keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")
        loss = -keras.ops.mean(weight(keras.ops.ones((1, 1)))) * keras.ops.cast(get_global_step(), "float32")
        loss = loss + 0 * keras.ops.sum(features) + 0 * keras.ops.cast(keras.ops.sum(labels), "float32")
        optimizer = ipu.optimizers.CrossReplicaOptimizer(keras.optimizers.SGD(1.0))
        return EstimatorSpec(mode, loss=loss, train_op=optimizer.minimize(loss))

    one = IPUEstimator(fn, tmp_path, run_config(replicas, iterations=4))
    for _ in range(2):
        one.train(looped(), steps=8)
    assert one.get_variable_value("dense/kernel") == sum(range(16))
