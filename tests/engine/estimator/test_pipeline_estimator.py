"""Pipelined estimators: the numbers of an `IPUEstimator` on one device, for every schedule, cut and replica count."""

from __future__ import annotations

import itertools
import logging
from typing import Any

import openipu as ipu
from openipu.engine.pipeline.build.optimizer_output import OptimizerFunctionOutput
from openipu.estimator import (
    EvalSpec,
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
from openipu.ops.pipelining_ops import PipelineSchedule

import keras
import numpy as np
import pytest

import zoo
from estimators import X, Y, adam, assert_same, cross_entropy, estimator, looped, model_fn, once, run_config, variables

pytestmark = zoo.KERAS_WARNINGS

SYSTEMS = (1, 2, 4)
COUNT = 4
STEPS = 16
ALL = LoggingMode.ALL


def parts(norm: bool) -> list[Any]:
    """Random numbers and moving statistics in different stages. The statistics of half a batch are others."""
    return [
        keras.layers.Dense(8, activation="relu"),
        keras.layers.Dropout(0.25),
        keras.layers.BatchNormalization(momentum=0.5) if norm else keras.layers.Activation("tanh"),
        keras.layers.Dense(5, activation="tanh"),
        keras.layers.Dropout(0.25),
        keras.layers.Dense(3),
    ]


def staged_fn(mode, params):
    """`params`: where to `cut` the layers, which `optimizer` to make, and arguments of the spec."""
    layers = parts(params.get("norm", False))
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

    stages = [stage(begin, end) for begin, end in itertools.pairwise(cuts)]
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


def pipelined(folder: Any, shards: int = 2, replicas: int = 1, **settings: Any) -> Any:
    params = {"optimizer": averaged if replicas > 1 else adam, **settings.pop("params", {})}
    return IPUPipelineEstimator(staged_fn, folder, config(shards, replicas, **settings), params)


@pytest.fixture(scope="module", autouse=True)
def configured():
    run_config().ipu_run_config.ipu_options.configure_ipu_system()


@pytest.fixture(scope="module")
def single(tmp_path_factory):
    """An `IPUEstimator` on one device, at the end of the data. Tests read it, and must not train it."""
    return whole(tmp_path_factory.mktemp("single"), norm=False)


def whole(folder, norm):
    """11 micro-batches of 8 rows and one of 2, the last four of which make an update that is not full."""

    def accumulating():
        return ipu.optimizers.GradientAccumulationOptimizerV2(adam(), COUNT, reduction_method="mean")

    def net(x):
        for layer in parts(norm):
            x = layer(x)
        return x

    one = estimator(folder, optimizer=accumulating, params={"net": net}, iterations=2 * COUNT)
    return one.train(once(8, rows=90), steps=STEPS)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The same in a pipeline of two stages. Tests read it, and must not train it."""
    return pipelined(tmp_path_factory.mktemp("trained")).train(once(8, rows=90), steps=STEPS)


# --- the same numbers ------------------------------------------------------------------------------------------------


def assert_equal(actual: Any, expected: Any, replicas: int = 1) -> None:
    """Everything that is saved: weights, moving statistics, seeds, the optimizer's state, the global step."""
    mine, theirs = variables(actual), variables(expected)
    assert mine.pop("batches") == (23 if replicas == 2 else 12)
    assert theirs.pop("batches") == 12
    assert list(mine) == list(theirs)
    assert mine["global_step"] == 12
    for name, value in theirs.items():
        np.testing.assert_allclose(mine[name], value, rtol=0, atol=1e-5, err_msg=name)


def test_a_pipeline_equals_one_device(single, trained):
    assert_equal(trained, single)
    mine, theirs = (np.stack([e["logits"] for e in one.predict(once(8, rows=90))]) for one in (trained, single))
    np.testing.assert_allclose(mine, theirs, rtol=0, atol=1e-5)
    result = trained.evaluate(once(8, rows=90))
    batches = [float(cross_entropy(Y[i : min(i + 8, 90)], mine[i : i + 8])) for i in range(0, 90, 8)]
    accuracy = np.mean(mine.argmax(-1) == Y[:90])
    expected = {"loss": np.mean(batches), "accuracy": accuracy, "rows": 90, "global_step": 12}
    assert result == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize(
    ("shards", "replicas", "cuts", "spec"),
    [
        (2, 2, (3,), {"pipeline_schedule": "OneFOneB"}),
        pytest.param(2, 1, (3,), {"pipeline_schedule": PipelineSchedule.Sequential}, marks=pytest.mark.slow),
        pytest.param(
            1, 2, (1, 3), {"pipeline_schedule": "Sequential", "device_mapping": [0, 0, 0]}, marks=pytest.mark.slow
        ),
        pytest.param(4, 1, (1, 3, 5), {"pipeline_schedule": "Interleaved"}, marks=pytest.mark.slow),
        pytest.param(4, 1, (1, 3), {"pipeline_schedule": "GPipe"}, marks=pytest.mark.slow),
        pytest.param(2, 2, (3,), {"replicated_optimizer_state_sharding": True}, marks=pytest.mark.slow),
    ],
)
def test_every_way_to_run_gives_the_same(single, tmp_path, shards, replicas, cuts, spec):
    params = {"cuts": cuts, "spec": spec}
    several = pipelined(tmp_path, shards, replicas, params=params).train(once(8 // replicas, rows=90), steps=STEPS)
    assert_equal(several, single, replicas)


@pytest.mark.slow
def test_moving_statistics_of_stages(tmp_path):
    stages = pipelined(tmp_path / "stages", params={"norm": True}).train(once(8, rows=90), steps=STEPS)
    assert_equal(stages, whole(tmp_path / "whole", norm=True))


def test_training_again_is_bit_identical(trained, tmp_path):
    """The second half runs in another estimator."""
    pipelined(tmp_path, save_checkpoints_steps=COUNT).train(once(8, rows=90), steps=STEPS // 2)
    assert_same(pipelined(tmp_path).train(once(8, rows=90), max_steps=STEPS), trained)


def test_checkpoints_fit_any_number_of_devices(single, tmp_path):
    """Two stages on two replicas begin, one device with both goes on, and an `IPUEstimator` predicts.

    Batches are twice as large then: it goes on behind the examples that were used.
    """
    both = pipelined(tmp_path, 2, 2).train(once(4, rows=90), steps=STEPS // 2)
    assert variables(both)["batches"] == 16
    spec = {"device_mapping": [0, 0], "pipeline_schedule": "Sequential"}
    one = pipelined(tmp_path, 1, params={"spec": spec}).train(once(8, rows=90), steps=STEPS // 2)
    mine, theirs = variables(one), variables(single)
    for name in set(theirs) - {"batches"}:
        np.testing.assert_allclose(mine[name], theirs[name], rtol=0, atol=1e-5, err_msg=name)
    logits = [
        [e["logits"] for e in single.predict(once(8, rows=90), checkpoint_path=path)] for path in (tmp_path, None)
    ]
    np.testing.assert_allclose(*logits, rtol=0, atol=1e-5)


# --- hooks, logs, names ----------------------------------------------------------------------------------------------


class Losses(SessionRunHook):
    def __init__(self):
        self.seen = []

    def before_run(self, _):
        return SessionRunArgs(["loss", "global_step"])

    def after_run(self, _, run_values):
        loss, step = run_values.results
        self.seen.append((step, float(loss)))


def test_hooks_and_the_tensors_they_see(tmp_path, caplog):
    """Steps as each stage counts them, losses of each micro-batch on two replicas, and evaluation in between."""
    texts = []

    def fn(mode):
        def first(x, labels):
            return keras.layers.Dense(4)(x), labels, get_global_step()

        def second(x, labels, step):
            loss = cross_entropy(labels, keras.layers.Dense(3)(x))
            return loss, labels, keras.ops.stack([step, get_global_step()])

        def optimizer_function(loss, labels, steps):
            every.log({"loss": loss, "labels": labels, "steps": steps})
            return OptimizerFunctionOutput(averaged(), loss)

        every = IPULoggingTensorHook(every_n_iter=1, formatter=lambda v: str(texts.append(v)), logging_mode=ALL)
        return IPUPipelineEstimatorSpec(
            mode, [first, second], COUNT, lambda loss, *_: {"loss": loss}, optimizer_function,
            training_hooks=[every] if mode == ModeKeys.TRAIN else None,
        )  # fmt: skip

    hook = Losses()
    two = IPUPipelineEstimator(fn, tmp_path, config(2, 2, save_checkpoints_steps=8, log_step_count_steps=8))
    with caplog.at_level(logging.INFO, "openipu"):
        specs = TrainSpec(looped(8), 16, [hook]), EvalSpec(once(8), None, start_delay_secs=0, throttle_secs=0)
        result = train_and_evaluate(two, *specs)
    assert [step for step, _ in hook.seen] == [8, 16]
    assert [value["loss"].shape for value in texts] == [(8, 2), (8, 2)]
    np.testing.assert_array_equal(texts[1]["steps"][:, 0], np.repeat(np.arange(8, 16), 2).reshape(8, 2))
    np.testing.assert_array_equal(texts[0]["labels"].reshape(-1)[:96], Y)
    np.testing.assert_allclose([loss for _, loss in hook.seen], [v["loss"].mean() for v in texts], rtol=1e-6)
    assert caplog.text.count("Evaluation at step") == 2
    assert result["global_step"] == 16
    assert result["loss"] < hook.seen[0][1]


def test_weights_that_stages_share(tmp_path):
    """An embedding that the last stage uses again; it is built before the stages, and trained by both."""

    def fn(mode):
        shared = keras.layers.Dense(6, use_bias=False)
        shared.build((None, 6))

        def first(x, labels):
            return shared(x), labels

        def second(x, labels):
            return cross_entropy(labels, keras.ops.matmul(x, keras.ops.transpose(shared.kernel))[:, :3])

        return IPUPipelineEstimatorSpec(
            mode, [first, second], COUNT, reduction_method="mean",
            optimizer_function=lambda loss: OptimizerFunctionOutput(adam(), loss),
        )  # fmt: skip

    def net(x):
        shared = keras.layers.Dense(6, use_bias=False)
        return keras.ops.matmul(shared(x), keras.ops.transpose(shared.kernel))[:, :3]

    two = IPUPipelineEstimator(fn, tmp_path / "stages", config()).train(looped(8), steps=8)
    one = estimator(tmp_path / "one", params={"net": net}, iterations=2).train(looped(32), steps=2)
    mine, theirs = (e.get_variable_value("dense/kernel") for e in (two, one))
    np.testing.assert_allclose(mine, theirs, rtol=0, atol=1e-5)


def test_dicts_are_named_arguments(tmp_path):
    def fn(mode):
        return IPUPipelineEstimatorSpec(
            mode,
            [lambda x, scale: keras.layers.Dense(2)(x) * scale, lambda x: x],
            COUNT,
            pipeline_schedule="Sequential",
        )

    def batches():
        yield {"scale": np.zeros((4, 1), "float32"), "x": X[:4]}

    two = IPUPipelineEstimator(fn, tmp_path, config())
    np.testing.assert_array_equal(list(two.predict(batches)), np.zeros((4, 2)))


# --- errors ----------------------------------------------------------------------------------------------------------


def first(x, labels):
    return keras.layers.Dense(4)(x), labels


def second(x, labels):
    return cross_entropy(labels, keras.layers.Dense(3)(x))


def minimized(loss):
    return OptimizerFunctionOutput(adam(), loss)


POPLAR = ipu.ops.pipelining_ops.PipelineStageOptions()
DIVIDED = {"replicated_optimizer_state_sharding": True, "offload_weight_update_variables": False}


@pytest.mark.parametrize(
    ("error", "message", "changes"),
    [
        (ValueError, "`mode` is 'fit'", {"mode": "fit"}),
        (ValueError, "`mode` is 'train', but `optimizer_function` is None", {"optimizer_function": None}),
        (TypeError, "`optimizer_function` is an int", {"optimizer_function": 3}),
        (ValueError, "`mode` is 'eval', but `eval_metrics_fn` is None", {"mode": "eval"}),
        (ValueError, "`gradient_accumulation_count` is None. Give a whole", {"gradient_accumulation_count": None}),
        (ValueError, "is set by the estimator", {"accumulate_outfeed": True}),
        (ValueError, "`infeed_queue` is set by the estimator", {"infeed_queue": None}),
        (TypeError, "no argument 'shedule'", {"shedule": "Grouped"}),
        (TypeError, "`computational_stages` is a function. Give a list", {"computational_stages": first}),
        (TypeError, r"`computational_stages\[1\]` is an int. Give a function", {"computational_stages": [first, 1]}),
        (ValueError, "at least 2 stages, but this one has 1", {"computational_stages": [first]}),
        (NotImplementedError, "side by side", {"computational_stages": [first, [second, second]]}),
        (ValueError, "has 1 elements for 2 stages", {"forward_propagation_stages_poplar_options": [POPLAR]}),
        (TypeError, "is an int. Give a `PipelineStageOptions`", {"weight_update_poplar_options": 3}),
        (NotImplementedError, "is 2, but micro-batches are not cut", {"batch_serialization_iterations": 2}),
        (NotImplementedError, "`continuous_weight_updates` is True", {"continuous_weight_updates": True}),
        (TypeError, "Give one of RecomputationMode.Auto", {"recomputation_mode": "Auto"}),
        (TypeError, "`device_mapping` is an int. Give a list", {"device_mapping": 1}),
        (
            ValueError,
            "Leave `offload_weight_update_variables` out",
            DIVIDED,
        ),
        (ValueError, r"multiple of 4 .* \(`gradient_accumulation_count`\)\.$", {"gradient_accumulation_count": 6}),
        (TypeError, "is not a schedule", {"pipeline_schedule": 7}),
        (ValueError, "1 devices are given for 2 stages", {"device_mapping": [0]}),
        (ValueError, "`reduction_method` is 'max'. Give one of SUM", {"reduction_method": "max"}),
    ],
)
def test_wrong_specs(error, message, changes):
    given = {
        "mode": "train",
        "computational_stages": [first, second],
        "gradient_accumulation_count": COUNT,
        "optimizer_function": minimized,
    }
    with pytest.raises(error, match=message):
        IPUPipelineEstimatorSpec(**given | changes)


def spec_fn(**changes: Any) -> Any:
    def fn(mode):
        given = {
            "computational_stages": [first, second],
            "gradient_accumulation_count": COUNT,
            "optimizer_function": minimized,
            "eval_metrics_fn": lambda loss: {"loss": loss},
        }
        return IPUPipelineEstimatorSpec(**{"mode": mode} | given | changes)

    return fn


def logging_first(x, labels):
    IPULoggingTensorHook(every_n_iter=1).log(x)
    return first(x, labels)


def shared_state(mode):
    noise = keras.layers.GaussianNoise(1.0)

    def one(x, labels):
        return noise(first(x, labels)[0]), labels

    return spec_fn(computational_stages=[one, lambda x, labels: second(noise(x), labels)])(mode)


def built_too_late(mode):
    dense = keras.layers.Dense(6)
    stages = [lambda x, labels: (dense(x), labels), lambda x, labels: second(dense(x), labels)]
    return spec_fn(computational_stages=stages)(mode)


def idle_layer(mode):
    idle = keras.layers.Dense(4, name="idle")

    def one(x, labels):
        return first(x, labels)[0] + keras.ops.stop_gradient(idle(x)), labels

    return spec_fn(computational_stages=[one, second])(mode)


def with_own_rate(loss):
    optimizer = keras.optimizers.SGD(0.1)
    optimizer.learning_rate = 0.1 * loss
    return OptimizerFunctionOutput(optimizer, loss)


def nothing(): ...


@pytest.mark.parametrize(
    ("error", "message", "function", "settings"),
    [
        (TypeError, "returned a NoneType", nothing, {}),
        (ValueError, "returned a spec for 'eval'", spec_fn(mode="eval"), {}),
        (ValueError, "`iterations_per_loop` is 6 micro-batches", spec_fn(), {"iterations": 6}),
        (ValueError, "`iterations_per_loop` is 2 micro-batches", spec_fn(), {"iterations": 2}),
        (ValueError, "requires 2 devices, but `IPURunConfig.num_shards` is 4", spec_fn(), {"shards": 4}),
        (ValueError, "requires 2 devices, but `IPURunConfig.num_shards` is 1", spec_fn(), {"shards": 1}),
        (ValueError, "uses device 2, but with `num_shards` = 2", spec_fn(device_mapping=[0, 2]), {}),
        (ValueError, "2 replicas needs an optimizer that reduces", spec_fn(), {"replicas": 2}),
        (TypeError, "returned a SGD", spec_fn(optimizer_function=lambda _: keras.optimizers.SGD()), {}),
        (
            ValueError,
            r"`loss` has shape \(2,\)",
            spec_fn(optimizer_function=lambda loss: minimized(keras.ops.stack([loss, loss]))),
            {},
        ),
        (
            ValueError,
            "accumulates 2 micro-batches, but in a pipeline",
            spec_fn(
                optimizer_function=lambda loss: OptimizerFunctionOutput(
                    ipu.optimizers.GradientAccumulationOptimizerV2(adam(), 2), loss
                )
            ),
            {},
        ),
        (
            NotImplementedError,
            "computes the learning rate in each step, which is not possible in a pipeline",
            spec_fn(optimizer_function=with_own_rate),
            {},
        ),
        (ValueError, "Stage 0 logs tensors", spec_fn(computational_stages=[logging_first, second]), {}),
        (ValueError, "state that stage 0 changes and stage 1 uses", shared_state, {}),
        (ValueError, "Stage 1 uses 'dense/kernel', which stage 0 makes", built_too_late, {}),
        (ValueError, "have no gradient, because .*: idle/kernel, idle/bias. Use them in a stage", idle_layer, {}),
    ],
)
def test_refused_training(tmp_path, error, message, function, settings):
    shards, replicas = settings.pop("shards", 2), settings.pop("replicas", 1)
    with pytest.raises(error, match=message):
        IPUPipelineEstimator(function, tmp_path, config(shards, replicas, **settings)).train(looped(8), steps=24)


def test_refused_functions(tmp_path):
    with pytest.raises(ValueError, match="has the argument 'features', but in a pipeline"):
        IPUPipelineEstimator(model_fn, tmp_path)
    with pytest.raises(ValueError, match="has the argument 'labels'"):
        IPUPipelineEstimator(lambda labels: labels, tmp_path)
    with pytest.raises(ValueError, match="has the argument 'size'"):
        IPUPipelineEstimator(lambda size: size, tmp_path)
    with pytest.raises(ValueError, match="no argument `params`"):
        IPUPipelineEstimator(spec_fn(), tmp_path, params={"a": 1})
    with pytest.raises(ValueError, match="`config` is a dict"):
        IPUPipelineEstimator(spec_fn(), tmp_path, {})  # type: ignore[arg-type]
    assert "'num_shards': 2" in repr(config())
    with pytest.raises(ValueError, match=r"`steps` \(6\) must be a multiple of `iterations_per_loop` \(8\)"):
        IPUPipelineEstimator(spec_fn(), tmp_path, config()).train(looped(8), steps=6)


@pytest.mark.parametrize(
    ("error", "message", "metrics"),
    [
        (TypeError, "`eval_metrics_fn` returned a float", lambda _: 1.0),
        (KeyError, "'accuracy'. Return a 'loss' too", lambda _: {"accuracy": 1.0}),
    ],
)
def test_refused_metrics(tmp_path, error, message, metrics):
    with pytest.raises(error, match=message):
        IPUPipelineEstimator(spec_fn(eval_metrics_fn=metrics), tmp_path, config()).evaluate(once(8, rows=8))


def test_refused_predictions(tmp_path):
    fn = spec_fn(computational_stages=[first, first])
    with pytest.raises(ValueError, match="last stage returned 2 tensors to predict"):
        list(IPUPipelineEstimator(fn, tmp_path, config()).predict(once(8, rows=8)))
    with pytest.raises(ValueError, match=r"A prediction has shape \(\) for a batch of 8"):
        list(IPUPipelineEstimator(spec_fn(), tmp_path, config()).predict(once(8, rows=8)))
