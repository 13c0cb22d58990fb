"""`python -m benchmarks.scripts`: what `openipu run` costs and gains.

Three questions: how fast is a script's own `tf.function` loop, next to the same loop written natively and to TensorFlow
alone on the CPU; how much longer does a script take to start; and how fast is TensorFlow's eager code beside it?
"""

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

from benchmarks.measure import ROOT, THROUGHPUT, throughput

WORKER = str(ROOT / "benchmarks" / "script_worker.py")
BRIDGE = ["-m", "openipu", "run"]
START = "import tensorflow as tf\ntf.keras.layers.Dense\n"
"""A script that only loads TensorFlow and its Keras."""


def called(words: list[str]) -> str:
    """The output of a Python process."""
    environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "PYTHONPATH": os.environ.get("PYTHONPATH", "")}
    environment.pop("KERAS_BACKEND", None)
    done = subprocess.run(
        [sys.executable, *words], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(words)} failed:\n{done.stdout[-1000:]}{done.stderr[-2000:]}")
    return done.stdout


def seconds(words: list[str]) -> float:
    """How long a Python process takes."""
    began = time.perf_counter()
    called(words)
    return time.perf_counter() - began


def measure(rounds: int, steps: int, inner: int) -> dict[str, list[float]]:
    """Microseconds per step and seconds of start-up, in turns."""
    found: dict[str, list[float]] = {}
    options = ["--steps", str(steps), "--rounds", str(inner)]
    with tempfile.TemporaryDirectory() as folder:
        script = pathlib.Path(folder, "start.py")
        script.write_text(START)
        workers = {
            "loops": [*BRIDGE, WORKER, "loops"],
            "plain": [WORKER, "plain"],
            "eager, bridge": [*BRIDGE, WORKER, "eager"],
            "eager, alone": [WORKER, "eager"],
        }
        starts = {"start, bridge": [*BRIDGE, str(script)], "start, alone": [str(script)]}
        for number in range(rounds):
            order = slice(None, None, -1 if number % 2 else 1)
            for name, words in list(workers.items())[order]:
                times = json.loads(called([*words, *options]).strip().splitlines()[-1])
                for kind, values in times.items():
                    found.setdefault(name if kind == "eager" else kind, []).extend(values)
            for name, words in list(starts.items())[order]:
                found.setdefault(name, []).append(seconds(words))
            print(f"round {number + 1}/{rounds}", flush=True)
    return found


def table(found: dict[str, list[float]], command: str) -> str:
    """Markdown with ratios."""
    middle = {name: statistics.median(values) for name, values in found.items()}
    lines = [f"Measured {time.strftime('%Y-%m-%d')} on {os.cpu_count()} cores; command: `{command}`.", ""]
    lines += [f"| | us per step | next to | us per step | throughput, {THROUGHPUT} |", "|---" * 6 + "|"]
    pairs = [
        ("a loop under `openipu run`", "script", "the same loop, native", "native"),
        ("a loop under `openipu run`", "script", "TensorFlow alone", "plain"),
        ("eager TensorFlow under `openipu run`", "eager, bridge", "eager TensorFlow alone", "eager, alone"),
    ]
    for what, one, beside, other in pairs:
        cells = [what, f"{middle[one]:.0f}", beside, f"{middle[other]:.0f}", throughput(found[one], found[other])]
        lines.append(f"| {' | '.join(cells)} |")
    start = middle["start, bridge"], middle["start, alone"]
    lines += ["", f"A script that loads TensorFlow and Keras takes {start[0]:.2f} s under `openipu run`, and"]
    lines[-1] += f" {start[1]:.2f} s without it: {start[0] - start[1]:.2f} s more."
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scripts")
    parser.add_argument("--rounds", type=int, default=4, help="processes of each kind")
    parser.add_argument("--steps", type=int, default=500, help="steps of one launch")
    parser.add_argument("--launches", type=int, default=5, help="launches that each process measures")
    parser.add_argument("--name", default="cpu-scripts")
    options = parser.parse_args()
    found = measure(options.rounds, options.steps, options.launches)
    command = " ".join(["python -m benchmarks.scripts", *sys.argv[1:]])
    text = table(found, command)
    print(text)
    folder = ROOT / "benchmarks" / "results"
    folder.mkdir(exist_ok=True)
    (folder / f"{options.name}.md").write_text(text)
    (folder / f"{options.name}.json").write_text(json.dumps({"command": command, "results": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
