"""Random calls of `fit`: a model, its data in some kind of source, arguments, options and callbacks."""

from __future__ import annotations

import dataclasses
import importlib.util
import math
import random
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openipu  # noqa: F401 - chooses Keras' backend

import keras
import numpy as np

import replication
import zoo
from contract import OPTIMIZERS

MODELS = ("dense", "batchnorm_dropout", "two_in_two_out", "subclassed", "own_step", "own_everything",
          "own_loss_and_metrics", "averaged_weights_and_schedule", "frozen", "constrained_accumulated",
          "mixed_float16")  # fmt: skip
MIXING = ("batchnorm_dropout", "subclassed", "own_step", "constrained_accumulated", "mixed_float16",
          "own_everything", "own_loss_and_metrics", "averaged_weights_and_schedule")  # fmt: skip
"""Models that depend on how samples are put together, or that count batches, as an optimizer may do."""
OWN_OPTIMIZER = ("averaged_weights_and_schedule", "constrained_accumulated", "mixed_float16")
CLASSES = ("dense", "batchnorm_dropout", "averaged_weights_and_schedule", "frozen", "mixed_float16")
"""Models with integer labels, which can have weights."""
SOURCES = ("numpy", "jax", "generator", "py_dataset", "tf_data", "torch")
VALIDATIONS = ("none", "split", "arrays", "weighted", "source")
CALLBACKS = ("record", "lambda", "checkpoint", "early_stopping", "scheduler", "plateau", "stop_at_epoch",
             "stop_at_batch", "shrink_weights", "batch_rate", "evaluate")  # fmt: skip
BATCH_CALLBACKS = ("stop_at_batch", "batch_rate")
"""Callbacks that act on the model after an execution, so that plain Keras must have executions of the same length."""


@dataclass(frozen=True)
class Run:
    """One call of `fit`, with all that it depends on."""

    model: str
    optimizer: str | None
    """None: that of the model."""
    rows: int
    batch: int
    steps_per_execution: int
    replicas: int
    accumulate: int
    method: str
    epochs: int
    initial_epoch: int
    source: str
    shuffle: Any
    weights: str
    """ "none", "sample" or "class"."""
    validation: str
    validation_freq: int
    validation_steps: int | None
    steps_per_epoch: int | None
    callbacks: tuple[str, ...]
    asynchronous: bool
    prefetch: int | None
    stages: int

    @property
    def strength(self) -> int:
        return self.replicas * (self.accumulate if self.method == "sum" else 1)

    @property
    def whole(self) -> int:
        """Rows of an update."""
        return self.batch * self.replicas * self.accumulate

    @property
    def many(self) -> bool:
        return self.replicas * self.accumulate * self.stages > 1

    @property
    def steps_of_keras(self) -> int:
        """`steps_per_execution` of the plain model. Keras rounds the steps of an epoch up to whole executions."""
        once = self.many or self.asynchronous or self.steps_per_epoch or self.validation_steps
        return 1 if once else self.steps_per_execution


def allowed(run: Run) -> Run:
    """The nearest run that exists in plain Keras, and that can be compared with it."""
    new = dataclasses.replace
    if run.many:  # whole updates are compared, so nothing may depend on smaller batches
        run = new(run, steps_per_epoch=None, validation_steps=None, asynchronous=False, shuffle=bool(run.shuffle),
                  steps_per_execution=run.accumulate * run.steps_per_execution,
                  model="dense" if run.model in MIXING else run.model,
                  epochs=1 if run.source == "generator" else run.epochs)  # fmt: skip
    elif run.source == "generator":
        run = new(run, steps_per_epoch=run.steps_per_epoch or math.ceil(run.rows / run.batch))
    elif run.source not in ("numpy", "jax"):
        run = new(run, steps_per_epoch=None)
    if run.model in OWN_OPTIMIZER:
        run = new(run, optimizer=None)
    if run.weights == "class" and run.model not in CLASSES:
        run = new(run, weights="sample")
    if run.model in ("own_step", "two_in_two_out"):  # the first takes no weights; Keras wants one per output
        run = new(run, weights="none")
    if run.source not in ("numpy", "jax") and run.validation == "split":
        run = new(run, validation="arrays")
    if run.validation == "none":
        run = new(run, validation_steps=None)
    if run.steps_of_keras != run.steps_per_execution:
        run = new(run, callbacks=tuple(c for c in run.callbacks if c not in BATCH_CALLBACKS))
    return new(run, initial_epoch=min(run.initial_epoch, run.epochs - 1))


