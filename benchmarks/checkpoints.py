"""`python -m benchmarks.checkpoints`: what saving after every execution costs, compared with the same `fit` without it.

Both are measured alternately in one process, so that a busy minute affects both.
"""

import argparse
import os
import statistics
import tempfile
import time
from pathlib import Path

import openipu as ipu

from benchmarks.measure import THROUGHPUT, Entry, in_turns, throughput, write
from benchmarks.models import CASES, compile_model, data, keras_api
from benchmarks.worker import make_clock

EXECUTIONS = {"mlp": (100, 625, 1875), "cnn": (10, 100), "cifar": (10, 40)}
"""Steps per execution for each model; the last one is an epoch."""
ROUNDS = {"mlp": 24, "cnn": 8, "cifar": 6}
"""Rounds for each model; short ones vary more."""


def measure(model: str, per_execution: int, rounds: int, epochs: int) -> tuple[list[float], list[float], float]:
    """Microseconds per step in each round, without and with checkpoints; checkpoints per execution.

    A round is the mean over all its epochs but the first, because epochs differ in their number of checkpoints.
    """
    case = CASES[model]
    with ipu.ipu_strategy.IPUStrategy().scope():
        network = keras_api(model)
    compile_model(network, case, per_execution)
    x, y = data(case, case.batch, case.steps)

    def fit(*callbacks: object) -> float:
        clock = make_clock()
        network.fit(x, y, batch_size=case.batch, epochs=epochs + 1, verbose=0, callbacks=[clock, *callbacks])
        return statistics.mean(clock.epochs[1:]) / case.steps * 1e6

    counts = []

    def fit_saving() -> float:
        with tempfile.TemporaryDirectory() as folder:
            taken = fit(ipu.callbacks.Checkpoint(folder, keep=None))
            counts.append(len(list(Path(folder).iterdir())))
        return taken

    times = in_turns({"plain": fit, "saving": fit_saving}, rounds)
    executions = (epochs + 1) * -(-case.steps // per_execution)
    return times["plain"], times["saving"], statistics.mean(counts) / executions


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.checkpoints")
    parser.add_argument("--models", nargs="+", default=["mlp", "cnn", "cifar"], choices=list(CASES))
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--name", default="cpu-checkpoints")
    options = parser.parse_args()
    facts: dict[str, object] = {"date": time.strftime("%Y-%m-%d"), "machine": f"{os.cpu_count()} cores"}
    lines = [f"Measured {facts['date']} on {facts['machine']}; command: `python -m benchmarks.checkpoints`.", ""]
    lines += [
        f"| model | ms per execution | checkpoints each | us per step | saving | throughput kept, {THROUGHPUT} |",
        "|---" * 7 + "|",
    ]
    results = {}
    for model in options.models:
        for steps in EXECUTIONS[model]:
            plain, saving, share = measure(model, steps, options.rounds or ROUNDS[model], options.epochs)
            a, b = statistics.median(plain), statistics.median(saving)
            lines.append(
                f"| {model} | {a * steps / 1e3:.0f} | {share:.2f} | {a:.0f} | {b:.0f} | {throughput(saving, plain)} |"
            )
            results[Entry(model, "openipu", str(steps))] = plain
            results[Entry(model, "openipu, saving", str(steps))] = saving
            print(lines[-1], flush=True)
    write(options.name, facts, results, "\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
