"""One measurement: a worker process, in this environment or in the peers' environment."""

import compileall
import json
import os
import pathlib
import statistics
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parent.parent
PEERS = ROOT / ".peers"
PACKAGES = ["keras==3.15.1", "jax==0.10.2", "tensorflow-cpu==2.21.0", "torch==2.13.0"]

# As pip does for packages that it installs, so for the peers: otherwise every process would compile OpenIPU's modules.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
compileall.compile_dir(ROOT / "src", quiet=1)


@dataclass(frozen=True)
class Entry:
    """One row of the table."""

    model: str
    who: str  # openipu, scan, or a backend of plain Keras
    per_execution: str = "epoch"
    steps: int | None = None
    epochs: int = 3
    batch: int | None = None
    ipus: int = 1
    accumulate: int = 1
    tail: int = 0

    def command(self, python: dict[str, str]) -> tuple[list[str], dict[str, str]]:
        """The worker's command line and environment."""
        peer = self.who not in ("openipu", "scan")
        words = [
            python["peers" if peer else "own"],
            "-m",
            "benchmarks.worker",
            "keras" if peer else self.who,
            self.model,
        ]
        words += ["--steps-per-execution", self.per_execution, "--epochs", str(self.epochs)]
        words += ["--steps", str(self.steps)] if self.steps else []
        words += ["--batch", str(self.batch)] if self.batch else []
        words += ["--ipus", str(self.ipus), "--accumulate", str(self.accumulate), "--tail", str(self.tail)]
        backend = {"KERAS_BACKEND": self.who} if peer else {}
        return words, os.environ | {"TF_CPP_MIN_LOG_LEVEL": "3"} | backend


def measure(entry: Entry, python: dict[str, str], **variables: str) -> dict[str, Any]:
    """One process, with these environment variables."""
    words, environment = entry.command(python)
    done = subprocess.run(words, cwd=ROOT, env=environment | variables, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(words)} failed:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def make_peers() -> str:
    """The environment of the peers, installed on first use."""
    python = PEERS / "bin" / "python"
    if not python.exists():
        print("installing the peers into .peers (once) ...", flush=True)
        subprocess.run([sys.executable, "-m", "venv", str(PEERS)], check=True)
        subprocess.run([str(python), "-m", "pip", "install", "-q", *PACKAGES], check=True)
    return str(python)


def write(name: str, facts: dict[str, object], results: "dict[Entry, list[float]]", text: str) -> None:
    """Keep the numbers and the table."""
    folder = ROOT / "benchmarks" / "results"
    folder.mkdir(exist_ok=True)
    rows = [{**vars(e), "us_per_step": v} for e, v in results.items()]
    (folder / f"{name}.json").write_text(json.dumps({**facts, "results": rows}, indent=1) + "\n")
    (folder / f"{name}.md").write_text(text)
    print(text)


def in_turns(runners: "dict[str, Callable[[], float]]", rounds: int) -> "dict[str, list[float]]":
    """What each runner returns in each round, after a first round that compiles.

    Every other round runs in reverse order, so that nobody always comes first.
    """
    for run in runners.values():
        run()
    values: dict[str, list[float]] = {name: [] for name in runners}
    for number in range(rounds):
        for name in list(runners)[:: -1 if number % 2 else 1]:
            values[name].append(runners[name]())
    return values


def throughput(times: "list[float]", base: "list[float]") -> str:
    """Two columns of a table: the throughput of one against the other, by medians and by rounds.

    The machine's speed changes by a tenth within a minute, so neighbours in time are compared as well. The distance
    between the quartiles shows how reliable the median is.
    """
    ratios = [b / a for a, b in zip(times, base, strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
    return f"{statistics.median(base) / statistics.median(times):.2f} | {middle:.2f} ({low:.2f} - {high:.2f})"


THROUGHPUT = "by medians | by rounds (quartiles)"
"""The headings of these columns."""


def run_rounds(todo: list[Entry], python: dict[str, str], rounds: int) -> "dict[Entry, list[float]]":
    """Measure everything `rounds` times, interleaved, so that a busy minute does not affect one entry only."""
    results: dict[Entry, list[float]] = {entry: [] for entry in todo}
    for number in range(rounds):
        for i, entry in enumerate(todo):
            results[entry] += measure(entry, python)["us_per_step"]
            what = f"{entry.model} {entry.who} {entry.per_execution} ipus={entry.ipus} accumulate={entry.accumulate}"
            median = statistics.median(results[entry])
            print(f"round {number + 1}/{rounds} {i + 1}/{len(todo)} {what:50s} {median:10.0f} us/step", flush=True)
    return results