def installed() -> tuple[str, ...]:
    packages = {"tf_data": "tensorflow", "torch": "torch"}
    return tuple(s for s in SOURCES if s not in packages or importlib.util.find_spec(packages[s]))


def draw(rng: random.Random) -> Run:
    some, number = rng.choice, rng.randint
    return allowed(Run(
        model=some(MODELS),
        optimizer=some((None, None, *(o for o in OPTIMIZERS if o not in ("lion", "lamb", "adafactor")))),
        rows=number(5, 50),
        batch=number(2, 9),
        steps_per_execution=number(1, 8),
        replicas=some((1, 1, 1, 2, 4)),
        accumulate=some((1, 1, 1, 2, 3)),
        method=some(("sum", "mean", "running_mean")),
        epochs=number(1, 4),
        initial_epoch=some((0, 0, 0, 1, 2)),
        source=some(installed()),
        shuffle=some((True, False, "batch")),
        weights=some(("none", "sample", "class")),
        validation=some(VALIDATIONS),
        validation_freq=some((1, 1, 2)),
        validation_steps=some((None, None, 1, 2)),
        steps_per_epoch=some((None, None, None, 1, 2, 3)),
        callbacks=tuple(rng.sample(CALLBACKS, number(0, 3))),
        asynchronous=some((False, False, True)),
        prefetch=some((None, None, 1, 5)),
        stages=some((1, 1, 2)),
    ))  # fmt: skip


# --- data ------------------------------------------------------------------------------------------------------------


def arrays(run: Run, rows: int) -> tuple[Any, ...]:
    """x, y and, if there are any, weights of samples."""
    x, y = zoo.CASES[run.model].data(rows)
    weights = np.random.default_rng(1).uniform(0.2, 2.0, rows).astype("float32")
    return (x, y, weights) if run.weights == "sample" else (x, y)


class Batches(keras.utils.PyDataset):
    """Batches in an order that is only known when the epoch has begun.

    It is the same in each epoch, because plain Keras begins one more epoch to build the model.
    """

    def __init__(self, data: Any, batch: int, shuffle: bool) -> None:
        super().__init__()
        self._data, self._batch, self._shuffle = data, batch, shuffle
        self._rows = len(keras.tree.flatten(data)[0])
        self._order = np.arange(self._rows)

    def __len__(self) -> int:
        return math.ceil(self._rows / self._batch)

    def __getitem__(self, index: int) -> Any:
        rows = self._order[index * self._batch : (index + 1) * self._batch]
        return keras.tree.map_structure(lambda a: a[rows], self._data)

    def on_epoch_begin(self) -> None:
        if self._shuffle:
            self._order = np.random.default_rng(4).permutation(self._rows)


def _endless(data: Any, batch: int, once: bool) -> Iterator[Any]:
    batches = Batches(data, batch, shuffle=False)
    while True:
        yield from (batches[i] for i in range(len(batches)))
        if once:
            return


def _tf_data(data: Any, batch: int, shuffle: bool) -> Any:
    import tensorflow as tf

    found = tf.data.Dataset.from_tensor_slices(data)
    if shuffle:
        found = found.shuffle(50, seed=3, reshuffle_each_iteration=False)
    return found.batch(batch).prefetch(2)


def _torch(data: Any, batch: int, shuffle: bool) -> Any:
    import torch

    class Rows(torch.utils.data.Dataset):
        def __len__(self) -> int:
            return len(keras.tree.flatten(data)[0])

        def __getitem__(self, index: int) -> Any:
            return keras.tree.map_structure(lambda a: np.asarray(a[index]), data)

    order = torch.Generator().manual_seed(2) if shuffle else None
    return torch.utils.data.DataLoader(Rows(), batch, shuffle=shuffle, generator=order)


