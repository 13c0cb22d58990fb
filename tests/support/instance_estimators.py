"""A script for several instances: an estimator trains, stops, trains on, evaluates and predicts.

    python tests/support/instance_estimators.py FOLDER DEVICES SHARD CASE...

SHARD is "auto" or "off" for instances of `openipu launch`, or "one" for a single process with as many devices. What
each instance ends with goes to FOLDER/CASE-SHARD-INSTANCE.npz.
"""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openipu as ipu
from openipu import popdist
from openipu.estimator import IPUEstimator, IPURunConfig, ModeKeys, RunConfig, SessionRunHook
from openipu.ipu_pipeline_estimator import IPUPipelineEstimator, IPUPipelineEstimatorSpec

import keras
import numpy as np
import pytest

import estimators
import instances
from instance_programs import is_own

BATCH, STEPS = 4, 8


class StopsAlone(SessionRunHook):
    """Ends the training early, in the last instance only."""

    def after_run(self, run_context: Any, run_values: Any) -> None:
        del run_values
        if popdist.getInstanceIndex() + 1 == popdist.getNumInstances() and run_context.global_step >= STEPS:
            run_context.request_stop()


def batches(shard: str, replicas: int) -> Callable[[], Iterator[Any]]:
    """An input_fn of one pass: all batches, or those for this instance's replicas."""

    def input_fn() -> Iterator[Any]:
        for number in range(len(estimators.X) // BATCH):
            if shard != "off" or is_own(number, replicas):
                part = slice(number * BATCH, (number + 1) * BATCH)
                yield estimators.X[part], estimators.Y[part]

    return input_fn


def optimizer(shard: str) -> Any:
    made = keras.optimizers.SGD(0.1, momentum=0.9)
    return ipu.optimizers.CrossReplicaOptimizer(made) if shard == "one" else made


def staged_fn(mode: str, params: dict[str, Any]) -> IPUPipelineEstimatorSpec:
    """The model of `estimators.model_fn` in two stages."""
    first, dropout, second = estimators.layers()

    def head(x: Any, labels: Any = None) -> Any:
        return dropout(first(x)), labels

    def tail(x: Any, labels: Any = None) -> Any:
        logits = second(x)
        if mode == ModeKeys.PREDICT:
            return {"logits": logits}
        return estimators.cross_entropy(labels, logits), logits, labels

    def metrics(loss: Any, logits: Any, labels: Any) -> dict[str, Any]:
        return {"loss": np.mean(loss), "accuracy": np.mean(np.argmax(logits, -1) == labels)}

    return IPUPipelineEstimatorSpec(
        mode,
        [head, tail],
        gradient_accumulation_count=4,
        optimizer_function=lambda loss, *_: ipu.pipelining_ops.OptimizerFunctionOutput(params["optimizer"](), loss),
        eval_metrics_fn=metrics,
        reduction_method="mean",
    )


def run(case: str, shard: str, devices: int, folder: Path) -> dict[str, Any]:
    """What an estimator ends with."""
    options = ipu.config.IPUConfig()
    options.auto_select_ipus = devices
    shards = 2 if case == "staged" else 1
    replicas = devices * popdist.getNumInstances() // shards
    together = None if shard == "one" else instances.strategy(shard)
    config = RunConfig(
        IPURunConfig(4, options, devices // shards, shards),
        tf_random_seed=5 + popdist.getInstanceIndex(),  # instance 0's values are those of all
        save_checkpoints_steps=4,
        train_distribute=together,
        eval_distribute=together,
    )
    kind, function = (IPUPipelineEstimator, staged_fn) if case == "staged" else (IPUEstimator, estimators.model_fn)

    def made() -> Any:
        where = folder / f"{case}-{shard}" / ("0" if shard == "one" else str(popdist.getInstanceIndex()))
        return kind(function, where, config, {"optimizer": lambda: optimizer(shard)})

    data = batches(shard, replicas)
    made().train(data, hooks=[StopsAlone()], max_steps=4 * STEPS)
    made().train(data, steps=STEPS)
    last = made()
    evaluated = last.evaluate(data)
    values = {f"evaluated {name}": np.asarray(value) for name, value in evaluated.items()}
    if popdist.getInstanceIndex() == 0:  # the others have no files
        values |= {name: last.get_variable_value(name) for name in last.get_variable_names()}
        return values
    with pytest.raises(ValueError, match="because instance 0 writes them"):
        next(last.predict(data))
    return values


def main(folder: str, devices: int, shard: str, *cases: str) -> None:
    for case in cases:
        values = run(case, shard, devices, Path(folder))
        np.savez(Path(folder) / f"{case}-{shard}-{popdist.getInstanceIndex()}.npz", **values)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), *sys.argv[3:])
