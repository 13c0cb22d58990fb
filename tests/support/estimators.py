"""What the tests of estimators share: one small model_fn, one set of data, and runs of different kinds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import openipu as ipu
from openipu.estimator import (
    EstimatorSpec,
    IPUEstimator,
    IPUEstimatorSpec,
    IPURunConfig,
    ModeKeys,
    RunConfig,
)

import keras
import numpy as np

rng = np.random.default_rng(3)
X = rng.normal(size=(96, 6)).astype("float32")
Y = (X[:, :3].argmax(1)).astype("int32")
SYSTEMS = (1, 2, 4)


def layers(dropout: float = 0.25) -> list[Any]:
    """A network as a list of layers, made anew."""
    return [keras.layers.Dense(8, activation="relu"), keras.layers.Dropout(dropout), keras.layers.Dense(3)]


def network(features: Any) -> Any:
    for layer in layers():
        features = layer(features)
    return features


def cross_entropy(labels: Any, logits: Any) -> Any:
    return keras.ops.mean(keras.losses.sparse_categorical_crossentropy(labels, logits, from_logits=True))


def model_fn(features: Any, labels: Any, mode: str, params: dict[str, Any]) -> EstimatorSpec:
    """`params["optimizer"]` makes the optimizer; `params["net"]` may replace the network."""
    logits = params.get("net", network)(features)
    if mode == ModeKeys.PREDICT:
        return EstimatorSpec(mode, predictions={"logits": logits, "class": keras.ops.argmax(logits, axis=-1)})
    loss = cross_entropy(labels, logits)
    if mode == ModeKeys.TRAIN:
        return EstimatorSpec(mode, loss=loss, train_op=params["optimizer"]().minimize(loss))
    accuracy = keras.metrics.SparseCategoricalAccuracy()
    return EstimatorSpec(mode, loss=loss, eval_metric_ops={"accuracy": (accuracy, labels, logits)})


def adam() -> Any:
    return keras.optimizers.Adam(0.02)


def replicated(make: Callable[[], Any] = adam) -> Callable[[], Any]:
    return lambda: ipu.optimizers.CrossReplicaOptimizer(make())


def run_config(replicas: int = 1, iterations: int = 4, **settings: Any) -> RunConfig:
    """A configuration on the system of so many devices; all systems are the same configuration, so nothing is reset."""
    options = ipu.config.IPUConfig()
    options.auto_select_ipus = list(SYSTEMS)
    ipu_config = IPURunConfig(iterations, options, replicas, ordinal=SYSTEMS.index(replicas))
    return RunConfig(ipu_config, **{"tf_random_seed": 5, "save_summary_steps": None, **settings})


def estimator(folder: Any, replicas: int = 1, function: Any = model_fn, **settings: Any) -> IPUEstimator:
    """An estimator with `params`, `iterations` and the rest of `RunConfig` as keywords."""
    optimizer = settings.pop("optimizer", adam if replicas == 1 else replicated())
    params = {"optimizer": optimizer, **settings.pop("params", {})}
    return IPUEstimator(function, folder, run_config(replicas, **settings), params)


def looped(batch: int = 16) -> Callable[[], Any]:
    """An input_fn without end, in the order of the data."""
    return lambda: ipu.data.repeat(X, Y, batch_size=batch)


def once(batch: int = 16, rows: int = len(X)) -> Callable[[], Iterator[Any]]:
    """An input_fn of one pass; the last batch may be smaller."""

    def batches() -> Iterator[Any]:
        for begin in range(0, rows, batch):
            part = slice(begin, min(begin + batch, rows))
            yield X[part], Y[part]

    return batches


def variables(trained: IPUEstimator) -> dict[str, np.ndarray]:
    """Everything in the newest checkpoint."""
    saved = trained._core.saved()
    assert saved is not None
    found = {**saved.variables, **saved.optimizer, "batches": saved.batches, "global_step": saved.global_step}
    return {name: np.asarray(value) for name, value in found.items()}


def assert_same(actual: IPUEstimator, expected: IPUEstimator, tolerance: float = 0.0) -> None:
    mine, theirs = variables(actual), variables(expected)
    assert list(mine) == list(theirs)
    for name, value in theirs.items():
        if tolerance == 0.0:
            np.testing.assert_array_equal(mine[name], value, err_msg=name)
        else:
            np.testing.assert_allclose(mine[name], value, rtol=0, atol=tolerance, err_msg=name)


def dense(features, labels, mode, **spec):
    """The smallest model_fn; the spec can be changed, None leaves a part out."""
    logits = keras.layers.Dense(3)(features)
    loss = cross_entropy(labels, logits)
    parts = {"loss": loss, "predictions": logits, "eval_metric_ops": {}}
    if mode == ModeKeys.TRAIN:
        parts["train_op"] = adam().minimize(loss)
    parts |= {name: value(parts) if callable(value) else value for name, value in spec.items()}
    return IPUEstimatorSpec(mode, **parts)


def with_spec(**spec):
    return lambda features, labels, mode: dense(features, labels, mode, **spec)


def train(tmp_path, function, steps=4, input_fn=None, **settings):
    return IPUEstimator(function, tmp_path, run_config(**settings)).train(input_fn or looped(), steps=steps)


def assert_same_weights(actual, expected, tolerance=1e-6):
    mine, theirs = variables(actual), variables(expected)
    for name in ("dense/kernel", "dense/bias", "dense_1/kernel", "dense_1/bias", "global_step"):
        np.testing.assert_allclose(mine[name], theirs[name], rtol=0, atol=tolerance, err_msg=name)
