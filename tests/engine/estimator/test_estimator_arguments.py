"""What run configs and estimators refuse when they are made or called, with the numbers and a remedy."""

from __future__ import annotations

import openipu as ipu
from openipu.estimator import (
    EvalSpec,
    IPUEstimator,
    IPURunConfig,
    RunConfig,
    TrainSpec,
    train_and_evaluate,
)

import pytest

import zoo
from estimators import X, estimator, looped, model_fn, once, run_config, with_spec

pytestmark = zoo.KERAS_WARNINGS


@pytest.fixture(scope="module", autouse=True)
def configured():
    run_config().ipu_run_config.ipu_options.configure_ipu_system()


def options(count):
    config = ipu.config.IPUConfig()
    config.auto_select_ipus = count
    return config


# --- run configs -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "message", "settings"),
    [
        (
            ValueError,
            r"asks for 2 devices \(2 replicas times 1 shards\), but `ipu_options` is None",
            {"num_replicas": 2},
        ),
        (ValueError, r"asks for 2 devices \(1 replicas times 2 shards\), but `ipu_options` is None", {"num_shards": 2}),
        (TypeError, "`ipu_options` is a dict", {"ipu_options": {}}),
        (
            ValueError,
            "`ordinal` is 2, but the configuration has 2 system",
            {"ipu_options": options([1, 2]), "ordinal": 2},
        ),
        (
            ValueError,
            r"asks for 4 devices \(2 replicas times 2 shards\), but `ipu_options` configures 2",
            {"ipu_options": options(2), "num_replicas": 2, "num_shards": 2},
        ),
        (ValueError, "`iterations_per_loop` is 0", {"iterations_per_loop": 0}),
        (ValueError, "`num_replicas` is 1.5", {"num_replicas": 1.5}),
        (ValueError, "`ordinal` is -1", {"ordinal": -1}),
        (ValueError, "`prefetch_depth` is 0", {"prefetch_depth": 0}),
    ],
)
def test_ipu_run_config(error, message, settings):
    with pytest.raises(error, match=message):
        IPURunConfig(**settings)


@pytest.mark.parametrize(
    ("error", "message", "settings"),
    [
        (TypeError, "`ipu_run_config` is a dict", {"ipu_run_config": {}}),
        (TypeError, "has no argument 'save_every'", {"save_every": 3}),
        (ValueError, "Give one of them", {"save_checkpoints_steps": 3, "save_checkpoints_secs": 3}),
        (ValueError, "`save_checkpoints_steps` is 0", {"save_checkpoints_steps": 0}),
        (ValueError, "`save_checkpoints_secs` is -1", {"save_checkpoints_secs": -1}),
        (ValueError, "`save_summary_steps` is 0", {"save_summary_steps": 0}),
        (ValueError, "`keep_checkpoint_max` is -1", {"keep_checkpoint_max": -1}),
        (
            TypeError,
            "`train_distribute` is an object. Give a `PopDistStrategy`",
            {"train_distribute": object()},
        ),
        (TypeError, "`eval_distribute` is an object. Give a `PopDistStrategy`", {"eval_distribute": object()}),
    ],
)
def test_run_config(error, message, settings):
    with pytest.raises(error, match=message):
        RunConfig(**settings)


def test_options_without_effect_are_named_once(caplog):
    for _ in range(2):
        RunConfig(protocol="grpc", session_config=object())
        IPURunConfig(prefetch_depth=3)
    for name in ("RunConfig.protocol", "RunConfig.session_config", "IPURunConfig.prefetch_depth"):
        assert caplog.text.count(f"{name} (") == 1
    config = RunConfig(save_checkpoints_steps=5, log_step_count_steps=None).replace(tf_random_seed=3)
    assert (config.save_checkpoints_steps, config.save_checkpoints_secs, config.tf_random_seed) == (5, None, 3)
    assert config.log_step_count_steps is None


def test_chosen_devices_are_counted_when_a_run_begins(tmp_path):
    chosen = ipu.config.IPUConfig()
    chosen.select_ipus = [[0, 1]]
    config = RunConfig(IPURunConfig(4, chosen))
    try:
        with pytest.raises(ValueError, match=r"asks for 1 devices .* but `ipu_options` configures 2"):
            IPUEstimator(with_spec(), tmp_path, config).train(looped(), steps=4)
    finally:
        run_config().ipu_run_config.ipu_options.configure_ipu_system()


