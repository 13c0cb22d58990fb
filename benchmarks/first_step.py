"""`python -m benchmarks.first_step`: seconds to the first step, and microseconds per step, of models with many layers.

Each measurement is one process without a cache, so everything is compiled in it. Plain Keras runs in the peers'
environment, in turns with ours. Results go to benchmarks/results/NAME.json and NAME.md. What was measured before on
this machine for other models stays there, so that one model at a time can be measured (`--models unet`).
"""

import argparse
import json
import os
import pathlib
import platform
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from benchmarks.measure import ROOT, Entry, make_peers, measure
from benchmarks.models import CASES, LARGER

PEERS = ["jax", "tensorflow"]
TAIL = 3
"""Samples in the smaller last batch, where there is one."""


@dataclass(frozen=True)
class Point:
    """A model and how it is run."""

    model: str
    per_execution: str
    tail: int

    def entry(self, who: str) -> Entry:
        """The process that measures it."""
        return Entry(self.model, who, self.per_execution, epochs=4, tail=self.tail)


@dataclass(frozen=True)
class Measured:
    """What was measured at a point, for everyone."""

    date: str
    made: dict[str, list[float]] = field(default_factory=dict)
    """Seconds in which the model was made, by round."""
    first: dict[str, list[float]] = field(default_factory=dict)
    """Seconds from calling `fit` to the first step, by round."""
    step: dict[str, list[float]] = field(default_factory=dict)
    """Microseconds per step, by epoch."""

    def add(self, who: str, made: float, first: float, steps: list[float]) -> None:
        """One more round."""
        self.made.setdefault(who, []).append(made)
        self.first.setdefault(who, []).append(first)
        self.step.setdefault(who, []).extend(steps)


Results = dict[Point, Measured]


def points(models: list[str]) -> Iterator[Point]:
    """What is measured for each model: a step per launch, and several with a smaller batch at the end."""
    for model in models:
        yield Point(model, "1", 0)
        yield Point(model, "10", TAIL)


def medians(values: dict[str, list[float]]) -> dict[str, float]:
    """The median of each."""
    return {who: statistics.median(numbers) for who, numbers in values.items()}


def table(results: Results, whos: list[str], machine: str) -> str:
    """Markdown: medians of everyone, and ours against plain Keras on JAX and against the best peer."""
    peers = [who for who in whos if who != "openipu"]
    options = "" if peers == PEERS else f" --peers {' '.join(peers)}"
    lines = [f"Measured on {machine}; command: `python -m benchmarks.first_step{options}`.", ""]
    lines += ["The first step is counted from calling `fit`, and then from the beginning of making the model.", ""]
    columns = ["model", "steps per execution", "last partial batch"]
    columns += ["first step, s", *(f"Keras on {p}, s" for p in peers), "this / Keras on jax"]
    columns += ["with making the model, s", "Keras on jax, s", "this / Keras on jax"]
    columns += ["us per step", *(f"Keras on {p}, us" for p in peers), "best peer / this", "rounds", "date"]
    lines += [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for point, measured in results.items():
        made, first, step = medians(measured.made), medians(measured.first), medians(measured.step)
        both = {who: made[who] + first[who] for who in whos}
        cells = [point.model, point.per_execution, "yes" if point.tail else "no"]
        cells += [f"{first[who]:.1f}" for who in ("openipu", *peers)]
        cells.append(f"{first['openipu'] / first['jax']:.2f}")
        cells += [f"{both['openipu']:.1f}", f"{both['jax']:.1f}", f"{both['openipu'] / both['jax']:.2f}"]
        cells += [f"{step[who]:.0f}" for who in ("openipu", *peers)]
        cells.append(f"{min(step[who] for who in peers) / step['openipu']:.2f}")
        cells += [str(len(measured.first["openipu"])), measured.date]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def measured_before(path: pathlib.Path, machine: str, whos: list[str]) -> Results:
    """What the file holds about this machine and these contenders."""
    kept = json.loads(path.read_text()) if path.exists() else {}
    if (kept.get("machine"), kept.get("whos")) != (machine, whos):
        return {}
    return {
        Point(row["model"], row["per_execution"], row["tail"]): Measured(
            row["date"], row["made"], row["first"], row["step"]
        )
        for row in kept["results"]
    }


def write(path: pathlib.Path, results: Results, machine: str, whos: list[str]) -> str:
    """Keep the numbers and the table, in the order of the models."""
    results = dict(sorted(results.items(), key=lambda item: list(CASES).index(item[0].model)))
    rows = [{**vars(point), **vars(measured)} for point, measured in results.items()]
    path.write_text(json.dumps({"machine": machine, "whos": whos, "results": rows}, indent=1) + "\n")
    text = table(results, whos, machine)
    path.with_suffix(".md").write_text(text)
    return text


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.first_step")
    parser.add_argument("--models", nargs="+", default=["cnn", "cifar", *LARGER], choices=list(CASES))
    parser.add_argument("--peers", nargs="+", default=PEERS, help="backends of plain Keras, jax first")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--own-peers", action="store_true", help="run the peers in this environment")
    parser.add_argument("--machine", default=f"{os.cpu_count()} cores ({platform.machine()})")
    parser.add_argument("--name", default="cpu-first-step")
    options = parser.parse_args()
    os.environ["OPENIPU_CACHE"] = "off"
    python = {"own": sys.executable, "peers": sys.executable if options.own_peers else make_peers()}
    whos = ["openipu", *options.peers]
    todo = list(points(options.models))
    results = {point: Measured(time.strftime("%Y-%m-%d")) for point in todo}
    for number in range(options.rounds):
        for i, point in enumerate(todo):
            for who in whos[:: -1 if number % 2 else 1]:
                found = measure(point.entry(who), python)
                results[point].add(who, found["made_s"], found["first_execution_s"], found["us_per_step"])
            seconds = {who: round(first, 1) for who, first in medians(results[point].first).items()}
            print(f"round {number + 1}/{options.rounds} {i + 1}/{len(todo)} {point} first step {seconds}", flush=True)
    path = ROOT / "benchmarks" / "results" / f"{options.name}.json"
    print(write(path, measured_before(path, options.machine, whos) | results, options.machine, whos))


if __name__ == "__main__":
    main()
