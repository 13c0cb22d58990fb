"""`python -m benchmarks.summary`: the one table for README and landing page, from what `python -m benchmarks` measured.

It goes to benchmarks/results/summary.md. README.md has a copy, and a test compares the two.
"""

import json
import statistics
from pathlib import Path
from typing import Any

from benchmarks.measure import ROOT
from benchmarks.models import CASES

RESULTS = ROOT / "benchmarks" / "results"
MACHINES = {"2 cores": "cpu", "H200": "h200"}
MODELS = {"mlp": "MLP", "cnn": "MNIST CNN", "cifar": "CIFAR-10 CNN"}
BACKENDS = {"jax": "JAX", "tensorflow": "TensorFlow", "torch": "torch"}


def best(rows: list[dict[str, Any]], *who: str) -> tuple[float, str]:
    """The smallest median among these contenders, and whose it is."""
    return min((statistics.median(row["us_per_step"]), row["who"]) for row in rows if row["who"] in who)


def number(value: float) -> str:
    """Whole microseconds, with a space between thousands."""
    return f"{value:,.0f}".replace(",", " ")


def table(folder: Path = RESULTS) -> str:
    """Markdown: one row for each machine and model."""
    lines = ["| model | OpenIPU | best peer (Keras on) | hand-written `lax.scan` |", "|---|---|---|---|"]
    for machine, name in MACHINES.items():
        results = json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))["results"]
        for model, title in MODELS.items():
            rows = [row for row in results if row["model"] == model]
            (ours, _), (peer, who), (scan, _) = best(rows, "openipu"), best(rows, *BACKENDS), best(rows, "scan")
            lines.append(
                f"| {machine}: {title}, batch {rows[0]['batch'] or CASES[model].batch} | **{number(ours)}** "
                f"| {number(peer)} ({BACKENDS[who]}) | {number(scan)} |"
            )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    (RESULTS / "summary.md").write_text(table(), encoding="utf-8")
    print(table())
