"""A process that presses Ctrl-C on itself, again and again, at random moments of training.

    python presses.py KIND PRESSES [checkpoint]

It ends with an error unless every model holds, after each press, exactly the weights of a step boundary of an
undisturbed run, and ends, when it is trained to the end, with exactly its weights.
"""

import hashlib
import logging
import os
import random
import signal
import sys
import tempfile
import threading
import time
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import openipu as ipu

import keras
import numpy as np

KINDS = ("plain", "replicas", "pipeline", "asynchronous", "estimator")
ROWS, BATCH, EPOCHS, STEPS = 180, 4, 3, 4
X = np.random.default_rng(0).normal(size=(ROWS, 6)).astype("float32")
Y = X.sum(-1, keepdims=True)


def configuration(kind: str) -> ipu.config.IPUConfig:
    config = ipu.config.IPUConfig()
    config.auto_select_ipus = 1 if kind in ("plain", "asynchronous") else 2
    return config


def digest(arrays: list[Any]) -> str:
    return hashlib.sha256(b"".join(np.ascontiguousarray(a).tobytes() for a in arrays)).hexdigest()


class Pressed:
    """Presses Ctrl-C once or twice, after a random part of `seconds`, unless the block ends before."""

    def __init__(self, seconds: float) -> None:
        first = random.uniform(0, seconds)
        moments = [first] if random.random() < 0.5 else [first, first + random.choice([1e-4, 1e-3, 0.15])]
        self._timers = [threading.Timer(moment, os.kill, (os.getpid(), signal.SIGINT)) for moment in moments]
        self.came_through = False
        self.took = 0.0
        """How many seconds the block took."""

    def __enter__(self) -> "Pressed":
        self._began = time.monotonic()
        for timer in self._timers:
            timer.start()
        return self

    def __exit__(self, kind: Any, *_: Any) -> bool:
        self.took = time.monotonic() - self._began
        # Presses that come late do not disturb what follows.
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)
        for timer in self._timers:
            timer.cancel()
            timer.join()
        signal.signal(signal.SIGINT, before)
        self.came_through = kind is not None and issubclass(kind, KeyboardInterrupt)
        return self.came_through


# --- Keras models ----------------------------------------------------------------------------------------------------


def make_model(kind: str) -> Any:
    with ipu.ipu_strategy.IPUStrategy().scope():
        model = keras.Sequential([
            keras.Input((6,)),
            keras.layers.Dense(8 if kind != "asynchronous" else 512, "relu"),
            keras.layers.BatchNormalization(),
            keras.layers.Dropout(0.2),
            keras.layers.Dense(1),
        ])  # fmt: skip
        if kind == "pipeline":
            model.set_pipeline_stage_assignment([0, 0, 1, 1])
            model.set_pipelining_options(gradient_accumulation_steps_per_replica=STEPS)
        if kind == "asynchronous":
            model.set_asynchronous_callbacks(True)
    compile_model(kind, model)
    return model


def compile_model(kind: str, model: Any) -> None:
    steps = 3 * STEPS if kind == "asynchronous" else STEPS
    model.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"], steps_per_execution=steps)


