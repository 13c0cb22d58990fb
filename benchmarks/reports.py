"""`python -m benchmarks.reports`: what a report costs, in throughput and in memory.

One process trains the same model alternately with and without a report, in executions of about 1, 10 and 100
milliseconds on one CPU core. The time is that of an epoch; what a report costs at the end of a run,
whatever its length, is a column of its own. Memory is the most that a process has needed, in processes of their own.
"""

import argparse
import contextlib
import json
import os
import pathlib
import re
import statistics
import subprocess
import sys
import tempfile
import time
from functools import partial
from typing import Any

import openipu as ipu

import keras
import numpy as np

from benchmarks.measure import ROOT, THROUGHPUT, in_turns, throughput

STEPS, BATCH, WIDTH = 1000, 64, 512
LENGTHS = (1, 10, 100)
"""Steps of one execution; a step takes about a millisecond."""


class Epoch(keras.callbacks.Callback):
    """The seconds of an epoch, until its losses are there."""

    seconds = 0.0

    def on_epoch_begin(self, *_: object) -> None:
        """Start the clock."""
        self._began = time.perf_counter()

    def on_epoch_end(self, _epoch: int, logs: Any = None) -> None:
        """Stop it."""
        float(logs["loss"])
        self.seconds = time.perf_counter() - self._began


def make_model(steps_per_execution: int) -> Any:
    """A dense network whose step takes about a millisecond on one CPU core."""
    keras.utils.set_random_seed(0)
    with ipu.ipu_strategy.IPUStrategy().scope():
        model = keras.Sequential(
            [keras.Input((WIDTH,)), keras.layers.Dense(WIDTH, activation="relu"), keras.layers.Dense(10)]
        )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("sgd", loss, metrics=["accuracy"], steps_per_execution=steps_per_execution)
    return model


def make_data(steps: int) -> tuple[Any, Any]:
    """Random rows for an epoch."""
    generator = np.random.default_rng(0)
    return generator.normal(size=(steps * BATCH, WIDTH)).astype("float32"), generator.integers(0, 10, steps * BATCH)


def train(model: Any, data: tuple[Any, Any], folder: str | None, ends: list[float]) -> float:
    """Seconds of one epoch. What follows it is added to `ends`."""
    epoch = Epoch()
    began = time.perf_counter()
    with contextlib.nullcontext() if folder is None else ipu.report(folder):
        model.fit(*data, batch_size=BATCH, verbose=0, shuffle=False, callbacks=[epoch])
    ends.append(time.perf_counter() - began - epoch.seconds)
    return epoch.seconds


def measure(rounds: int, steps: int, folder: str) -> list[dict[str, Any]]:
    """One row per length of executions."""
    rows, data = [], make_data(steps)
    for length in LENGTHS:
        model = make_model(length)
        around: dict[str, list[float]] = {"plain": [], "report": []}
        runners = {
            "plain": partial(train, model, data, None, around["plain"]),
            "report": partial(train, model, data, folder, around["report"]),
        }
        times = in_turns(runners, rounds)
        rows.append({"length": length, "seconds": times, "around": {name: all[1:] for name, all in around.items()}})
    return rows


def memory(rounds: int, steps: int) -> dict[str, list[int]]:
    """The largest memory of processes that train with and without a report, in bytes."""
    found: dict[str, list[int]] = {"plain": [], "report": []}
    for _ in range(rounds):
        for name, values in found.items():
            words = [sys.executable, "-m", "benchmarks.reports", "--memory-of", name, "--steps", str(steps)]
            done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True)
            values.append(int(done.stdout.strip().splitlines()[-1]))
    return found


def memory_here(name: str, steps: int, folder: str) -> int:
    """The largest memory of this process after an epoch of short executions."""
    train(make_model(1), make_data(steps), folder if name == "report" else None, [])
    # Linux only. What `resource` says of a process begins with the memory of the one that has started it.
    return 1024 * int(re.findall(r"VmHWM:\s+(\d+) kB", pathlib.Path("/proc/self/status").read_text())[0])


def table(rows: list[dict[str, Any]], used: dict[str, list[int]], command: str, steps: int) -> str:
    """The results as Markdown."""
    lines = [f"Measured {time.strftime('%Y-%m-%d')} on {os.cpu_count()} cores; command: `{command}`.", ""]
    lines += [
        f"| steps per execution | ms per execution | seconds around an epoch | with a report | kept, {THROUGHPUT} |",
        "|---" * 6 + "|",
    ]
    for row in rows:
        plain, report = row["seconds"]["plain"], row["seconds"]["report"]
        around = " | ".join(f"{statistics.median(row['around'][name]):.2f}" for name in ("plain", "report"))
        each = 1e3 * statistics.median(plain) * row["length"] / steps
        lines.append(f"| {row['length']} | {each:.2f} | {around} | {throughput(report, plain)} |")
    plain, report = (statistics.median(used[name]) / 2**20 for name in ("plain", "report"))
    lines += ["", f"Memory of the process: {plain:.0f} MiB, with a report {report:.0f} MiB: {report - plain:+.0f} MiB."]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.reports")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--steps", type=int, default=STEPS, help="steps of an epoch")
    parser.add_argument("--name", default="cpu-reports")
    parser.add_argument("--memory-of", choices=["plain", "report"], help="only print the memory of such a process")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if options.memory_of:
            print(memory_here(options.memory_of, options.steps, folder))
            return
        rows = measure(options.rounds, options.steps, folder)
    used = memory(3, options.steps)
    command = " ".join(["python -m benchmarks.reports", *sys.argv[1:]])
    text = table(rows, used, command, options.steps)
    print(text)
    results = pathlib.Path(__file__).parent / "results"
    (results / f"{options.name}.md").write_text(text)
    facts = {"command": command, "results": rows, "memory": used}
    (results / f"{options.name}.json").write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    main()
