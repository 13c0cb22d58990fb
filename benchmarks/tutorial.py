"""`python -m benchmarks.tutorial`: the completed example of the tutorial on MNIST, step by step through its options.

Each row runs in its own process, which calls the example's `main` as its command line does, with a clock as callback.
A step is a batch of one replica, as in the progress bar. The first epoch, which compiles, is not counted.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.measure import ROOT

EXAMPLE = ROOT / "examples" / "keras_tutorial" / "completed_example"


@dataclass(frozen=True)
class Row:
    """One run, and what the tutorial says about it."""

    name: str
    options: str
    tutorial_us: str
    tutorial_accuracy: float | None


ROWS = (
    Row("plain Keras on the CPU", "", "10 000 (CPU)", 0.9289),
    Row("one device, one launch per step", "--use-ipu --steps-per-execution 1", "3 000", 0.9294),
    Row("one device, one launch per epoch", "--use-ipu", "222", 0.9326),
    Row("two replicas", "--use-ipu --ipus 2", "134", 0.9304),
    Row("pipeline of two stages", "--use-ipu --pipelining", "", None),
)


@dataclass(frozen=True)
class Result:
    """What one run gave."""

    us_per_step: list[float]
    """Of each epoch after the first."""
    accuracy: float
    test_accuracy: float
    data: str


def work(options: list[str]) -> None:
    """Run the example in this process and print a line of JSON."""
    sys.path.insert(0, str(EXAMPLE))
    from openipu import datasets

    import main as example

    from benchmarks.worker import make_clock

    clock = make_clock()
    found = example.main(options, callbacks=[clock])
    times = [seconds / clock.params["steps"] * 1e6 for seconds in clock.epochs[1:]]
    print(json.dumps({**found, "us_per_step": times, "data": datasets.mnist(1, 1).source}))


def run(row: Row, options: list[str]) -> Result:
    """One row, in its own process."""
    words = [sys.executable, "-m", "benchmarks.tutorial", "work", *row.options.split(), *options]
    environment = {name: value for name, value in os.environ.items() if name != "KERAS_BACKEND"}
    done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(words)} failed:\n{done.stderr[-2000:]}")
    return Result(**json.loads(done.stdout.strip().splitlines()[-1]))


def table(results: dict[Row, Result], facts: dict[str, Any]) -> str:
    """Markdown: this machine next to the tutorial's IPUs."""
    columns = ["", "options", "us per step", "accuracy", "test accuracy", "tutorial: us per step", "accuracy"]
    lines = [
        f"Measured {facts['date']} on {facts['machine']}; command: `{facts['command']}`. {facts['data']}, batch "
        f"{facts['batch']}, {facts['epochs']} epochs. Accuracy is that of the last epoch of training. The tutorial's "
        "numbers are those its text prints, from IPUs.",
        "",
        f"| {' | '.join(columns)} |",
        "|---" * len(columns) + "|",
    ]
    for row, result in results.items():
        theirs = "" if row.tutorial_accuracy is None else f"{row.tutorial_accuracy:.4f}"
        cells = [row.name, f"`{row.options}`" if row.options else "", f"{statistics.median(result.us_per_step):.0f}"]
        cells += [f"{result.accuracy:.4f}", f"{result.test_accuracy:.4f}", row.tutorial_us, theirs]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tutorial")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--epochs", type=int, default=3, help="2 or more: the first one is not counted")
    parser.add_argument("--samples", type=int, help="how many images to use (for a quick look)")
    parser.add_argument("--name", default="tutorial", help="of the files in benchmarks/results")
    options = parser.parse_args()
    more = ["--batch-size", str(options.batch_size), "--epochs", str(options.epochs)]
    more += ["--samples", str(options.samples)] if options.samples else []
    results = {}
    for row in ROWS:
        results[row] = run(row, more)
        print(row.name, results[row], flush=True)
    source = next(iter(results.values())).data
    facts: dict[str, Any] = {
        "date": time.strftime("%Y-%m-%d"),
        "machine": f"{os.cpu_count()} cores",
        "command": " ".join(["python -m benchmarks.tutorial", *sys.argv[1:]]),
        "data": "STAND-IN DATA, not MNIST" if source == "stand-in" else "MNIST",
        "batch": options.batch_size,
        "epochs": options.epochs,
    }
    folder = ROOT / "benchmarks" / "results"
    rows = [{**asdict(row), **asdict(result)} for row, result in results.items()]
    (folder / f"{options.name}.json").write_text(json.dumps({**facts, "results": rows}, indent=1) + "\n")
    text = table(results, facts)
    (folder / f"{options.name}.md").write_text(text)
    print(text)


if __name__ == "__main__":
    work(sys.argv[2:]) if sys.argv[1:2] == ["work"] else main()
