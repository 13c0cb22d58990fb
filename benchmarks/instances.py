"""`python -m benchmarks.instances`: two instances with a device each, next to one process with two devices.

Three questions: how fast is training, what does a launch cost, and how long does it take from the command to the end of
the first step? The cache of programs is empty each time.
"""

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass

from benchmarks.measure import ROOT

COUNT = 2
LAUNCH = ["-m", "openipu", "launch", "--num-instances", str(COUNT), "--num-replicas", str(COUNT)]


@dataclass(frozen=True)
class Question:
    """A model, and how it is run."""

    name: str
    model: str
    per_execution: str
    steps: int

    def words(self, instances: int) -> list[str]:
        """The command line for one process or several instances."""
        devices = str(COUNT // instances)
        worker = ["benchmarks/worker.py", "openipu", self.model, "--steps-per-execution", self.per_execution]
        worker += ["--steps", str(self.steps), "--ipus", devices]
        launch = [*LAUNCH, "--only-output-from-instance", "0"] if instances > 1 else []
        return [sys.executable, *launch, *worker]


QUESTIONS = (
    Question("CNN, one launch per epoch", "cnn", "epoch", 96),
    Question("MLP, one launch per step", "mlp", str(COUNT), 200),
)


def measure(question: Question, instances: int) -> dict[str, list[float]]:
    """Microseconds per step, and seconds from the command to the end of the first execution."""
    with tempfile.TemporaryDirectory() as cache:
        environment = os.environ | {"PYTHONPATH": str(ROOT), "OPENIPU_CACHE": cache}
        began = time.time()
        done = subprocess.run(
            question.words(instances), cwd=ROOT, env=environment, capture_output=True, text=True, check=False
        )
    if done.returncode:
        raise RuntimeError(f"{' '.join(question.words(instances))} failed:\n{done.stdout[-1000:]}{done.stderr[-2000:]}")
    found = json.loads(re.findall(r"\{.*\}", done.stdout)[-1])  # libraries may have begun the line with their own words
    return {"us_per_step": found["us_per_step"], "first": [found["first_at"] - began]}


def table(results: dict[Question, dict[int, dict[str, list[float]]]], facts: dict[str, str]) -> str:
    """Markdown with ratios."""
    lines = [f"Measured {facts['date']} on {facts['machine']}; command: `{facts['command']}`.", ""]
    lines.append(
        "A step is one micro-batch of one replica. Seconds are from the command to the end of the first launch."
    )
    lines += ["", "| | us per step, 1 process x 2 devices | 2 instances x 1 device | throughput | us more per launch |"]
    lines[-1] += " first step, 1 process | 2 instances | s more |"
    lines.append("|---" * 8 + "|")
    for question, found in results.items():
        one, two = (statistics.median(found[count]["us_per_step"]) for count in (1, COUNT))
        first = [statistics.median(found[count]["first"]) for count in (1, COUNT)]
        per_launch = question.steps if question.per_execution == "epoch" else int(question.per_execution)
        cells = [question.name, f"{one:.0f}", f"{two:.0f}", f"{one / two:.2f}", f"{(two - one) * per_launch:.0f}"]
        cells += [f"{first[0]:.1f} s", f"{first[1]:.1f} s", f"{first[1] - first[0]:.1f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.instances")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--name", default="cpu-instances")
    options = parser.parse_args()
    results: dict[Question, dict[int, dict[str, list[float]]]] = {
        question: {count: {"us_per_step": [], "first": []} for count in (1, COUNT)} for question in QUESTIONS
    }
    for number in range(options.rounds):
        for question in QUESTIONS:
            for count in (1, COUNT)[:: -1 if number % 2 else 1]:
                for name, values in measure(question, count).items():
                    results[question][count][name] += values
                median = statistics.median(results[question][count]["us_per_step"])
                print(f"round {number + 1}/{options.rounds} {question.name}, {count} process(es) {median:.0f} us/step")
    facts = {
        "date": time.strftime("%Y-%m-%d"),
        "machine": f"{os.cpu_count()} cores",
        "command": " ".join(["python -m benchmarks.instances", *sys.argv[1:]]),
    }
    text = table(results, facts)
    rows = [{**vars(q), "instances": count, **values} for q, by in results.items() for count, values in by.items()]
    folder = ROOT / "benchmarks" / "results"
    (folder / f"{options.name}.json").write_text(json.dumps({**facts, "results": rows}, indent=1) + "\n")
    (folder / f"{options.name}.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
