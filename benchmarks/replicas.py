"""`python -m benchmarks.replicas`: the cost of accumulation and replicas, next to the plain step in the same run."""

import argparse
import os
import statistics
import sys
import time

from benchmarks.measure import Entry, make_peers, run_rounds, write
from benchmarks.models import CASES

MANY = 8


def entries(model: str) -> list[Entry]:
    """The plain step, 8 accumulated micro-batches here and in Keras on JAX, and 1 to 8 replicas of one global batch."""
    steps, batch = (1600, 32) if model == "mlp" else (96, 64)
    replicas = [
        Entry(model, "openipu", steps=steps * r // 2, batch=batch * 2 // r, ipus=r) for r in (1, 2, 4, 8)
    ]  # the same samples per update: 1 device with the double batch, 2 with the batch, ...
    return [
        Entry(model, "openipu", steps=steps, batch=batch),
        Entry(model, "openipu", steps=steps, batch=batch, accumulate=MANY),
        Entry(model, "jax", steps=steps, batch=batch),
        Entry(model, "jax", steps=steps, batch=batch, accumulate=MANY),
        *replicas,
    ]


def table(results: dict[Entry, list[float]], facts: dict[str, object]) -> str:
    """Markdown with ratios."""
    lines = [f"Measured {facts['date']} on {facts['machine']}; command: `{facts['command']}`.", ""]
    for model in dict.fromkeys(e.model for e in results):
        times = {e: statistics.median(v) for e, v in results.items() if e.model == model}
        plain, accumulated, keras, keras_accumulated, *replicas = times.items()
        lines += [
            f"### {model}: accumulating {MANY} micro-batches of {plain[0].batch}",
            "",
            "| who | plain, us per micro-batch | accumulated | accumulated / plain | Keras accumulated / this |",
            "|---|---|---|---|---|",
        ]
        for who, (_, a), (_, b) in (("openipu", plain, accumulated), ("Keras on JAX", keras, keras_accumulated)):
            lines.append(f"| {who} | {a:.0f} | {b:.0f} | {b / a:.2f} | {keras_accumulated[1] / b:.2f} |")
        first = replicas[0]
        lines += ["", f"### {model}: replicas of one global batch of {first[0].batch}", ""]
        lines += ["| replicas | micro-batch | us per update | throughput / one device |", "|---|---|---|---|"]
        for e, t in replicas:
            lines.append(f"| {e.ipus} | {e.batch} | {t * e.ipus:.0f} | {first[1] / (t * e.ipus):.2f} |")
        lines.append("")
    return "\n".join(lines)


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.replicas")
    parser.add_argument("--models", nargs="+", default=["mlp", "cnn"], choices=list(CASES))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--name", default="cpu-replicas")
    options = parser.parse_args()
    python = {"own": sys.executable, "peers": make_peers()}
    results = run_rounds([e for model in options.models for e in entries(model)], python, options.rounds)
    facts: dict[str, object] = {
        "date": time.strftime("%Y-%m-%d"),
        "machine": f"{os.cpu_count()} cores",
        "command": " ".join(["python -m benchmarks.replicas", *sys.argv[1:]]),
    }
    write(options.name, facts, results, table(results, facts))


if __name__ == "__main__":
    main()
