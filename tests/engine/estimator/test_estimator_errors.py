"""What estimators refuse while they run: data, model_fn and its spec, files and hooks."""

from __future__ import annotations

import resource
import threading
from dataclasses import replace

import openipu as ipu
from openipu.engine.checkpoint import Checkpoints
from openipu.estimator import (
    EstimatorSpec,
    IPUEstimator,
    IPUEstimatorSpec,
    IPULoggingTensorHook,
    ModeKeys,
    SessionRunArgs,
    SessionRunHook,
    WarmStartSettings,
    get_global_step,
)

import keras
import numpy as np
import pytest

import zoo
from estimators import X, Y, adam, cross_entropy, dense, estimator, looped, model_fn, once, run_config, train, with_spec

pytestmark = zoo.KERAS_WARNINGS


@pytest.fixture(scope="module", autouse=True)
def configured():
    run_config().ipu_run_config.ipu_options.configure_ipu_system()


# --- input_fn --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("message", "input_fn"),
    [
        ("returned a value of type tuple. Return a dataset", lambda: (X, Y)),
        ("returned a value of type ndarray", lambda: X),
        ("returned a value of type NoneType", lambda: None),
        ("tuples of 3 elements", lambda: [(X, Y, Y)]),
        ("returned a dataset with 0 batches", lambda: iter(())),
        ("yields a float of shape .* instead of a batch", lambda: [(1.0, 2.0)]),
    ],
)
def test_input_fn(message, input_fn, tmp_path):
    with pytest.raises(ValueError, match=message):
        train(tmp_path, with_spec(), input_fn=input_fn)


# --- model_fn and its spec -------------------------------------------------------------------------------------------


def unlabelled(features, mode):
    return dense(features, Y[:16], mode)


@pytest.mark.parametrize(
    ("error", "message", "function"),
    [
        (ValueError, "model_fn has no argument `labels`", unlabelled),
        (ValueError, "returned a tensor", lambda features, labels: features),  # noqa: ARG005
        (ValueError, "has no `loss`", with_spec(loss=None)),
        (ValueError, "has no `train_op`", with_spec(train_op=None)),
        (ValueError, r"`loss` has shape \(16, 3\)", with_spec(loss=lambda p: p["predictions"])),
        (ValueError, "holds 0 records .* and a int", with_spec(train_op=3)),
        (ValueError, "holds 2 records", with_spec(train_op=lambda p: [p["train_op"]] * 2)),
        (ValueError, "spec for 'eval'", lambda features, labels: dense(features, labels, ModeKeys.EVAL)),
        (ValueError, "`mode` is 'trian'", lambda features, labels: dense(features, labels, "trian")),
        (ValueError, "`iterations_per_loop` is 4", with_spec(host_call=lambda p: (print, [p["loss"]]))),
        (TypeError, "`host_call` is a list", with_spec(host_call=[print, []])),
        (ValueError, "`host_call` has 1 elements", with_spec(host_call=(print,))),
        (TypeError, r"`host_call\[0\]` is an int. Give a function", with_spec(host_call=(1, []))),
        (TypeError, r"`host_call\[1\]` is a dict. Give a list", with_spec(host_call=(print, {}))),
        (TypeError, "`eval_metrics` is a dict", with_spec(eval_metrics={})),
        (TypeError, r"`eval_metrics\[1\]` is a tuple. Give a list or a dict", with_spec(eval_metrics=(print, ()))),
    ],
)
def test_specs(error, message, function, tmp_path):
    with pytest.raises(error, match=message):
        train(tmp_path, function)


@pytest.mark.parametrize(
    ("error", "message", "spec"),
    [
        (ValueError, "0 of `eval_metric_ops`", {"eval_metric_ops": None}),
        (ValueError, "2 of `eval_metric_ops`", {"eval_metrics": (dict, [])}),
        (TypeError, "`eval_metric_ops` is a list", {"eval_metric_ops": []}),
        (ValueError, "A metric is called 'loss'", {"eval_metric_ops": lambda p: {"loss": p["loss"]}}),
        (TypeError, "'a' is a tuple without a Keras metric", {"eval_metric_ops": lambda p: {"a": (p["loss"],)}}),
        (ValueError, r"'a' has shape \(16, 3\)", {"eval_metric_ops": lambda p: {"a": p["predictions"]}}),
        (ValueError, "did not update the metric 'a'", {"eval_metric_ops": lambda _: {"a": keras.metrics.Mean()}}),
    ],
)
def test_evaluation_specs(error, message, spec, tmp_path):
    with pytest.raises(error, match=message):
        IPUEstimator(with_spec(**spec), tmp_path, run_config()).evaluate(once())


