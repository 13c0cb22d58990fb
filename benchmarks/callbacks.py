"""`python -m benchmarks.callbacks`: what asynchronous callbacks cost, at about 1,000 steps a second.

One process trains the same model alternately with batch callbacks once per execution and with asynchronous callbacks
for every step; once with a callback that keeps the loss and once with Keras' progress bar.
"""

import argparse
import contextlib
import io
import json
import os
import pathlib
import statistics
import sys
import time
from functools import partial
from typing import Any

import openipu as ipu

import keras
import numpy as np

from benchmarks.measure import THROUGHPUT, in_turns, throughput

STEPS, BATCH, WIDTH = 1000, 64, 512
CASES = {"callback": 0, "progress bar": 1}


def make_model(asynchronous: bool) -> Any:
    """A dense network whose step takes about a millisecond on one CPU core."""
    keras.utils.set_random_seed(0)
    with ipu.ipu_strategy.IPUStrategy().scope():
        model = keras.Sequential(
            [keras.Input((WIDTH,)), keras.layers.Dense(WIDTH, activation="relu"), keras.layers.Dense(10)]
        )
    model.set_asynchronous_callbacks(asynchronous)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("sgd", loss, metrics=["accuracy"], steps_per_execution=STEPS)
    return model


class Losses(keras.callbacks.Callback):
    """Keeps the loss of each batch it hears of."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[float] = []

    def on_train_batch_end(self, _batch: int, logs: Any = None) -> None:
        """Keep it."""
        self.seen.append(float(logs["loss"]))


def epoch_seconds(model: Any, data: tuple[Any, Any], verbose: int, losses: Losses) -> float:
    """Seconds of one epoch, which is one execution."""
    start = time.perf_counter()
    with contextlib.redirect_stdout(io.StringIO()):
        model.fit(*data, batch_size=BATCH, verbose=verbose, shuffle=False, callbacks=[losses])
    return time.perf_counter() - start


def measure(rounds: int) -> list[dict[str, Any]]:
    """One row per case."""
    generator = np.random.default_rng(0)
    data = generator.normal(size=(STEPS * BATCH, WIDTH)).astype("float32"), generator.integers(0, 10, STEPS * BATCH)
    rows = []
    for name, verbose in CASES.items():
        told = Losses()
        runners = {
            "plain": partial(epoch_seconds, make_model(asynchronous=False), data, verbose, Losses()),
            "live": partial(epoch_seconds, make_model(asynchronous=True), data, verbose, told),
        }
        times = in_turns(runners, rounds)
        rows.append({"case": name, "calls_per_epoch": len(told.seen) // (rounds + 1), "seconds": times})
    return rows


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.callbacks")
    parser.add_argument("--rounds", type=int, default=24)
    parser.add_argument("--name", default="cpu-callbacks")
    options = parser.parse_args()
    rows = measure(options.rounds)
    command = " ".join(["python -m benchmarks.callbacks", *sys.argv[1:]])
    lines = [f"Measured {time.strftime('%Y-%m-%d')} on {os.cpu_count()} cores; command: `{command}`.", ""]
    lines += [f"| with | steps/s | asynchronous | calls per epoch | throughput kept, {THROUGHPUT} |", "|---" * 6 + "|"]
    for row in rows:
        plain, live = row["seconds"]["plain"], row["seconds"]["live"]
        speeds = f"{STEPS / statistics.median(plain):.0f} | {STEPS / statistics.median(live):.0f}"
        lines.append(f"| {row['case']} | {speeds} | {row['calls_per_epoch']} | {throughput(live, plain)} |")
    text = "\n".join(lines) + "\n"
    print(text)
    folder = pathlib.Path(__file__).parent / "results"
    folder.mkdir(exist_ok=True)
    (folder / f"{options.name}.md").write_text(text)
    (folder / f"{options.name}.json").write_text(json.dumps({"command": command, "results": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
