"""`python -m benchmarks.first_step`: seconds to the first step, and microseconds per step, of models with many layers.

Each measurement is one process without a cache, so everything is compiled in it. Plain Keras runs in the peers'
environment, in turns with ours. Results go to benchmarks/results/NAME.json and NAME.md.
"""

import argparse
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass

from benchmarks.measure import ROOT, Entry, make_peers, measure
from benchmarks.models import CASES, LARGER

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
        return Entry(self.model, who, self.per_execution, epochs=3, tail=self.tail)


def points(models: list[str]) -> Iterator[Point]:
    """What is measured for each model."""
    for model in models:
        for per_execution in ("1", "10"):
            for tail in (0, TAIL):
                yield Point(model, per_execution, tail)


def table(results: dict[Point, dict[str, dict[str, list[float]]]], whos: list[str], facts: dict[str, str]) -> str:
    """Markdown: medians of everyone, and ours against plain Keras on JAX and against the best peer."""

    def middle(point: Point, who: str, what: str) -> float:
        return statistics.median(results[point][who][what])

    peers = [who for who in whos if who != "openipu"]
    lines = [f"Measured {facts['date']} on {facts['machine']}; command: `{facts['command']}`.", ""]
    columns = ["model", "steps per execution", "last partial batch"]
    columns += ["first step, s", *(f"Keras on {p}, s" for p in peers), "this / Keras on jax"]
    columns += ["us per step", *(f"Keras on {p}, us" for p in peers), "best peer / this"]
    lines += [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for point in results:
        first, step = ({who: middle(point, who, what) for who in whos} for what in ("first", "step"))
        cells = [point.model, point.per_execution, "yes" if point.tail else "no"]
        cells += [f"{first[who]:.1f}" for who in ("openipu", *peers)]
        cells.append(f"{first['openipu'] / first['jax']:.2f}")
        cells += [f"{step[who]:.0f}" for who in ("openipu", *peers)]
        cells.append(f"{min(step[who] for who in peers) / step['openipu']:.2f}")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.first_step")
    parser.add_argument("--models", nargs="+", default=["cnn", "cifar", *LARGER], choices=list(CASES))
    parser.add_argument("--peers", nargs="+", default=["jax", "tensorflow"], help="backends of plain Keras, jax first")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--own-peers", action="store_true", help="run the peers in this environment")
    parser.add_argument("--machine", default=f"{os.cpu_count()} cores ({platform.machine()})")
    parser.add_argument("--name", default="cpu-first-step")
    options = parser.parse_args()
    os.environ["OPENIPU_CACHE"] = "off"
    python = {"own": sys.executable, "peers": sys.executable if options.own_peers else make_peers()}
    whos = ["openipu", *options.peers]
    todo = list(points(options.models))
    results = {point: {who: {"first": [], "step": []} for who in whos} for point in todo}
    for number in range(options.rounds):
        for i, point in enumerate(todo):
            for who in whos[:: -1 if number % 2 else 1]:
                found = measure(point.entry(who), python)
                results[point][who]["first"].append(found["first_execution_s"])
                results[point][who]["step"] += found["us_per_step"]
            seconds = {who: round(statistics.median(results[point][who]["first"]), 1) for who in whos}
            print(f"round {number + 1}/{options.rounds} {i + 1}/{len(todo)} {point} first step {seconds}", flush=True)
    facts = {
        "date": time.strftime("%Y-%m-%d"),
        "machine": options.machine,
        "command": " ".join(["python -m benchmarks.first_step", *sys.argv[1:]]),
    }
    text = table(results, whos, facts)
    folder = ROOT / "benchmarks" / "results"
    rows = [{**vars(point), "who": who, **values} for point, by in results.items() for who, values in by.items()]
    (folder / f"{options.name}.json").write_text(json.dumps({**facts, "results": rows}, indent=1) + "\n")
    (folder / f"{options.name}.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
