"""Train a network on images, report every epoch, and compare with plain Keras: `openipu mnist`, `openipu cifar10`."""

import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import openipu as ipu
from openipu import _validate as validate
from openipu.datasets import Dataset, StandInDataWarning

import keras
import numpy as np
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from .options import Options
from .terminal import make_console

_COMPARED_STEPS: Final = 48


@dataclass(frozen=True, slots=True)
class Demo:
    """What is trained on what: everything in which the commands differ."""

    title: str
    dataset: str
    stand_in: str
    load: Callable[[int | None, int | None], Dataset]
    prepare: Callable[[np.ndarray, np.ndarray], tuple[Any, Any]]
    model: Callable[[], keras.Model]
    optimizer: Callable[[], keras.optimizers.Optimizer]
    loss: keras.losses.Loss

    def compiled(self, model: keras.Model, steps_per_execution: int) -> keras.Model:
        """Compile a model for this demo, and return it."""
        model.compile(self.optimizer(), self.loss, metrics=["accuracy"], steps_per_execution=steps_per_execution)
        return model


def run(demo: Demo, options: Options, console: Console) -> None:
    """Train, evaluate and compare, and print the results."""
    if options.profile is None:
        run_unprofiled(demo, options, console)
        return
    with ipu.report(options.profile, demo.title[0].upper() + demo.title[1:]) as folder:
        run_unprofiled(demo, options, console)
    console.print(f"[bold]report[/] {escape(str(folder / 'report.html'))}", highlight=False, soft_wrap=True)


def run_unprofiled(demo: Demo, options: Options, console: Console) -> None:
    """Do all of it without a report."""
    strategy = configure(options.devices)
    with strategy.scope():
        model = split(demo.model(), options)
    loaded = load(demo, options)
    x_train, y_train = demo.prepare(loaded.x_train, loaded.y_train)
    x_test, y_test = demo.prepare(loaded.x_test, loaded.y_test)
    steps = -(-len(x_train) // options.batch_size)
    per_execution = options.execution_steps(steps)
    with strategy.scope():
        demo.compiled(model, per_execution)
    console.print(
        f"[bold]OpenIPU {ipu.__version__}[/]: {demo.title} on {describe(demo, loaded)}, {describe_split(options)}, "
        f"micro-batch {options.batch_size}, {steps} steps per epoch, {per_execution} steps per execution",
        highlight=False,
        soft_wrap=True,
    )
    ours = fit_with_progress(model, x_train, y_train, steps, options, console)
    result = model.evaluate(x_test, y_test, batch_size=options.batch_size, verbose=0, return_dict=True)
    console.print(
        f"[bold]test[/]   loss {result['loss']:.4f}  accuracy [bold green]{result['accuracy']:.4f}[/]", highlight=False
    )
    if options.compare:
        compare(demo, ours, x_train, y_train, options, console)


def load(demo: Demo, options: Options) -> Dataset:
    """The images. If they are not the real ones, one line says so."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", StandInDataWarning)
        loaded = demo.load(options.samples, options.samples and min(options.samples, 10_000))
    for warning in caught:
        make_console(stderr=True).print(str(warning.message), style="bold yellow", markup=False, soft_wrap=True)
    return loaded


def configure(devices: int) -> ipu.ipu_strategy.IPUStrategy:
    """A strategy for this number of devices."""
    cfg = ipu.config.IPUConfig()
    cfg.auto_select_ipus = devices
    cfg.configure_ipu_system()
    return ipu.ipu_strategy.IPUStrategy()


def split(model: keras.Model, options: Options) -> keras.Model:
    """Cut a model into stages and set what an update accumulates, as the options say."""
    if options.stages == 1:
        model.set_gradient_accumulation_options(options.accumulated)
        return model
    schedule = options.schedule or "Grouped"
    ipu.schedules.by_name(schedule).table(options.stages, options.accumulated)  # raises if they do not go together
    model.set_pipeline_stage_assignment("auto", stages=options.stages, print_fn=None)
    model.set_pipelining_options(options.accumulated, pipeline_schedule=schedule)
    return model


def describe(demo: Demo, loaded: Dataset) -> str:
    """The number and kind of images. Stand-in data is never presented as the real data."""
    stand_in = f"[bold yellow]{demo.stand_in}, not {demo.dataset}[/]"
    return f"{len(loaded.x_train)} images of {stand_in if loaded.source == 'stand-in' else demo.dataset}"


def describe_split(options: Options) -> str:
    """The devices and what they do."""
    parts = [validate.counted(options.devices, "device")]
    if options.stages > 1:
        replicas = validate.counted(options.replicas, "replica")
        parts.append(f"{replicas} of {options.stages} stages ({options.schedule or 'Grouped'})")
    if options.accumulated > 1:
        parts.append(f"{options.accumulated} micro-batches per update")
    return ", ".join(parts)


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


def compare(demo: Demo, ours: EpochTimes, x: np.ndarray, y: np.ndarray, options: Options, console: Console) -> None:
    """Print one line: microseconds per step with OpenIPU and with plain Keras, both without compiling."""
    if options.epochs == 1:
        console.print("There is no comparison, because the only epoch includes compiling. Use --epochs 2 or more.")
        return
    rows = min(len(x), _COMPARED_STEPS * options.batch_size)
    with console.status("Measuring plain Keras ..."):
        model = demo.compiled(demo.model(), 1)
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
