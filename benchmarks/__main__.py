"""`python -m benchmarks`: microseconds per step against real peers, in one run, medians over interleaved rounds.

Each measurement runs in its own process (worker.py). Peers run in their own environment (`.peers`), made on first use.
Results go to benchmarks/results/NAME.json and NAME.md.
"""

import argparse
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time

from benchmarks.measure import Entry, make_peers, measure, run_rounds, write
from benchmarks.models import CASES

PER_EXECUTION = ("1", "100", "epoch")


def entries(models: list[str], peers: list[str], steps: int | None, batch: int | None) -> list[Entry]:
    """Everything to measure. A plain scan of convolutions is 50 times slower on a CPU, so it runs few steps there."""
    rows = []
    for model in models:
        rows += [Entry(model, "openipu", n, steps, batch=batch) for n in PER_EXECUTION]
        few = 3 if model != "mlp" and not steps else steps
        rows.append(Entry(model, "scan", steps=few, epochs=1 if few == 3 else 3, batch=batch))
        # Keras on torch runs only one step at a time.
        peers_of = [(peer, n) for peer in peers for n in (PER_EXECUTION if peer != "torch" else PER_EXECUTION[:1])]
        rows += [Entry(model, peer, n, steps, 2, batch) for peer, n in peers_of]
    return rows


def peak() -> float:
    """GFLOP/s of a large float32 matrix product on this machine."""
    code = (
        "import time,jax,jax.numpy as n\na=n.ones((2048,2048));f=jax.jit(lambda a:a@a);f(a).block_until_ready()\n"
        "t=[]\nfor _ in range(12):\n s=time.perf_counter();f(a).block_until_ready();t.append(time.perf_counter()-s)\n"
        "print(2*2048**3/min(t)/1e9)"
    )
    return float(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)


# Multiplications and additions of the matrix products and convolutions of one training step, per sample:
# forward, weight gradient and input gradient (none for the first layer).
FLOP = {
    "mlp": 2 * (784 * 128 * 2 + 128 * 10 * 3),
    "cnn": 2 * (26 * 26 * 9 * 32 * 2 + 11 * 11 * 288 * 64 * 3 + 1600 * 10 * 3),
    "cifar": 2
    * (
        32 * 32 * 27 * 32 * 2
        + 30 * 30 * 288 * 32 * 3
        + 15 * 15 * 288 * 64 * 3
        + 13 * 13 * 576 * 64 * 3
        + 2304 * 512 * 3
        + 512 * 10 * 3
    ),
}


def first_step(python: dict[str, str]) -> dict[str, float]:
    """Seconds from calling `fit` to the end of the first step of the CNN, with an empty and with a warm cache."""
    entry = Entry("cnn", "openipu", "1", steps=5)
    with tempfile.TemporaryDirectory() as cache:
        seconds = [measure(entry, python, OPENIPU_CACHE=cache)["first_execution_s"] for _ in range(3)]
    return {"cold": seconds[0], "warm": min(seconds[1:])}


def table(results: dict[Entry, list[float]], facts: dict[str, object], batch: int | None) -> str:
    """Markdown: one row per entry, with ratios against the best peer and against the hand-written scan."""
    lines = [f"Measured {facts['date']} on {facts['machine']}; command: `{facts['command']}`.", ""]
    for model in dict.fromkeys(entry.model for entry in results):
        mine = {e: statistics.median(v) for e, v in results.items() if e.model == model}
        peers = [t for e, t in mine.items() if e.who not in ("openipu", "scan")]
        scan = next((t for e, t in mine.items() if e.who == "scan"), None)
        size = batch or CASES[model].batch
        columns = ["who", "steps per execution", "us per step (min - max)", "best peer / this", "plain scan / this"]
        columns.append("GFLOP/s")
        lines += [f"### {model}, batch {size}", "", f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
        for entry, t in sorted(mine.items(), key=lambda pair: pair[1]):
            spread = f"{t:.0f} ({min(results[entry]):.0f} - {max(results[entry]):.0f})"
            ratios = [f"{min(peers) / t:.2f}" if peers else "", f"{scan / t:.2f}" if scan else ""]
            rate = FLOP[model] * size / t / 1e3
            who = entry.who if entry.who in ("openipu", "scan") else f"Keras on {entry.who}"
            lines.append(f"| {who} | {entry.per_execution} | {spread} | {ratios[0]} | {ratios[1]} | {rate:.1f} |")
        lines.append("")
    lines += [f"{name}: {value}" for name, value in facts.items() if name not in ("date", "machine", "command")]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks")
    parser.add_argument("--models", nargs="+", default=["mlp", "cnn", "cifar"])
    parser.add_argument("--peers", nargs="*", default=["jax", "tensorflow", "torch"], help="backends of plain Keras")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, help="steps per epoch (default: the model's)")
    parser.add_argument("--batch", type=int)
    parser.add_argument("--own-peers", action="store_true", help="run the peers in this environment")
    parser.add_argument("--machine", default=f"{os.cpu_count()} cores ({platform.machine()})")
    parser.add_argument("--name", default="cpu")
    options = parser.parse_args()
    python = {"own": sys.executable, "peers": sys.executable if options.own_peers else make_peers()}
    todo = entries(options.models, options.peers, options.steps, options.batch)
    facts = {
        "date": time.strftime("%Y-%m-%d"),
        "machine": options.machine,
        "command": " ".join(["python -m benchmarks", *sys.argv[1:]]),
        "matrix product peak, GFLOP/s": round(peak(), 1),
        "first step of cnn, seconds": {k: round(v, 2) for k, v in first_step(python).items()},
    }
    results = run_rounds(todo, python, options.rounds)
    write(options.name, facts, results, table(results, facts, options.batch))


if __name__ == "__main__":
    main()