def test_host_functions_return_what_they_should(tmp_path):
    host = with_spec(host_call=lambda p: (lambda _: "text", [p["loss"]]))
    with pytest.raises(TypeError, match="`host_call` returned a str"):
        train(tmp_path, host, iterations=1)
    no_dict = with_spec(eval_metric_ops=None, eval_metrics=lambda p: (lambda _: 3.0, [p["loss"]]))
    with pytest.raises(TypeError, match="`eval_metrics` returned a float"):
        IPUEstimator(no_dict, tmp_path, run_config()).evaluate(once(rows=16))


@pytest.mark.parametrize(
    ("error", "message", "logs"),
    [
        (ValueError, "A metric is called 'loss'", {"loss": 5.0}),
        (ValueError, "A metric is called 'global_step'", {"global_step": 5}),
        (TypeError, "returned a tuple as 'shape'", {"shape": (16, 3)}),
        (TypeError, "returned a str as 'a'", {"a": "text"}),
    ],
)
def test_metrics_of_host_functions(error, message, logs, tmp_path):
    fn = with_spec(eval_metric_ops=None, eval_metrics=lambda p: (lambda _: logs, [p["loss"]]))
    with pytest.raises(error, match=message):
        IPUEstimator(fn, tmp_path, run_config()).evaluate(once(rows=16))


def test_shapes_that_change_in_the_midst_of_the_data(tmp_path):
    def batches():
        yield X[:16], Y[:16]
        yield X[16:32, :5], Y[16:32]

    with pytest.raises(ValueError, match=r"first .* shape \(N, 6\), \(N\) and now of \(N, 5\), \(N\), .*pad or crop"):
        estimator(tmp_path).train(batches, steps=4)


def test_export(tmp_path):
    one = estimator(tmp_path)
    for export in (one.export_saved_model, one.experimental_export_all_saved_models):
        with pytest.raises(NotImplementedError, match=r"`get_variable_value` reads .* call `model.export`"):
            export("folder", serving_input_receiver_fn=None)


def test_predictions_have_a_row_per_example(tmp_path):
    def fn(features):
        return IPUEstimatorSpec(ModeKeys.PREDICT, predictions={"mean": keras.ops.mean(features)})

    with pytest.raises(ValueError, match=r"shape \(\) for a batch of 16 examples"):
        next(IPUEstimator(fn, tmp_path, run_config()).predict(once()))


def test_prediction_keys(tmp_path):
    def fn(features, mode):
        return EstimatorSpec(mode, predictions={"a": features})

    one = IPUEstimator(fn, tmp_path, run_config())
    with pytest.raises(ValueError, match="There is no prediction 'b'"):
        next(one.predict(once(rows=16), predict_keys=["b"]))
    assert next(one.predict(once(rows=16), predict_keys="a"))["a"].shape == (6,)


# --- training --------------------------------------------------------------------------------------------------------


def test_replicas_need_a_reducing_optimizer(tmp_path):
    with pytest.raises(ValueError, match=r"on 2 replicas .* 'adam' does not. Wrap it in .*CrossReplicaOptimizer"):
        train(tmp_path, with_spec(), replicas=2)


def test_an_execution_holds_whole_updates(tmp_path):
    def accumulating():
        return ipu.optimizers.GradientAccumulationOptimizerV2(adam(), 3)

    with pytest.raises(RuntimeError, match="`iterations_per_loop` is 4, which is not a multiple of the 3"):
        estimator(tmp_path, optimizer=accumulating).train(looped(), steps=4)


def test_the_global_step_is_counted_by_the_estimator(tmp_path):
    def fn(features, labels, mode):
        loss = cross_entropy(labels, keras.layers.Dense(3)(features))
        return EstimatorSpec(mode, loss=loss, train_op=adam().minimize(loss, global_step=get_global_step()))

    with pytest.raises(ValueError, match="`minimize` was given `global_step`"):
        train(tmp_path, fn)
    with pytest.raises(RuntimeError, match="`get_global_step` was called outside of a model_fn"):
        get_global_step()