def source(run: Run, data: Any, batch: int, once: bool = False) -> Any:
    """The rows of a stream."""
    shuffle = bool(run.shuffle)
    if run.source == "py_dataset":
        return Batches(data, batch, shuffle)
    if run.source == "generator":
        return _endless(data, batch, once)
    return (_tf_data if run.source == "tf_data" else _torch)(data, batch, shuffle)


def arguments(run: Run, *, plain: bool) -> dict[str, Any]:
    """The arguments of `fit`, without callbacks."""
    batch = run.whole if plain else run.batch
    data, held_out = arrays(run, run.rows), arrays(run, run.rows // 2 + 1)
    found: dict[str, Any] = {"epochs": run.epochs, "initial_epoch": run.initial_epoch, "verbose": 0}
    found["steps_per_epoch"] = run.steps_per_epoch
    if run.source in ("numpy", "jax"):
        if run.source == "jax":
            data = keras.tree.map_structure(keras.ops.convert_to_tensor, data)
        found |= dict(zip(("x", "y", "sample_weight"), data, strict=False))
        found |= {"batch_size": batch, "shuffle": run.shuffle}
    else:
        found["x"] = source(run, data, batch, once=run.steps_per_epoch is None)
        # Keras shuffles the batches of a PyDataset. Where batches are parts of updates, those would be others.
        found["shuffle"] = bool(run.shuffle) and not run.many
    if run.weights == "class":
        found["class_weight"] = {0: 1.0, 1: 0.3, 2: 2.5}
    if run.validation == "split":
        found["validation_split"] = 0.3
    elif run.validation == "source" and run.source not in ("numpy", "jax", "generator"):
        found["validation_data"] = source(run, held_out, batch)
    elif run.validation != "none":
        found["validation_data"] = held_out if run.validation == "weighted" else held_out[:2]
        found["validation_batch_size"] = batch
    if run.validation != "none":
        found |= {"validation_freq": run.validation_freq, "validation_steps": run.validation_steps}
    return found


# --- callbacks -------------------------------------------------------------------------------------------------------


class Seen(keras.callbacks.Callback):
    """Keeps the logs of epochs, the number of updates, and the logs of batches."""

    def __init__(self) -> None:
        super().__init__()
        self.epochs: list[dict[str, float]] = []
        self.batches: list[dict[str, float]] = []

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        optimizer = getattr(self.model.optimizer, "inner_optimizer", self.model.optimizer)
        self.epochs.append({"epoch": epoch, "updates": int(optimizer.iterations.numpy())} | _numbers(logs))

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        del batch  # it differs after a short last execution, see docs/keras-behaviour.md
        self.batches.append(_numbers(logs))


def _numbers(logs: Any) -> dict[str, float]:
    return {name: float(value) for name, value in (logs or {}).items()}


class StopAtEpoch(keras.callbacks.Callback):
    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        del logs
        self.model.stop_training = epoch >= 1


class StopAtBatch(keras.callbacks.Callback):
    """Stops after the third execution."""

    calls = 0

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        del batch, logs
        self.calls += 1
        self.model.stop_training = self.calls >= 3


class BatchRate(keras.callbacks.Callback):
    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        del batch, logs
        self.model.optimizer.learning_rate = float(self.model.optimizer.learning_rate) * 0.9


class ShrinkWeights(keras.callbacks.Callback):
    """Changes weights between epochs."""

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        del epoch, logs
        weights = self.model.get_weights()
        self.model.set_weights([w * 0.75 if w.dtype == np.float32 else w for w in weights])


class Evaluate(keras.callbacks.Callback):
    """Evaluates on other data in the middle of training, and lets training see the result."""

    def __init__(self, x: Any, y: Any) -> None:
        super().__init__()
        self._data = x, y

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        del logs
        if epoch == 1:
            value = self.model.evaluate(*self._data, batch_size=4, verbose=0, return_dict=True)["loss"]
            self.model.stop_training = bool(np.isnan(value))


def callbacks(run: Run, folder: Path, losses: list[float]) -> list[keras.callbacks.Callback]:
    """New callbacks. A LambdaCallback appends to `losses`."""

    def keep(epoch: int, logs: Any) -> None:
        losses.append(epoch + float(logs["loss"]))

    made = {
        "record": Seen,
        "lambda": lambda: keras.callbacks.LambdaCallback(on_epoch_end=keep),
        "checkpoint": lambda: keras.callbacks.ModelCheckpoint(folder / "{epoch}.weights.h5", save_weights_only=True),
        "early_stopping": lambda: keras.callbacks.EarlyStopping(
            "loss", mode="max", patience=1, restore_best_weights=True
        ),
        "scheduler": lambda: keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * (0.5 if epoch else 1.0)),
        "plateau": lambda: keras.callbacks.ReduceLROnPlateau("loss", mode="max", factor=0.1, patience=1),
        "stop_at_epoch": StopAtEpoch,
        "stop_at_batch": StopAtBatch,
        "shrink_weights": ShrinkWeights,
        "batch_rate": BatchRate,
        "evaluate": lambda: Evaluate(*arrays(run, 7)[:2]),
    }
    return [made[name]() for name in run.callbacks]


