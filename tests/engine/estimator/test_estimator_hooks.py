"""Metrics of estimators, and all that looks into a run: hooks, listeners, event files, reports."""

from __future__ import annotations

import logging
import time

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
    assert_same,
    cross_entropy,
    estimator,
    looped,
    model_fn,
    network,
    once,
    replicated,
    run_config,
    variables,
)

pytestmark = zoo.KERAS_WARNINGS


@pytest.fixture(scope="module", autouse=True)
def configured():
    run_config().ipu_run_config.ipu_options.configure_ipu_system()


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


@pytest.mark.parametrize("replicas", [1, 2])
def test_outfeeds_in_a_model_fn(tmp_path, replicas):
    outfeed = ipu.ipu_outfeed_queue.IPUOutfeedQueue()

    def watched(features):
        outfeed.enqueue(features)
        return network(features)

    trained = estimator(tmp_path / "a", replicas, params={"net": watched}).train(looped(), steps=8)
    assert_same(trained, estimator(tmp_path / "b", replicas).train(looped(), steps=8))
    found = outfeed.dequeue()
    np.testing.assert_array_equal(found.reshape(-1, 16, X.shape[1]), X.reshape(6, 16, -1)[np.arange(8 * replicas) % 6])
    trained.evaluate(looped(), steps=4)
    assert len(outfeed.dequeue()) == 4