# --- making an estimator ---------------------------------------------------------------------------------------------


def no_features(labels):
    return labels


def extra(features, labels, weights):
    return features, labels, weights


def plain(features):
    return features


@pytest.mark.parametrize(
    ("message", "function", "settings"),
    [
        ("`config` is a dict", model_fn, {"config": {}}),
        ("`params` is a list", model_fn, {"params": [1]}),
        ("'input_fn', which is reserved", model_fn, {"params": {"input_fn": 1}}),
        ("'batch_size', but `eval_batch_size` sets it", model_fn, {"params": {"batch_size": 1}, "eval_batch_size": 2}),
        ("`train_batch_size` is 0", model_fn, {"train_batch_size": 0}),
        (r"`predict_batch_size` \(3\) must be divisible .* \(1 \* 2\)", model_fn, {"predict_batch_size": 3}),
        ("`model_fn` is an int", 3, {}),
        ("it must have `features`. Add it", no_features, {}),
        ("has the argument 'weights'", extra, {}),
        ("model_fn has no argument `params`", plain, {"params": {"a": 1}}),
        ("but `config` says 'other'", model_fn, {"config": RunConfig(model_dir="other")}),
    ],
)
def test_making_one(message, function, settings, tmp_path):
    settings = {"config": run_config(2), **settings}
    with pytest.raises(ValueError, match=message):
        IPUEstimator(function, tmp_path, **settings)


@pytest.mark.parametrize(
    ("error", "message", "call"),
    [
        (ValueError, "Give exactly one of them", lambda e: e.train(looped())),
        (ValueError, "Give exactly one of them", lambda e: e.train(looped(), steps=4, max_steps=4)),
        (ValueError, r"`steps` \(6\) must be a multiple of .* \(4\), .* Give 8", lambda e: e.train(looped(), steps=6)),
        (ValueError, r"`steps` \(6\) must be a multiple", lambda e: e.evaluate(looped(), steps=6)),
        (ValueError, "`max_steps` is 0", lambda e: e.train(looped(), max_steps=0)),
        (ValueError, "`num_predictions` is 0", lambda e: e.predict(looped(), num_predictions=0)),
        (
            ValueError,
            "counts single ex",
            lambda e: e.predict(looped(), yield_single_examples=False, num_predictions=3),
        ),
        (TypeError, "`input_fn` is an ndarray", lambda e: e.train(X, steps=4)),
        (
            TypeError,
            r"`hooks\[0\]` is an int. Give a `SessionRunHook`",
            lambda e: e.train(looped(), hooks=[3], steps=4),
        ),
        (TypeError, "`hooks` is an int. Give a list", lambda e: e.train(looped(), hooks=3, steps=4)),
        (TypeError, "`hooks` is an int. Give a list", lambda e: e.evaluate(looped(), hooks=3, steps=4)),
        (TypeError, "`hooks` is an int. Give a list", lambda e: e.predict(looped(), hooks=3)),
        (TypeError, "`saving_listeners` is an int", lambda e: e.train(looped(), saving_listeners=3, steps=4)),
        (
            TypeError,
            r"`saving_listeners\[0\]` is an int. Give a `CheckpointSaverListener`",
            lambda e: e.train(looped(), steps=4, saving_listeners=[3]),
        ),
        (ValueError, "There is no checkpoint", lambda e: e.get_variable_names()),
        (FileNotFoundError, "There is no checkpoint", lambda e: e.evaluate(once(), checkpoint_path="/nowhere")),
        (TypeError, "`eval_spec` is an int", lambda e: train_and_evaluate(e, TrainSpec(looped(), 4), 3)),
        (TypeError, "`input_fn` is an int", lambda e: train_and_evaluate(e, TrainSpec(3, 4), EvalSpec(once()))),
        (ValueError, "`throttle_secs` is -1", lambda _: EvalSpec(once(), throttle_secs=-1)),
    ],
)
def test_calling_one(error, message, call, tmp_path):
    with pytest.raises(error, match=message):
        call(estimator(tmp_path))


def test_a_global_batch_needs_params(tmp_path):
    one = IPUEstimator(model_fn, tmp_path, run_config(), train_batch_size=8)
    with pytest.raises(ValueError, match="input_fn must take an argument `params`"):
        one.train(looped(), steps=4)
