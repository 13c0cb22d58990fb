"""A process that trains, evaluates and predicts with several models at once, four threads at a time.

    python threads.py ROUNDS KIND ...

It ends with an error unless all numbers equal those of the same models one after the other, to the bit.
"""

import contextlib
import hashlib
import logging
import os
import random
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import openipu as ipu

import keras
import numpy as np

THREADS = 4
X = np.random.default_rng(0).normal(size=(53, 6)).astype("float32")
Y = (X[:, :1] > 0).astype("float32")


def configuration() -> ipu.config.IPUConfig:
    config = ipu.config.IPUConfig()
    config.auto_select_ipus = 2
    return config


def digest(*arrays: Any) -> str:
    return hashlib.sha256(b"".join(np.ascontiguousarray(a).tobytes() for a in arrays)).hexdigest()


def network(seed: int, staged: bool = False) -> Any:
    """Everything that is random has a seed, because all threads share Python's random numbers."""

    def dense(width: int, number: int, activation: str | None = None) -> Any:
        first = keras.initializers.GlorotUniform(seed=10 * seed + number)
        return keras.layers.Dense(width, activation, kernel_initializer=first)

    def stage(number: int) -> Any:
        return ipu.keras.PipelineStage(number) if staged else contextlib.nullcontext()

    inputs = keras.Input((6,))
    with stage(0):
        x = keras.layers.BatchNormalization()(dense(8 + seed, 0, "relu")(inputs))
        x = keras.layers.Dropout(0.3, seed=seed)(x)
    with stage(1):
        outputs = dense(1, 1, "sigmoid")(x)
    return keras.Model(inputs, outputs)


def numbers(model: Any) -> str:
    model.fit(X, Y, batch_size=4, epochs=2, shuffle=False, verbose=0)
    evaluated = model.evaluate(X, Y, batch_size=4, verbose=0)
    return digest(*model.get_weights(), np.asarray(evaluated), model.predict(X, batch_size=4, verbose=0))


def keras_model(kind: str, seed: int) -> str:
    with contextlib.nullcontext() if kind == "plain" else ipu.ipu_strategy.IPUStrategy().scope():
        model = network(seed, kind == "pipeline")
        if kind == "pipeline":
            model.set_pipelining_options(gradient_accumulation_steps_per_replica=4)
        if kind == "asynchronous":
            model.set_asynchronous_callbacks(True)
    model.compile(keras.optimizers.Adam(0.02), "binary_crossentropy", metrics=["accuracy"], steps_per_execution=4)
    return numbers(model)


def estimator(seed: int) -> str:
    def model_fn(features: Any, labels: Any, mode: Any) -> Any:
        outputs = network(seed)(features)
        loss = keras.ops.mean((outputs - labels) ** 2)
        optimizer = ipu.optimizers.CrossReplicaOptimizer(keras.optimizers.Adam(0.02))
        return ipu.ipu_estimator.IPUEstimatorSpec(
            mode, predictions=outputs, loss=loss, train_op=optimizer.minimize(loss)
        )

    def input_fn() -> Any:
        import tensorflow as tf

        return tf.data.Dataset.from_tensor_slices((X, Y)).repeat().batch(4, drop_remainder=True)

    settings = ipu.ipu_run_config.IPURunConfig(iterations_per_loop=4, num_replicas=2, ipu_options=configuration())
    config = ipu.ipu_run_config.RunConfig(tf_random_seed=seed, ipu_run_config=settings)
    with tempfile.TemporaryDirectory() as folder:
        trained = ipu.ipu_estimator.IPUEstimator(model_fn, folder, config)
        trained.train(input_fn, steps=12)
        return digest(*(trained.get_variable_value(name) for name in sorted(trained.get_variable_names())))


def loop(seed: int) -> str:
    """A user's own function on all replicas."""
    weight = keras.Variable(np.full((3,), seed, "float32"))
    strategy = ipu.ipu_strategy.IPUStrategy()

    def step(x: Any) -> Any:
        weight.assign(0.9 * weight + ipu.cross_replica_ops.cross_replica_sum(x))
        return weight.value

    return digest(*(strategy.run(step, [np.float32(i) * X[0, :3]]) for i in range(20)))


def job(kind: str, seed: int) -> Callable[[], str]:
    own = {"estimator": estimator, "loop": loop}.get(kind)
    return (lambda: own(seed)) if own else (lambda: keras_model(kind, seed))


def at_once(jobs: list[tuple[str, int]]) -> dict[tuple[str, int], str]:
    """What all jobs give, done at the same time."""
    found: dict[tuple[str, int], str] = {}

    def run(which: tuple[str, int]) -> None:
        try:
            found[which] = job(*which)()
        except BaseException:
            found[which] = traceback.format_exc()

    threads = [threading.Thread(target=run, args=(which,)) for which in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def main(rounds: int, kinds: list[str]) -> None:
    logging.getLogger("openipu").setLevel(logging.ERROR)
    random.seed(1)
    configuration().configure_ipu_system()
    every = [(kind, seed) for seed in (1, 2) for kind in kinds]
    chosen = [random.sample(every, min(THREADS, len(every))) for _ in range(rounds)]
    found = [at_once(jobs) for jobs in chosen]
    expected = {which: job(*which)() for which in {which for jobs in chosen for which in jobs}}
    wrong = [(n, which, got) for n, round in enumerate(found) for which, got in round.items() if got != expected[which]]
    for number, which, got in wrong:
        print("round", number, which, got)
    keras.random.normal((2, 2))  # Keras is not left in a scope
    assert not wrong, f"{len(wrong)} jobs of {rounds} rounds"


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
