"""Estimators: the same numbers as `fit`, however they are run, interrupted, replicated and fed."""

from __future__ import annotations

import logging
import random
import subprocess
import sys
import time
from pathlib import Path

import openipu as ipu
from openipu.estimator import (
    CheckpointSaverListener,
    EstimatorSpec,
    EvalSpec,
    IPUEstimator,
    IPUEstimatorSpec,
    IPULoggingTensorHook,
    IPURunConfig,
    LoggingMode,
    ModeKeys,
    RunConfig,
    SessionRunArgs,
    SessionRunHook,
    TrainSpec,
    WarmStartSettings,
    get_global_step,
    group,
    train_and_evaluate,
)

import keras
import numpy as np
import pytest

import zoo
from estimators import (
    SYSTEMS,
    X,
    Y,
    adam,
    assert_same,
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


def assert_same_weights(actual, expected, tolerance=1e-6):
    mine, theirs = variables(actual), variables(expected)
    for name in ("dense/kernel", "dense/bias", "dense_1/kernel", "dense_1/bias", "global_step"):
        np.testing.assert_allclose(mine[name], theirs[name], rtol=0, atol=tolerance, err_msg=name)


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
    """Killed without warning, also while saving, a training goes on from a whole checkpoint to the same end."""
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
    while kills < 50:
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


# --- metrics ---------------------------------------------------------------------------------------------------------


def test_metrics_that_are_no_means_over_replicas(tmp_path):
    """AUC and the root of a mean square, on the device and on the host, equal those over all rows at once."""

    def fn(features, labels, mode, params):
        score = keras.layers.Dense(1, activation="sigmoid", kernel_initializer="ones")(features)[:, 0]
        truth = keras.ops.cast(labels == 0, "float32")
        loss = keras.ops.mean(keras.ops.square(score - truth))
        if params["host"]:
            return IPUEstimatorSpec(mode, loss=loss, eval_metrics=(on_host, {"truth": truth, "score": score}))
        rmse = keras.metrics.RootMeanSquaredError()
        rmse.update_state(truth, score)
        metrics = {"rmse": rmse, "auc": (keras.metrics.AUC(num_thresholds=50), truth, score)}
        return IPUEstimatorSpec(mode, loss=loss, eval_metric_ops=metrics)

    def area(truth, score):
        auc = keras.metrics.AUC(num_thresholds=50)
        auc.update_state(truth, score)
        return auc

    def on_host(truth, score):
        return {"rmse": (keras.metrics.RootMeanSquaredError(), truth, score), "auc": area(truth, score)}

    score = 1 / (1 + np.exp(-X[:90].sum(1)))
    truth = (Y[:90] == 0).astype("float32")
    expected = {"rmse": np.sqrt(np.mean(np.square(truth - score))), "auc": float(area(truth, score).result())}
    for host in (False, True):
        result = IPUEstimator(fn, tmp_path, run_config(2), {"host": host}).evaluate(once(8, rows=90))
        assert {name: result[name] for name in expected} == pytest.approx(expected, abs=1e-5)
        assert result["loss"] == pytest.approx(expected["rmse"] ** 2, abs=1e-5)
        assert result["global_step"] == 0


# --- hooks, logs, summaries ------------------------------------------------------------------------------------------


class Recorder(SessionRunHook):
    def __init__(self, stop_at=None):
        self.events, self.losses, self._stop_at = [], [], stop_at

    def begin(self):
        self.events.append("begin")

    def after_create_session(self, session, coord):
        assert coord is None
        self.events.append(f"created at {session.global_step}")

    def before_run(self, run_context):
        self.events.append(f"before {run_context.global_step}")
        return SessionRunArgs({"l": "loss", "s": ["global_step"]})

    def after_run(self, run_context, run_values):
        self.events.append(f"after {run_values.results['s'][0]}")
        self.losses.append(float(run_values.results["l"]))
        if run_context.global_step == self._stop_at:
            run_context.request_stop()

    def end(self, session):
        self.events.append(f"end at {session.global_step}")


class Listener(CheckpointSaverListener):
    def __init__(self):
        self.events = []

    def before_save(self, session, global_step_value):
        assert session.global_step == global_step_value
        self.events.append(("before", global_step_value))

    def after_save(self, session, global_step_value):
        assert session.global_step == global_step_value
        self.events.append(("after", global_step_value))


def test_hooks_logging_and_the_tensors_they_see(tmp_path, caplog):
    """One run with everything that looks into it: hooks, listeners, tensors of each step on two replicas."""
    texts = []

    def fn(features, labels, mode, params):
        spec = model_fn(features, labels, mode, params)
        last = IPULoggingTensorHook(every_n_iter=2, at_end=True)
        every = IPULoggingTensorHook(
            every_n_iter=1, formatter=lambda v: str(texts.append(v)), logging_mode=LoggingMode.ALL
        )
        ops = group(spec.train_op, [last.log(get_global_step()), every.log({"loss": spec.loss, "labels": labels})])
        return EstimatorSpec(mode, loss=spec.loss, train_op=ops, training_hooks=[last, every])

    hook, listener = Recorder(stop_at=12), Listener()
    one = estimator(tmp_path, 2, fn, save_checkpoints_steps=8, log_step_count_steps=8)
    with caplog.at_level(logging.INFO, "openipu"):
        one.train(looped(8), hooks=[hook], max_steps=100, saving_listeners=[listener])
    assert hook.events == [
        "begin", "created at 0", "before 0", "after 4", "before 4", "after 8", "before 8", "after 12", "end at 12",
    ]  # fmt: skip
    assert listener.events == [("before", 8), ("after", 8), ("before", 12), ("after", 12)]
    assert [value["loss"].shape for value in texts] == [(4, 2)] * 3
    np.testing.assert_array_equal(texts[0]["labels"], Y[:64].reshape(4, 2, 8))
    np.testing.assert_allclose(hook.losses, [value["loss"].mean() for value in texts], rtol=1e-6)
    assert "tensor = [7 7]" in caplog.text
    assert "tensor = [11 11]" in caplog.text, "at the end"
    assert f"loss = {hook.losses[0]:.6g}, step = 4 (" in caplog.text
    assert "step = 12 (" in caplog.text


def test_host_call_and_event_files(tmp_path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    seen = []

    def on_host(loss, labels):
        seen.append((loss.shape, labels.tolist()))
        return {"host/loss": loss}

    def fn(features, labels, mode, params):
        spec = model_fn(features, labels, mode, params)
        host = (on_host, [spec.loss, labels]) if mode == ModeKeys.TRAIN else None
        return IPUEstimatorSpec(
            mode, loss=spec.loss, train_op=spec.train_op, eval_metric_ops=spec.eval_metric_ops, host_call=host
        )

    one = estimator(tmp_path, function=fn, iterations=1, save_summary_steps=2)
    one.train(looped(), steps=5)
    one.evaluate(once(), name="all")
    assert seen == [((), Y[i * 16 : i * 16 + 16].tolist()) for i in range(5)]

    def scalars(folder):
        events = accumulator.EventAccumulator(str(folder)).Reload()
        return {tag: [event.step for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}

    assert scalars(tmp_path) == {"loss": [1, 3, 5], "global_step/sec": [1, 3, 5], "host/loss": [1, 2, 3, 4, 5]}
    assert scalars(tmp_path / "eval_all") == {"loss": [5], "accuracy": [5]}


def test_train_and_evaluate(tmp_path):
    one = estimator(tmp_path, iterations=2, save_checkpoints_steps=2, keep_checkpoint_max=2)
    hook = Recorder()
    spec = EvalSpec(once(), steps=2, hooks=[hook], start_delay_secs=0, throttle_secs=0)
    result = train_and_evaluate(one, TrainSpec(looped(), max_steps=6), spec)
    assert result["global_step"] == 6
    created = [event for event in hook.events if event.startswith("created")]
    assert created == ["created at 2", "created at 4", "created at 6"], "each checkpoint was evaluated once"
    assert sorted(int(path.name) for path in (tmp_path / "checkpoints").iterdir()) == [4, 6]
    assert one.evaluate(once(), checkpoint_path=tmp_path / "checkpoints" / "4")["global_step"] == 4
    assert train_and_evaluate(one, TrainSpec(looped(), max_steps=6), spec) == result, "nothing left to train"


def report(folder, mode="train"):
    """A report's facts by name."""
    lines = (folder / f"{mode}_report.txt").read_text().splitlines()
    return {line[2:24].strip(): line[24:] for line in lines if line.startswith("  ")}


def reporting(folder, function, replicas=1, shards=1):
    options = run_config().ipu_run_config.ipu_options
    ordinal = SYSTEMS.index(replicas * shards)
    config = IPURunConfig(4, options, replicas, shards, ordinal, compile_summary=True)
    return IPUEstimator(function, folder, RunConfig(config, save_summary_steps=None, log_step_count_steps=None))


def flops(facts):
    return float(facts["FLOPs per step"].split()[0])


def test_reports(tmp_path):
    class Slow(SessionRunHook):
        def after_run(self, *_):
            time.sleep(0.1)

    def fn(features, labels, mode):
        return model_fn(features, labels, mode, {"optimizer": replicated()})

    one = reporting(tmp_path, fn).train(looped(), steps=8)
    first = report(tmp_path)
    assert (first["launches"], first["steps"]) == ("2", "8")
    assert first["time per step"].endswith("(mean of 4 steps after the first launch)")
    assert "before" not in first["compile time"]
    assert "memory, temporary" in first
    assert float(first["bytes per step"].split()[0]) > 0
    assert first.get("memory, program") != "0 bytes"
    one.train(looped(), steps=8, hooks=[Slow()])
    again = report(tmp_path)
    assert again["compile time"].startswith("compiled before")
    assert float(again["time per step"].split()[0]) > 24, "one sleep of 100 ms for 4 steps"
    assert "of the only launch" in (one.evaluate(once(rows=64)) and report(tmp_path, "eval"))["time per step"]


def test_operations_of_reports(tmp_path):
    """Those of one device: loops as often as they run, convolutions as written, replicas and shards alike."""

    def fn(*nodes):
        def fn(features, labels, mode):
            del labels
            for layer in [node() for node in nodes]:
                features = layer(features)
            loss = keras.ops.mean(features)
            op = replicated(keras.optimizers.SGD)().minimize(loss) if mode == ModeKeys.TRAIN else None
            return EstimatorSpec(mode, loss=loss, train_op=op, eval_metric_ops={})

        return fn

    def data(*shape):
        return lambda: ipu.data.repeat(np.zeros((16, *shape), "float32"), np.zeros(16), batch_size=8)

    dense = fn(lambda: keras.layers.Dense(256, use_bias=False), lambda: keras.layers.Dense(256, use_bias=False))
    products = 2 * 8 * 256 * 256  # of one matrix; trained, the first takes two of them and the second three
    for folder, replicas, shards in (("a", 1, 1), ("b", 2, 1), ("c", 1, 2)):
        one = reporting(tmp_path / folder, dense, replicas, shards).train(data(256), steps=4)
        one.evaluate(data(256), steps=4)
        assert flops(report(tmp_path / folder, "eval")) == pytest.approx(2 * products / shards, rel=0.02)
        update = 6 * 2 * 256 * 256  # some operations per weight: accumulate, scale, subtract, a mean over replicas
        assert 5 * products / shards <= flops(report(tmp_path / folder)) <= 5 * products / shards + update
    lstm = reporting(tmp_path / "d", fn(lambda: keras.layers.LSTM(32)))
    lstm.evaluate(data(20, 16), steps=4)
    assert flops(report(tmp_path / "d", "eval")) == pytest.approx(2 * 8 * 20 * 4 * 32 * (16 + 32), rel=0.06)
    convolution = reporting(tmp_path / "e", fn(lambda: keras.layers.Conv2D(64, 3, padding="same")))
    convolution.evaluate(data(15, 15, 32), steps=4)
    assert flops(report(tmp_path / "e", "eval")) == pytest.approx(2 * 8 * 64 * 9 * 32 * 15 * 15, rel=0.01)


@pytest.mark.parametrize("replicas", [1, 2])
def test_metrics_that_make_their_variables_when_they_see_data(tmp_path, replicas):
    """The spec carries them in training, too; the last batch is smaller."""
    kinds = {
        "f1": keras.metrics.F1Score,
        "r2": keras.metrics.R2Score,
        "auc": lambda: keras.metrics.AUC(num_thresholds=20, multi_label=True),
    }

    def fn(features, labels, mode):
        logits = keras.layers.Dense(3)(features)
        if mode == ModeKeys.PREDICT:
            return EstimatorSpec(mode, predictions=logits)
        loss = cross_entropy(labels, logits)
        optimizer = ipu.optimizers.CrossReplicaOptimizer(keras.optimizers.SGD(0.1))
        seen = keras.ops.one_hot(labels, 3), keras.ops.softmax(logits)
        metrics = {name: (make(), *seen) for name, make in kinds.items()}
        train_op = optimizer.minimize(loss) if mode == ModeKeys.TRAIN else None
        return EstimatorSpec(mode, loss=loss, train_op=train_op, eval_metric_ops=metrics)

    one = IPUEstimator(fn, tmp_path, run_config(replicas)).train(looped(), steps=4)
    logs = one.evaluate(once(rows=90))
    scores = keras.ops.softmax(np.stack(list(one.predict(once(rows=90)))))
    for name, make in kinds.items():
        metric = make()
        metric.update_state(keras.ops.one_hot(Y[:90], 3), scores)
        np.testing.assert_allclose(logs[name], metric.result(), atol=1e-5, err_msg=name)


def test_resuming_with_another_split(tmp_path, caplog):
    """The same examples make each update, on one replica or two; what cannot be continued exactly is said."""
    whole = estimator(tmp_path / "whole", optimizer=replicated()).train(looped(16), steps=8)
    moved = estimator(tmp_path / "moved", 2).train(looped(8), steps=4)
    estimator(tmp_path / "moved", 1, optimizer=replicated()).train(looped(16), steps=4)
    mine, theirs = variables(moved), variables(whole)
    assert (theirs["global_step"], theirs["batches"]) == (8, 8)
    np.testing.assert_allclose(mine["dense/kernel"], theirs["dense/kernel"], atol=1e-5)
    assert not caplog.records
    estimator(tmp_path / "whole").train(looped(24), steps=4)
    [record] = caplog.records
    assert "128 examples in batches of 16. With batches of 24" in record.message
    assert "after 5 batches, so it sees 8 examples again" in record.message


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
    assert {mode: calls.count(mode) for mode in calls} == {"train": 2, "eval": 2, "infer": 2}
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