def test_layers_from_outside(tmp_path):
    outside, moving = keras.layers.Dense(3), keras.layers.BatchNormalization()
    outside.build((None, 6))
    moving.build((None, 6))
    moving.trainable = False

    def trains(features, labels, mode):
        return dense(outside(features), labels, mode)

    def moves(features, labels, mode):
        moving.moving_mean.assign(features[0])
        return dense(features, labels, mode)

    def nothing(features, labels, mode):
        loss = cross_entropy(labels, features)
        return EstimatorSpec(mode, loss=loss, train_op=adam().minimize(loss))

    def from_data(features, labels, mode):
        keras.Variable(features[0])
        return dense(features, labels, mode)

    for function, message in [
        (trains, "uses the trainable variable 'dense/kernel'"),
        (moves, "changes the variable 'batch_normalization/moving_mean'"),
        (nothing, "has 0 variables to train"),
        (from_data, "made from a value that is computed inside model_fn"),
    ]:
        with pytest.raises(ValueError, match=message.replace("dense/", r"dense\w*/").replace("tion/", r"tion\w*/")):
            train(tmp_path, function)
    outside.trainable = False
    train(tmp_path, trains)


def test_modes_with_other_variables(tmp_path):
    def fn(features, labels, mode):
        if mode == ModeKeys.EVAL:
            features = keras.layers.Dense(5)(features)
        return dense(features, labels, mode)

    one = train(tmp_path, fn)
    difference = (
        r"weight 0 was 'dense/kernel' float32\[6, 3\] for 'train' and is 'dense/kernel' float32\[6, 5\] for 'eval'"
    )
    with pytest.raises(ValueError, match=difference):
        one.evaluate(once())
    # In a new process, only the checkpoint knows.
    with pytest.raises(ValueError, match=r"weight 0 is 'dense/kernel' \[6, 3\] there and 'dense/kernel' \[6, 5\] for"):
        IPUEstimator(fn, tmp_path, run_config()).evaluate(once())


def test_a_model_fn_that_changes_its_mind(tmp_path):
    calls = []

    def fn(features, labels, mode):
        calls.append(mode)
        return dense(keras.layers.Dense(len(calls))(features), labels, mode)

    with pytest.raises(ValueError, match=r"variable 0 was 'dense/kernel' float32\[6, 1\] when it was called before"):
        train(tmp_path, fn)


def test_another_optimizer_than_the_checkpoint(tmp_path):
    estimator(tmp_path).train(looped(), steps=4)
    with pytest.raises(ValueError, match="the first difference is 'sgd/iteration'"):
        estimator(tmp_path, optimizer=lambda: keras.optimizers.SGD(0.1)).train(looped(), steps=4)
    params = {"optimizer": adam}
    for settings, message in [
        (
            WarmStartSettings(tmp_path, "conv"),
            "No weight of model_fn matches 'conv'. Its weights are called dense/kernel",
        ),
        (
            WarmStartSettings(tmp_path, ["dense", "conv"]),
            "No weight of model_fn matches 'conv'. Its weights are called dense",
        ),
        (tmp_path / "elsewhere", "There is no checkpoint"),
    ]:
        one = IPUEstimator(model_fn, tmp_path / "new", run_config(), params, warm_start_from=settings)
        with pytest.raises((ValueError, FileNotFoundError), match=message):
            one.train(looped(), steps=4)
    wider = {"optimizer": adam, "net": lambda x: keras.layers.Dense(9)(x)[:, :3]}
    one = IPUEstimator(model_fn, tmp_path / "new", run_config(), wider, warm_start_from=tmp_path)
    with pytest.raises(ValueError, match=r"'dense/kernel' of shape \(6, 9\) is of shape \(6, 8\) in the checkpoint"):
        one.train(looped(), steps=4)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ((3,), "`ckpt_to_initialize_from` is an int. Give a path"),
        (("x", [1]), r"`vars_to_warm_start` is \[1\]. Give a regular expression"),
        (("x", []), r"`vars_to_warm_start` is \[\]. Give a regular expression"),
        (("x", None), "`vars_to_warm_start` is None. Give a regular expression"),
        (("x", "dense("), r"`vars_to_warm_start` has 'dense\(', which is not a regular expression: missing"),
    ],
)
def test_wrong_warm_starts(settings, message):
    with pytest.raises(ValueError, match=message):
        WarmStartSettings(*settings)


@pytest.mark.parametrize("name", ["training_hooks", "training_chief_hooks", "evaluation_hooks", "prediction_hooks"])
def test_hooks_are_lists(name):
    with pytest.raises(TypeError, match=f"`{name}` is an int. Give a list or tuple, even for a single one."):
        EstimatorSpec("train", loss=1.0, **{name: 3})


