"""Wherever a user gives a count or a flag, the same values are accepted and the same ones refused."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openipu as ipu
from openipu.estimator import (
    EvalSpec,
    IPUEstimator,
    IPULoggingTensorHook,
    IPURunConfig,
    RunConfig,
    TrainSpec,
)
from openipu.ipu_infeed_queue import IPUInfeedQueue
from openipu.ipu_outfeed_queue import IPUOutfeedQueue
from openipu.keras import PipelineStage
from openipu.ops import all_to_all_op, cross_replica_ops, pipelining_ops, reduce_scatter_op, within_replica_ops

import keras
import numpy as np
import pytest

import zoo
from estimators import estimator, model_fn, once

pytestmark = [zoo.KERAS_WARNINGS, pytest.mark.filterwarnings("ignore::openipu.datasets.StandInDataWarning")]

X, Y = np.ones((8, 3), np.float32), np.ones((8, 1), np.float32)
Call = Callable[[Any], object]


@pytest.fixture(autouse=True)
def _system(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("OPENIPU_DATA", "stand-in")
    two_devices().configure_ipu_system()
    yield
    ipu.config.reset_ipu_configuration()


def two_devices() -> ipu.config.IPUConfig:
    config = ipu.config.IPUConfig()
    config.auto_select_ipus = [1, 2]
    return config


def model(steps_per_execution: Any = 1, layers: int = 1) -> Any:
    with ipu.ipu_strategy.IPUStrategy().scope():
        made = keras.Sequential([keras.Input((3,)), *(keras.layers.Dense(1) for _ in range(layers))])
        made.compile("sgd", "mse", steps_per_execution=steps_per_execution)
    return made


def fit(name: str) -> Call:
    return lambda value: model().fit(X, Y, verbose=0, validation_data=(X, Y), **{name: value})


def one_estimator() -> IPUEstimator:
    return estimator(Path("nowhere"))


def open_stage(number: Any) -> None:
    with ipu.ipu_strategy.IPUStrategy().scope(), PipelineStage(number):
        pass


def scope(manager: Callable[[Any], contextlib.AbstractContextManager[None]]) -> Call:
    def enter(value: Any) -> None:
        with manager(value):
            pass

    return enter


def in_program(call: Call) -> Call:
    return lambda value: ipu.ipu_strategy.IPUStrategy().run(lambda: call(value))


def pipeline(**options: Any) -> object:
    given = {"computational_stages": [lambda x: x, lambda x: x], "gradient_accumulation_count": 2, **options}
    outfeed = IPUOutfeedQueue(device_ordinal=1)
    with ipu.scopes.ipu_scope("/device:IPU:1"):
        return pipelining_ops.pipeline(inputs=[np.float32(1)], outfeed_queue=outfeed, **given)


COUNTS: dict[str, Call] = {
    **{f"fit({name}=)": fit(name) for name in ("batch_size", "validation_batch_size")},
    **{f"fit({name}=)": fit(name) for name in ("steps_per_epoch", "validation_steps")},
    "evaluate(batch_size=)": lambda v: model().evaluate(X, Y, verbose=0, batch_size=v),
    "evaluate(steps=)": lambda v: model().evaluate(X, Y, verbose=0, batch_size=2, steps=v),
    "predict(batch_size=)": lambda v: model().predict(X, verbose=0, batch_size=v),
    "predict(steps=)": lambda v: model().predict(X, verbose=0, batch_size=2, steps=v),
    "compile(steps_per_execution=)": lambda v: model(v).fit(X, Y, verbose=0, batch_size=2),
    "set_gradient_accumulation_options": lambda v: model().set_gradient_accumulation_options(v),
    "set_pipelining_options": lambda v: model().set_pipelining_options(v),
    "set_infeed_queue_options": lambda v: model().set_infeed_queue_options(prefetch_depth=v),
    "set_outfeed_queue_options": lambda v: model().set_outfeed_queue_options(buffer_depth=v),
    "stages for auto": lambda v: model(layers=3).set_pipeline_stage_assignment("auto", stages=v, print_fn=None),
    "GradientAccumulationOptimizerV2": lambda v: ipu.optimizers.GradientAccumulationOptimizerV2("sgd", v),
    "GradientAccumulationOptimizer": lambda v: ipu.optimizers.GradientAccumulationOptimizer("sgd", v),
    "pipeline(repeat_count=)": lambda v: pipeline(repeat_count=v),
    "IPURunConfig(iterations_per_loop=)": IPURunConfig,
    "IPURunConfig(num_replicas=)": lambda v: IPURunConfig(num_replicas=v, ipu_options=two_devices(), ordinal=1),
    "IPURunConfig(num_shards=)": lambda v: IPURunConfig(num_shards=v, ipu_options=two_devices(), ordinal=1),
    "IPURunConfig(prefetch_depth=)": lambda v: IPURunConfig(prefetch_depth=v),
    "RunConfig(save_summary_steps=)": lambda v: RunConfig(save_summary_steps=v),
    "RunConfig(save_checkpoints_steps=)": lambda v: RunConfig(save_checkpoints_steps=v),
    "RunConfig(log_step_count_steps=)": lambda v: RunConfig(log_step_count_steps=v),
    "IPUEstimator(train_batch_size=)": lambda v: IPUEstimator(model_fn, "nowhere", train_batch_size=v),
    "predict(num_predictions=)": lambda v: one_estimator().predict(once(), num_predictions=v),
    "TrainSpec(max_steps=)": lambda v: TrainSpec(once(), v),
    "EvalSpec(steps=)": lambda v: EvalSpec(once(), v),
    "IPULoggingTensorHook(every_n_iter=)": lambda v: IPULoggingTensorHook(every_n_iter=v),
    "Checkpoint(every_n_executions=)": lambda v: ipu.callbacks.Checkpoint("nowhere", v),
    "Checkpoint(keep=)": lambda v: ipu.callbacks.Checkpoint("nowhere", keep=v),
    "IPUInfeedQueue(prefetch_depth=)": lambda v: IPUInfeedQueue([X], prefetch_depth=v),
    "IPUOutfeedQueue(buffer_depth=)": lambda v: IPUOutfeedQueue(buffer_depth=v),
    "dataset_benchmark(epochs)": lambda v: ipu.dataset_benchmark.dataset_benchmark([X] * 4, v, 1),
    "dataset_benchmark(elements)": lambda v: ipu.dataset_benchmark.dataset_benchmark([X] * 4, 1, v),
    "mnist(train=)": lambda v: ipu.datasets.mnist(train=v, test=2),
    "cifar10(test=)": lambda v: ipu.datasets.cifar10(train=2, test=v),
    "make_divisible(divisor=)": lambda v: ipu.data.make_divisible(10, v),
    "trim(batch_size=)": lambda v: ipu.data.trim(X, batch_size=v),
    "trim(multiple=)": lambda v: ipu.data.trim(X, batch_size=1, multiple=v),
    "repeat(batch_size=)": lambda v: ipu.data.repeat(X, batch_size=v),
    "pad(batch_size=)": lambda v: ipu.data.pad(X, batch_size=v),
    "Grouped(stages)": lambda v: ipu.schedules.Grouped().table(v, 4),
    "Sequential(micro_batches)": lambda v: ipu.schedules.Sequential().table(2, v),
}
"""Each takes 2, and nothing below 1."""

ONES: dict[str, Call] = {
    "all_gather": lambda v: all_to_all_op.all_gather(X, v),
    "reduce_scatter": lambda v: reduce_scatter_op.reduce_scatter(X[:, 0], v),
    "cross_replica_sum": lambda v: cross_replica_ops.cross_replica_sum(X, v),
}
"""Each takes 1: outside of programs there is one replica."""

NUMBERS: dict[str, Call] = {
    **{f"fit({name}=)": fit(name) for name in ("epochs", "initial_epoch")},
    "PipelineStage": open_stage,
    "assignment of a Sequential model": lambda v: model(layers=2).set_pipeline_stage_assignment([v, 1]),
    "pipeline_stage of an assignment": lambda v: setattr(
        model().get_pipeline_stage_assignment()[0], "pipeline_stage", v
    ),
    "device_mapping": lambda v: model().set_pipelining_options(device_mapping=[v, 1]),
    "devices of a schedule": lambda v: ipu.schedules.Grouped().table(2, 4, [v, 1]),
    "IPURunConfig(ordinal=)": lambda v: IPURunConfig(ordinal=v),
    "RunConfig(tf_random_seed=)": lambda v: RunConfig(tf_random_seed=v),
    "RunConfig(keep_checkpoint_max=)": lambda v: RunConfig(keep_checkpoint_max=v),
    "IPUInfeedQueue(device_ordinal=)": lambda v: IPUInfeedQueue([X], device_ordinal=v),
    "IPUOutfeedQueue(device_ordinal=)": lambda v: IPUOutfeedQueue(device_ordinal=v),
    "make_divisible(number=)": lambda v: ipu.data.make_divisible(v, 3),
    "repeat(seed=)": lambda v: ipu.data.repeat(X, batch_size=2, seed=v),
    "loops.repeat(n=)": in_program(lambda v: ipu.loops.repeat(v, lambda: None)),
}
"""Each takes 0, and nothing below it."""

AXES: dict[str, Call] = {
    "split_dimension": lambda v: all_to_all_op.all_to_all(X, v, 0, 1),
    "concat_dimension": lambda v: all_to_all_op.all_to_all(X, 0, v, 1),
    "axis": lambda v: within_replica_ops.all_gather([X, X + 1], v),
    "reset_ipu_seed": ipu.utils.reset_ipu_seed,
}
"""Each takes -1 too."""

FLAGS: dict[str, Call] = {
    "set_label_check": lambda v: model().set_label_check(v),
    "set_asynchronous_callbacks": lambda v: model().set_asynchronous_callbacks(v),
    "set_infeed_queue_options": lambda v: model().set_infeed_queue_options(optimise_latency=v),
    "set_outfeed_queue_options": lambda v: model().set_outfeed_queue_options(optimise_latency=v),
    "set_gradient_accumulation_options": lambda v: model().set_gradient_accumulation_options(
        replicated_optimizer_state_sharding=v
    ),
    "GradientAccumulationOptimizerV2": lambda v: ipu.optimizers.GradientAccumulationOptimizerV2(
        "sgd", 2, replicated_optimizer_state_sharding=v
    ),
    "GradientAccumulationOptimizer": lambda v: ipu.optimizers.GradientAccumulationOptimizer("sgd", 2, v),
    "IPURunConfig(compile_summary=)": lambda v: IPURunConfig(compile_summary=v),
    "IPURunConfig(autosharding=)": lambda v: IPURunConfig(autosharding=v),
    "IPULoggingTensorHook(at_end=)": lambda v: IPULoggingTensorHook(1, at_end=v),
    "predict(yield_single_examples=)": lambda v: one_estimator().predict(once(), yield_single_examples=v),
    "IPUInfeedQueue(optimise_latency=)": lambda v: IPUInfeedQueue([X], optimise_latency=v),
    "IPUOutfeedQueue(optimise_latency=)": lambda v: IPUOutfeedQueue(optimise_latency=v),
    "dataset_benchmark(print_stats=)": lambda v: ipu.dataset_benchmark.dataset_benchmark([X], 1, 1, v),
    "dataset_benchmark(do_memcpy=)": lambda v: ipu.dataset_benchmark.dataset_benchmark([X], 1, 1, do_memcpy=v),
    "repeat(shuffle=)": lambda v: ipu.data.repeat(X, batch_size=2, shuffle=v),
    "IPUStrategy(enable_keras_extensions=)": lambda v: ipu.ipu_strategy.IPUStrategy(enable_keras_extensions=v),
    "IPUStrategy(enable_dataset_iterators=)": lambda v: ipu.ipu_strategy.IPUStrategy(enable_dataset_iterators=v),
    "configure_ipu_system": lambda v: ipu.config.configure_ipu_system(two_devices(), reset_configuration=v),
    "reset_ipu_seed": lambda v: ipu.utils.reset_ipu_seed(1, experimental_identical_replicas=v),
    "stochastic_rounding": scope(ipu.scopes.stochastic_rounding),
    "loops.repeat(use_while_v1=)": in_program(lambda v: ipu.loops.repeat(1, lambda: None, use_while_v1=v)),
    "pipeline(accumulate_outfeed=)": lambda v: pipeline(accumulate_outfeed=v),
    "pipeline(replicated_optimizer_state_sharding=)": lambda v: pipeline(replicated_optimizer_state_sharding=v),
}

OPTIONAL_FLAGS: dict[str, Call] = {
    "set_gradient_accumulation_options": lambda v: model().set_gradient_accumulation_options(
        offload_weight_update_variables=v
    ),
    "GradientAccumulationOptimizerV2": lambda v: ipu.optimizers.GradientAccumulationOptimizerV2(
        "sgd", 2, offload_weight_update_variables=v
    ),
    "set_pipelining_options(accumulate_outfeed=)": lambda v: model().set_pipelining_options(accumulate_outfeed=v),
    "set_pipelining_options(offload_weights=)": lambda v: model().set_pipelining_options(offload_weights=v),
}


def refused(call: Call, value: Any, words: str) -> None:
    with pytest.raises(ValueError, match=rf"^`[\w.\[\]]+` is {value!r}\. Give {words}"):
        call(value)


@pytest.mark.parametrize("name", COUNTS)
def test_counts(name: str) -> None:
    COUNTS[name](np.int64(2))
    for value in (True, 0, -1, 2.0, "2"):
        refused(COUNTS[name], value, "a whole number")


@pytest.mark.parametrize("name", ONES)
def test_counts_of_replicas(name: str) -> None:
    ONES[name](np.int64(1))
    for value in (True, 0, -1, 1.0, "1"):
        refused(ONES[name], value, "a whole number")


@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_from_0(name: str) -> None:
    NUMBERS[name](np.int64(0))
    for value in (False, -1):
        refused(NUMBERS[name], value, "a whole number of 0 or more")


@pytest.mark.parametrize("name", AXES)
def test_whole_numbers(name: str) -> None:
    AXES[name](np.int64(-1))
    for value in (True, 0.0, "0"):
        refused(AXES[name], value, "a whole number")


@pytest.mark.parametrize("name", FLAGS)
def test_flags(name: str) -> None:
    for good in (True, False, np.bool_(True)):
        FLAGS[name](good)
    for bad in (0, 1, "yes", None):
        refused(FLAGS[name], bad, "True or False")


@pytest.mark.parametrize("name", OPTIONAL_FLAGS)
def test_optional_flags(name: str) -> None:
    for good in (True, False, np.bool_(True), None):
        OPTIONAL_FLAGS[name](good)
    for bad in (0, 1, "yes"):
        refused(OPTIONAL_FLAGS[name], bad, "True or False, or None")