class Boundaries(keras.callbacks.Callback):
    """The weights after each execution, by the number of updates."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[int, str] = {}

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        del batch, logs
        note(self.model, self.seen)

    def on_train_begin(self, logs: Any = None) -> None:
        del logs
        note(self.model, self.seen)


class Slow(keras.callbacks.Callback):
    """A callback that takes a while, without looking at the model."""

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        del batch, logs
        time.sleep(2e-4)


def note(model: Any, seen: dict[int, str]) -> None:
    state = [*model.get_weights(), *(v.numpy() for v in model.optimizer.variables)]
    seen[int(model.optimizer.iterations.numpy())] = digest(state)


class Trained:
    """A model that is trained from the same start again and again."""

    def __init__(self, kind: str) -> None:
        keras.utils.set_random_seed(1)
        self.model = make_model(kind)
        self.model.train_on_batch(X[:BATCH], Y[:BATCH])
        self._kind, self._begin = kind, [v.numpy() for v in self._variables()]
        boundaries = Boundaries()
        self.fit([boundaries])
        self.boundaries = boundaries.seen
        self.seconds, self.end = min(self._timed() for _ in range(5)), self.boundaries[max(self.boundaries)]

    def _timed(self) -> float:
        began = time.monotonic()
        self.fit([])
        return time.monotonic() - began

    def _variables(self) -> list[Any]:
        model = self.model
        return [*model.trainable_variables, *model.non_trainable_variables, *model.optimizer.variables]

    def start_over(self, afresh: bool) -> None:
        """Go back to the first weights. `afresh` drops the compiled programs too."""
        if afresh:
            compile_model(self._kind, self.model)
            self.model.optimizer.build(self.model.trainable_variables)
        for variable, value in zip(self._variables(), self._begin, strict=True):
            variable.assign(value)

    def fit(self, callbacks: list[Any], afresh: bool = False) -> None:
        self.start_over(afresh)
        keras.utils.set_random_seed(2)
        self.model.fit(X, Y, BATCH, EPOCHS, verbose=0, shuffle=False, callbacks=[*callbacks, Slow()])

    def note_time(self, press: Pressed) -> None:
        """Learn how long a run takes that no press has ended: less than at first, if the machine was busy then."""
        if not press.came_through:
            self.seconds = min(self.seconds, press.took)

    def check(self) -> None:
        """The model is at a step boundary, and nothing is missing."""
        self.model.predict_on_batch(X[:BATCH])  # waits for an execution that a second press has left behind
        seen: dict[int, str] = {}
        note(self.model, seen)
        [(updates, found)] = seen.items()
        assert self.boundaries.get(updates) == found, f"after {updates} updates, of {sorted(self.boundaries)}"

    def check_end(self) -> None:
        seen: dict[int, str] = {}
        note(self.model, seen)
        assert list(seen.values()) == [self.end], f"ended after {list(seen)} updates"


def press_models(kind: str, presses: int, checkpoint: bool) -> int:
    trained = Trained(kind)
    came = 0
    for number in range(presses):
        afresh = number % 4 == 3
        seconds = trained.seconds * 1.1 + 0.3 * afresh
        if not checkpoint:
            with Pressed(seconds) as press:
                trained.fit([], afresh)
            came += press.came_through
            trained.note_time(press)
            trained.check()
            continue
        with tempfile.TemporaryDirectory() as folder:
            saved = [ipu.callbacks.Checkpoint(folder, max_share=1)]
            for _ in range(3):
                with Pressed(seconds) as press:
                    trained.fit(saved, afresh)
                came += press.came_through
                trained.note_time(press)
                if not press.came_through:
                    break
            trained.fit(saved)
            trained.check_end()
    trained.fit([])
    trained.check_end()
    return came


# --- estimators ------------------------------------------------------------------------------------------------------


def model_fn(features: Any, labels: Any, mode: Any) -> Any:
    outputs = keras.layers.Dense(1)(keras.layers.Dense(8, "relu")(features))
    loss = keras.ops.mean((outputs - labels) ** 2)
    optimizer = ipu.optimizers.CrossReplicaOptimizer(keras.optimizers.Adam(0.01))
    return ipu.ipu_estimator.IPUEstimatorSpec(mode, predictions=outputs, loss=loss, train_op=optimizer.minimize(loss))


def input_fn() -> Any:
    import tensorflow as tf

    return tf.data.Dataset.from_tensor_slices((X, Y)).repeat().batch(BATCH, drop_remainder=True)


def press_estimators(presses: int, checkpoint: bool) -> int:
    logging.getLogger("openipu").setLevel(logging.ERROR)

    def make(folder: str) -> Any:
        config = ipu.ipu_run_config.RunConfig(
            tf_random_seed=1,
            save_checkpoints_steps=STEPS if checkpoint else None,
            save_checkpoints_secs=None,
            ipu_run_config=ipu.ipu_run_config.IPURunConfig(
                iterations_per_loop=STEPS, num_replicas=2, ipu_options=configuration("estimator")
            ),
        )
        return ipu.ipu_estimator.IPUEstimator(model_fn, folder, config)

    def result(estimator: Any) -> str:
        estimator.train(input_fn, max_steps=60)
        return digest([estimator.get_variable_value(name) for name in sorted(estimator.get_variable_names())])

    came = 0
    for _ in range(2):  # the first one also imports modules
        with tempfile.TemporaryDirectory() as folder:
            began = time.monotonic()
            expected = result(make(folder))
            seconds = time.monotonic() - began
    for _ in range(presses):
        with tempfile.TemporaryDirectory() as folder:
            with Pressed(seconds) as press:
                make(folder).train(input_fn, max_steps=60)
            came += press.came_through
            estimator = make(folder)
            assert result(estimator) == expected
    return came


def main(kind: str, presses: int, checkpoint: bool) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    random.seed(kind + str(checkpoint))
    configuration(kind).configure_ipu_system()
    is_estimator = kind == "estimator"
    came = press_estimators(presses, checkpoint) if is_estimator else press_models(kind, presses, checkpoint)
    keras.random.normal((2, 2))  # Keras is not left in a scope
    assert came >= presses // 4, f"only {came} of {presses} presses came while something ran"
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    print(f"{kind}, {'with' if checkpoint else 'without'} checkpoints: {came} presses")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), "checkpoint" in sys.argv[3:])
