"""`openipu mnist` and `openipu cifar10`: train a tutorial's CNN, report every epoch, and compare with plain Keras."""

import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import openipu as ipu
from openipu import schedules
from openipu.datasets import Dataset, StandInDataWarning

import keras
import numpy as np
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from .terminal import make_console

_COMPARED_STEPS: Final = 48


@dataclass(frozen=True, slots=True)
class Tutorial:
    """What is trained."""

    name: str
    load: Callable[[int | None, int | None], Dataset]
    model: Callable[[], keras.Model]
    learning_rate: float
    stand_in: str
    """What the images are called if they are not the real ones."""


@dataclass(frozen=True, slots=True)
class Options:
    """The options of the commands; None stands for what the help says."""

    epochs: int = 3
    batch_size: int = 64
    steps_per_execution: int | None = None
    ipus: int | None = None
    stages: int = 1
    schedule: str | None = None
    accumulate: int | None = None
    compare: bool = True
    samples: int | None = None
    profile: Path | None = None

    @property
    def devices(self) -> int:
        """How many devices train."""
        return self.ipus or self.stages

    @property
    def replicas(self) -> int:
        """How many copies of the model there are."""
        return self.devices // self.stages

    @property
    def micro_batches(self) -> int:
        """Micro-batches of one replica in an update."""
        return self.accumulate or (4 * self.stages if self.stages > 1 else 1)

    def check(self) -> None:
        """Raise if options do not go together."""
        if self.devices % self.stages:
            raise ValueError(
                f"--ipus {self.ipus} is not a multiple of the {self.stages} stages, each of which takes a device. Give "
                f"{self.stages}, or {2 * self.stages} for two replicas."
            )
        if self.schedule is not None and self.stages == 1:
            raise ValueError(f"--schedule {self.schedule} is for a pipeline. Add --stages 2, or leave it out.")
        if self.stages > 1:
            schedules.by_name(self.schedule or "Grouped").table(self.stages, self.micro_batches)
        if (self.steps_per_execution or 0) % self.micro_batches:
            whole = -(-(self.steps_per_execution or 0) // self.micro_batches) * self.micro_batches
            raise ValueError(
                f"--steps-per-execution {self.steps_per_execution} is not a multiple of the {self.micro_batches} "
                f"micro-batches of an update. Give {whole}."
            )


def run(tutorial: Tutorial, options: Options, console: Console) -> None:
    """Train, evaluate and compare, and print the results."""
    options.check()
    if options.profile is None:
        run_unprofiled(tutorial, options, console)
        return
    with ipu.report(options.profile, f"The CNN of {tutorial.name}") as folder:
        run_unprofiled(tutorial, options, console)
    console.print(f"[bold]report[/] {escape(str(folder / 'report.html'))}", highlight=False, soft_wrap=True)


def run_unprofiled(tutorial: Tutorial, options: Options, console: Console) -> None:
    """Do all of it without a report."""
    loaded = load(tutorial, options)
    (x_train, y_train), (x_test, y_test) = prepare(loaded)
    steps = -(-len(x_train) // options.batch_size)
    updates = -(-steps // (options.replicas * options.micro_batches))
    per_execution = options.steps_per_execution or updates * options.micro_batches

    strategy = configure(options.devices)
    with strategy.scope():
        model = tutorial.model()
        split(model, options)
        compiled(model, tutorial, per_execution)
    each = f", {options.micro_batches} micro-batches per update" if options.micro_batches > 1 else ""
    console.print(
        f"[bold]OpenIPU {ipu.__version__}[/]: the tutorial CNN on {describe(tutorial, loaded)}, {where(options)}, "
        f"micro-batch {options.batch_size}{each}, {steps} steps per epoch, {per_execution} steps per execution",
        highlight=False,
        soft_wrap=True,
    )
    ours = fit_with_progress(model, x_train, y_train, steps, options, console)
    result = model.evaluate(x_test, y_test, batch_size=options.batch_size, verbose=0, return_dict=True)
    console.print(
        f"[bold]test[/]   loss {result['loss']:.4f}  accuracy [bold green]{result['accuracy']:.4f}[/]", highlight=False
    )
    if options.compare:
        compare(ours, tutorial, x_train, y_train, options, console)


def load(tutorial: Tutorial, options: Options) -> Dataset:
    """The images. If they are not the real ones, one line says so."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", StandInDataWarning)
        loaded = tutorial.load(options.samples, options.samples and min(options.samples, 10_000))
    for warning in caught:
        make_console(stderr=True).print(str(warning.message), style="bold yellow", markup=False, soft_wrap=True)
    return loaded


def prepare(loaded: Dataset) -> tuple[tuple[Any, Any], tuple[Any, Any]]:
    """Images with values from 0 to 1 and an axis for channels, and one-hot labels."""

    def pair(x: np.ndarray, y: np.ndarray) -> tuple[Any, Any]:
        images = x / np.float32(255)
        return (images if images.ndim == 4 else images[..., None]), np.eye(10, dtype=np.float32)[y.ravel()]

    return pair(loaded.x_train, loaded.y_train), pair(loaded.x_test, loaded.y_test)


def configure(devices: int) -> Any:
    """A strategy for this number of devices."""
    cfg = ipu.config.IPUConfig()
    cfg.auto_select_ipus = devices
    cfg.configure_ipu_system()
    return ipu.ipu_strategy.IPUStrategy()


def split(model: Any, options: Options) -> None:
    """Set the stages and the accumulation of a model in a scope."""
    if options.stages == 1:
        model.set_gradient_accumulation_options(gradient_accumulation_steps_per_replica=options.micro_batches)
        return
    model.set_pipeline_stage_assignment("auto", stages=options.stages)
    model.set_pipelining_options(
        gradient_accumulation_steps_per_replica=options.micro_batches,
        pipeline_schedule=options.schedule or "Grouped",
    )


def compiled(model: keras.Model, tutorial: Tutorial, steps_per_execution: int = 1) -> keras.Model:
    """The model, ready for `fit`."""
    optimizer = keras.optimizers.SGD(tutorial.learning_rate)
    model.compile(optimizer, "categorical_crossentropy", metrics=["accuracy"], steps_per_execution=steps_per_execution)
    return model


def mnist_cnn() -> keras.Model:
    """Two convolutions with pooling, dropout, one dense layer."""
    inputs = keras.Input((28, 28, 1))
    x = keras.layers.Conv2D(32, 3, activation="relu")(inputs)
    x = keras.layers.MaxPooling2D(2)(x)
    x = keras.layers.Conv2D(64, 3, activation="relu")(x)
    x = keras.layers.MaxPooling2D(2)(x)
    x = keras.layers.Flatten()(x)
    x = keras.layers.Dropout(0.5)(x)
    return keras.Model(inputs, keras.layers.Dense(10, activation="softmax")(x))


def cifar10_cnn() -> keras.Model:
    """The network of `examples/cifar10`: five convolutions, two dense layers."""
    inputs = keras.Input((32, 32, 3))
    x = keras.layers.Conv2D(32, 3, padding="same", activation="relu")(inputs)
    x = keras.layers.Conv2D(32, 3, activation="relu")(x)
    x = keras.layers.Conv2D(32, 3)(x)
    x = keras.layers.MaxPooling2D(2)(x)
    x = keras.layers.Dropout(0.25)(x)
    x = keras.layers.Conv2D(64, 3, padding="same", activation="relu")(x)
    x = keras.layers.Conv2D(64, 3, activation="relu")(x)
    x = keras.layers.MaxPooling2D(2)(x)
    x = keras.layers.Dropout(0.25)(x)
    x = keras.layers.Flatten()(x)
    x = keras.layers.Dense(512, activation="relu")(x)
    x = keras.layers.Dropout(0.5)(x)
    return keras.Model(inputs, keras.layers.Dense(10, activation="softmax")(x))


MNIST: Final = Tutorial("MNIST", ipu.datasets.mnist, mnist_cnn, 0.01, "stand-in digits")
CIFAR10: Final = Tutorial("CIFAR-10", ipu.datasets.cifar10, cifar10_cnn, 0.01, "stand-in pictures")


def describe(tutorial: Tutorial, loaded: Dataset) -> str:
    """The number and kind of images. Stand-in data is never presented as the real one."""
    real = loaded.source != "stand-in"
    kind = tutorial.name if real else f"[bold yellow]{tutorial.stand_in}, not {tutorial.name}[/]"
    return f"{len(loaded.x_train)} images of {kind}"


def where(options: Options) -> str:
    """The devices, and what they are for."""
    stages = f" ({options.stages} stages x {options.replicas} replicas)" if options.stages > 1 else ""
    return f"{options.devices} device(s){stages}"


class EpochTimes(keras.callbacks.Callback):
    """The duration of every epoch in seconds, measured in the same way for OpenIPU and plain Keras."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds: list[float] = []
        self._start = 0.0

    def on_epoch_begin(self, epoch: int, logs: dict[str, float] | None = None) -> None:
        """Start the clock."""
        del epoch, logs
        self._start = time.perf_counter()

    def on_epoch_end(self, epoch: int, logs: dict[str, float] | None = None) -> None:
        """Stop the clock once the logs are on the host: only then is the work of the epoch done."""
        del epoch
        for value in (logs or {}).values():
            float(value)
        self.seconds.append(time.perf_counter() - self._start)


class EpochReport(EpochTimes):
    """A progress bar, and one line for every epoch."""

    def __init__(self, progress: Progress, steps: int, epochs: int) -> None:
        super().__init__()
        self._progress, self._steps, self._epochs = progress, steps, epochs
        self._task = progress.add_task("compiling", total=steps * epochs)

    def on_train_batch_end(self, batch: int, logs: dict[str, float] | None = None) -> None:
        """Advance the bar. Called once per execution."""
        del logs
        done = len(self.seconds) * self._steps + batch + 1
        self._progress.update(self._task, completed=done, description="training")

    def on_epoch_end(self, epoch: int, logs: dict[str, float] | None = None) -> None:
        """Print the epoch's line."""
        super().on_epoch_end(epoch, logs)
        logs = logs or {}
        each = self.seconds[-1] / self._steps * 1e6
        self._progress.console.print(
            f"[bold]epoch {epoch + 1}/{self._epochs}[/]  loss {logs['loss']:.4f}  accuracy {logs['accuracy']:.4f}  "
            f"{each:,.0f} µs/step{'  (includes compiling)' if epoch == 0 else ''}",
            highlight=False,
        )


def fit_with_progress(
    model: keras.Model, x: np.ndarray, y: np.ndarray, steps: int, options: Options, console: Console
) -> EpochTimes:
    """Train with a progress bar, and return the durations of the epochs."""
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        report = EpochReport(progress, steps, options.epochs)
        model.fit(x, y, epochs=options.epochs, batch_size=options.batch_size, verbose=0, callbacks=[report])
    return report


def compare(
    ours: EpochTimes, tutorial: Tutorial, x: np.ndarray, y: np.ndarray, options: Options, console: Console
) -> None:
    """Print one line: microseconds per step with OpenIPU and with plain Keras, both without compiling."""
    if options.epochs == 1:
        console.print("There is no comparison, because the only epoch includes compiling. Use --epochs 2 or more.")
        return
    rows = min(len(x), _COMPARED_STEPS * options.batch_size)
    with console.status("Measuring plain Keras ..."):
        model = compiled(tutorial.model(), tutorial)
        plain = EpochTimes()
        model.fit(x[:rows], y[:rows], epochs=3, batch_size=options.batch_size, verbose=0, callbacks=[plain])
    our_step = min(ours.seconds[1:]) / -(-len(x) // options.batch_size) * 1e6
    plain_step = min(plain.seconds[1:]) / -(-rows // options.batch_size) * 1e6
    console.print(
        f"[bold]speed[/]  OpenIPU {our_step:,.0f} µs/step, plain Keras on JAX {plain_step:,.0f} µs/step: "
        f"[bold]{verdict(plain_step / our_step)}[/]",
        highlight=False,
        soft_wrap=True,
    )


def verdict(ratio: float) -> str:
    """The speed-up (or slow-down) in words."""
    if 0.95 < ratio < 1.05:
        return "the same speed"
    return f"{ratio:.1f} times faster" if ratio > 1 else f"{1 / ratio:.1f} times slower"