# --- runs ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Result:
    """What a run left behind."""

    outcome: zoo.Outcome
    seen: list[list[dict[str, float]]]
    losses: list[float]
    saved: dict[str, list[np.ndarray]]


def model_of(run: Run, *, plain: bool) -> keras.Model:
    case = zoo.CASES[run.model]
    settings = case.compile()
    if run.optimizer is not None:
        settings["optimizer"] = OPTIMIZERS[run.optimizer](run.strength)
    keras.utils.set_random_seed(7)
    if plain:
        with zoo.policy(case.policy):
            model = case.make()
        if run.many:
            settings["optimizer"] = replication.amplified(settings["optimizer"], run.strength)
        model.compile(**settings, steps_per_execution=run.steps_of_keras)
        return model
    with zoo.policy(case.policy), replication.strategy(run.replicas * run.stages).scope():
        model = case.make()
    if run.stages > 1:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # such small models cannot be cut evenly
            model.set_pipeline_stage_assignment("auto", stages=run.stages, print_fn=None)
        model.set_pipelining_options(run.accumulate, pipeline_schedule="OneFOneB",
                                     gradient_accumulation_reduction_method=run.method)  # fmt: skip
    else:
        model.set_gradient_accumulation_options(run.accumulate, run.method)
    model.set_asynchronous_callbacks(run.asynchronous)
    if run.prefetch:
        model.set_infeed_queue_options(prefetch_depth=run.prefetch)
        model.set_outfeed_queue_options(buffer_depth=run.prefetch)
    model.compile(**settings, steps_per_execution=run.steps_per_execution)
    return model


def result(run: Run, folder: Path, *, plain: bool) -> Result:
    """Fit, evaluate and predict."""
    folder.mkdir()
    model, losses = model_of(run, plain=plain), []
    told = callbacks(run, folder, losses)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Keras warns when a source ends; ours says so in other words
        history = model.fit(**arguments(run, plain=plain), callbacks=told).history
        outcome = zoo.outcome(model, history, arrays(run, 11)[:2])
    seen = [c for c in told if isinstance(c, Seen)]
    epochs, batches = [s.epochs for s in seen], [s.batches for s in seen]
    comparable = run.asynchronous or run.steps_of_keras == run.steps_per_execution
    saved = {}
    for path in sorted(folder.iterdir()):
        model.load_weights(path)
        saved[path.name] = model.get_weights()
    return Result(outcome, epochs + batches if comparable and not run.many else epochs, losses, saved)


def assert_same(actual: Result, expected: Result, tolerance: float = 1e-5) -> None:
    zoo.assert_same(actual.outcome, expected.outcome, tolerance)
    assert [list(map(list, logs)) for logs in actual.seen] == [list(map(list, logs)) for logs in expected.seen]
    for ours, theirs in zip(keras.tree.flatten(actual.seen), keras.tree.flatten(expected.seen), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=tolerance, atol=1e-6, err_msg="logs seen by a callback")
    np.testing.assert_allclose(actual.losses, expected.losses, rtol=tolerance, atol=1e-6)
    assert list(actual.saved) == list(expected.saved)
    for name, weights in expected.saved.items():
        replication.assert_close(actual.saved[name], weights, tolerance, what=name)
