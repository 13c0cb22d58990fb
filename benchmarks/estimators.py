"""`python -m benchmarks.estimators`: `IPUEstimator.train` against `fit` of the same CNN on the same CIFAR-10 images.

Both run alternately in one process, with executions of the same length. The estimator reads its batches from `input_fn`
and ends each `train` with a checkpoint, which counts towards its time; `fit` has the images on the device.
"""

import argparse
import json
import os
import pathlib
import statistics
import sys
import tempfile
import time
from collections.abc import Callable

import openipu as ipu
from openipu.estimator import EstimatorSpec

import keras

from benchmarks.measure import THROUGHPUT, in_turns, throughput

RESULTS = pathlib.Path(__file__).parent / "results"
sys.path.insert(0, str(RESULTS.parent.parent / "examples" / "cifar10"))

from cifar10 import layers, load, mean_loss, network, train_input  # noqa: E402

PER_EXECUTION = 100


def model_fn(features, labels, mode):
    """The network of the CIFAR-10 examples, to be trained."""
    loss = mean_loss(labels, network(features))
    return EstimatorSpec(mode, loss=loss, train_op=keras.optimizers.SGD(0.01).minimize(loss))


def fitted(images, labels, batch: int, steps: int):
    """A function that trains with `fit`."""
    with ipu.ipu_strategy.IPUStrategy().scope():
        model = keras.Sequential([keras.Input((32, 32, 3), dtype="uint8"), keras.layers.Rescaling(1 / 255), *layers()])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.SGD(0.01), loss, steps_per_execution=PER_EXECUTION)
    rows = batch * steps
    return lambda: model.fit(images[:rows], labels[:rows], batch_size=batch, verbose=0)


def estimated(images, labels, batch: int, steps: int, folder: str):
    """A function that trains with an estimator."""
    run = ipu.ipu_run_config.IPURunConfig(iterations_per_loop=PER_EXECUTION)
    config = ipu.ipu_run_config.RunConfig(model_dir=folder, ipu_run_config=run, save_summary_steps=None)
    estimator = ipu.ipu_estimator.IPUEstimator(model_fn, config=config)
    return lambda: estimator.train(train_input(images, labels, batch), steps=steps)


def timed(run: Callable[[], object], steps: int) -> Callable[[], float]:
    """A function that runs and returns the microseconds per step."""

    def seconds() -> float:
        start = time.perf_counter()
        run()
        return 1e6 * (time.perf_counter() - start) / steps

    return seconds


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.estimators")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--name", default="cpu-estimators")
    options = parser.parse_args()
    (images, labels), _ = load()
    config = ipu.config.IPUConfig()
    config.auto_select_ipus = 1
    config.configure_ipu_system()
    with tempfile.TemporaryDirectory() as folder:
        runners = {
            "fit": fitted(images, labels, options.batch, options.steps),
            "IPUEstimator.train": estimated(images, labels, options.batch, options.steps, folder),
        }
        times = in_turns({name: timed(run, options.steps) for name, run in runners.items()}, options.rounds)
    command = " ".join(["python -m benchmarks.estimators", *sys.argv[1:]])
    lines = [f"Measured {time.strftime('%Y-%m-%d')} on {os.cpu_count()} cores; command: `{command}`.", ""]
    lines += [f"| CIFAR-10 CNN | us per step | throughput / fit, {THROUGHPUT} |", "|---" * 4 + "|"]
    lines += [
        f"| {name} | {statistics.median(values):.0f} | {throughput(values, times['fit'])} |"
        for name, values in times.items()
    ]
    text = "\n".join(lines) + "\n"
    print(text)
    (RESULTS / f"{options.name}.json").write_text(json.dumps({"command": command, "us": times}, indent=1) + "\n")
    (RESULTS / f"{options.name}.md").write_text(text)


if __name__ == "__main__":
    main()