def test_what_is_no_path(tmp_path):
    with pytest.raises(ValueError, match="`ckpt_to_initialize_from` is an int"):
        IPUEstimator(model_fn, tmp_path, run_config(), {}, warm_start_from=3)
    with pytest.raises(ValueError, match="`model_dir` is an int"):
        IPUEstimator(model_fn, 3, run_config(), {})


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_weight_without_a_gradient(tmp_path, replicas):
    def net(trainable):
        def logits(x):
            idle = keras.layers.Dense(3, name="idle", trainable=trainable)(x)
            return keras.layers.Dense(3)(x) + keras.ops.stop_gradient(idle)

        return {"net": logits}

    with pytest.raises(ValueError, match=r"2 of 4 variables to train have no .*: idle/kernel, idle/bias\. Use"):
        estimator(tmp_path / "refused", replicas, params=net(trainable=True)).train(looped(), steps=4)
    frozen = estimator(tmp_path / "frozen", replicas, params=net(trainable=False))
    assert frozen.train(looped(), steps=4).get_variable_value("global_step") == 4


# --- files -----------------------------------------------------------------------------------------------------------


def test_a_folder_that_cannot_be_written(tmp_path, caplog):
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"`model_dir` is '.*file', which is a file. Give a folder."):
        estimator(tmp_path / "file")
    with pytest.raises(
        PermissionError, match=r"`model_dir` is '.*folder', where nothing can be saved: .* Give a writable folder"
    ):
        estimator(tmp_path / "file" / "folder").train(looped(), steps=4)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "eval").touch()
    assert estimator(tmp_path / "run").evaluate(once())["global_step"] == 0, "without event files"
    assert f"Event files could not be written in {tmp_path / 'run' / 'eval'}" in caplog.text


def test_a_full_disk_ends_no_training(tmp_path, caplog):
    one = estimator(tmp_path, iterations=1, save_summary_steps=1)
    one.train(looped(), steps=1)
    before, hard = resource.getrlimit(resource.RLIMIT_FSIZE)

    class Fills(SessionRunHook):
        def begin(self):
            resource.setrlimit(resource.RLIMIT_FSIZE, (50, hard))

    try:
        one.train(looped(), steps=30, hooks=[Fills()])
        with pytest.raises(OSError, match=r"`model_dir` is '.*', where nothing can be saved: .* Make room on the disk"):
            one.train(looped(), steps=30)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (before, hard))
    said = [
        record.getMessage() for record in caplog.records if record.name == "openipu" and record.levelname == "ERROR"
    ]
    assert [message.split(" could")[0] for message in said] == ["Event files", "Checkpoint 31"], "each once"
    one.train(looped(), steps=1)
    assert one.latest_checkpoint() == str(tmp_path / "checkpoints" / "2"), "and all is well again"


def test_one_process_trains_at_a_time(tmp_path):
    one = estimator(tmp_path)

    class Other(SessionRunHook):
        def after_run(self, run_context, run_values):  # noqa: ARG002
            estimator(tmp_path).train(looped(), steps=4)

    with pytest.raises(RuntimeError, match=rf"{tmp_path / 'checkpoints'} is in use: another run of this process"):
        one.train(looped(), steps=4, hooks=[Other()])
    one.train(looped(), steps=4)
    holder = Checkpoints(tmp_path / "checkpoints")
    holder.open()
    assert one.evaluate(once())["global_step"] == 4, "reading is allowed"
    one.train(looped(), max_steps=4)
    with pytest.raises(RuntimeError, match="in use"):
        one.train(looped(), max_steps=8)
    holder.close()


def test_checkpoints_of_tensorflow(tmp_path):
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    for name in ("checkpoint", "model.ckpt-100.index", "model.ckpt-100.data-00000-of-00001", "model.ckpt-100.meta"):
        (theirs / name).touch()

    def refused(name):
        words = rf"`{name}` is '{theirs}', which has a checkpoint of TensorFlow \(model.ckpt-100\).* Give another fol"
        return pytest.raises(ValueError, match=words)

    with refused("model_dir"):
        estimator(theirs).train(looped(), steps=4)
    with refused("model_dir"):
        estimator(theirs).evaluate(once())
    for path in (theirs, theirs / "model.ckpt-100"):
        with refused("checkpoint_path"):
            estimator(tmp_path / "ours").evaluate(once(), checkpoint_path=path)
        with refused("ckpt_to_initialize_from"):
            IPUEstimator(model_fn, tmp_path / "ours", run_config(), {"optimizer": adam}, path).train(looped(), steps=4)
    assert len(list(theirs.iterdir())) == 4


def test_checkpoints_with_other_contents(tmp_path):
    one = estimator(tmp_path)
    checkpoints = Checkpoints(tmp_path / "checkpoints")
    good = {"position": {"global_step": 8, "batches": 8}, "order": "a", "variables": {"a": np.ones(3)}, "optimizer": {}}
    for change, words in (
        ({"position": {"global_step": 8}}, "'batches' is missing"),
        ({"position": {"global_step": "8", "batches": 8}}, "'global_step' is '8'"),
        ({"order": "a\nb"}, "'b' is missing"),
        ({"order": 3}, "`order` is an int in the checkpoint and a str here"),
        ({}, "model_fn makes different variables than the checkpoint in"),
    ):
        checkpoints.save(8, good | change, wait=True)
        checkpoints.close()
        with pytest.raises(ValueError, match=words):
            one.train(looped(), steps=4)
        with pytest.raises(ValueError, match=words):
            one.evaluate(once())
        assert one.latest_checkpoint() == str(tmp_path / "checkpoints" / "8")


# --- hooks -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("message", "settings"),
    [
        ("Give exactly one of them", {}),
        ("Give exactly one of them", {"every_n_iter": 1, "every_n_secs": 1}),
        ("`every_n_secs` is 0", {"every_n_secs": 0}),
        ("`every_n_iter` is 0", {"every_n_iter": 0}),
        ("`logging_mode` is 'ALL'", {"every_n_iter": 1, "logging_mode": "ALL"}),
    ],
)
def test_making_a_logging_hook(message, settings):
    with pytest.raises(ValueError, match=message):
        IPULoggingTensorHook(**settings)


def test_logging_hooks(tmp_path):
    def with_log(log):
        def fn(features, labels, mode):
            hook = IPULoggingTensorHook(every_n_iter=1)
            spec = dense(features, labels, mode)
            log(hook, features)
            return replace(spec, training_hooks=[hook])

        return fn

    def twice(hook, features):
        hook.log(features)
        hook.log(features)

    def every_row(hook, features):
        hook.log(features)

    def ragged():
        yield X[:16], Y[:16]
        yield X[:7], Y[:7]

    for error, message, log, input_fn in [
        (RuntimeError, "`log` was called twice", twice, None),
        (TypeError, "'a' is a float. Log tensors", lambda hook, _: hook.log({"a": 1.0}), None),
        (RuntimeError, r"has nothing to log. Call its `log\(tensors\)`", lambda *_: None, None),
        (ValueError, r"has shape \(7, 6\) for the last, smaller batch of the data but \(16, 6\)", every_row, ragged),
    ]:
        with pytest.raises(error, match=message):
            train(tmp_path, with_log(log), input_fn=input_fn)
    with pytest.raises(RuntimeError, match="was called outside of a model_fn"):
        IPULoggingTensorHook(every_n_iter=1).log(np.ones(3))


def test_hooks_ask_for_what_there_is(tmp_path):
    class Asks(SessionRunHook):
        def before_run(self, run_context):
            assert run_context.global_step == 0
            return SessionRunArgs("accuracy")

    one = IPUEstimator(with_spec(), tmp_path, run_config())
    with pytest.raises(ValueError, match="asks for 'accuracy', but an execution returns only 'global_step', 'loss'"):
        one.train(looped(), hooks=[Asks()], steps=4)


@pytest.mark.parametrize("elsewhere", [True, False])
def test_an_estimator_that_is_used_by_its_own_hook(tmp_path, elsewhere):
    found = []

    class Uses(SessionRunHook):
        def after_run(self, *_):
            if elsewhere:
                thread = threading.Thread(target=self.use)
                thread.start()
                thread.join()
            else:
                self.use()

        def use(self):
            try:
                found.append(next(one.predict(once())))
            except RuntimeError as error:
                found.append(str(error))

    one = estimator(tmp_path)
    one.train(looped(), hooks=[Uses()], steps=4)
    if elsewhere:
        wanted = (
            "The estimator of 'model_fn' is busy: `train` of the estimator of 'model_fn' in the thread 'MainThread'"
        )
        assert found[0].startswith(wanted)
    else:
        assert found[0]["logits"].shape == (3,)
    assert one.get_variable_value("global_step") == 4
