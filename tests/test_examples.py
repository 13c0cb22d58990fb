"""Every example, run as a user runs it, only smaller."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"
DENSE = ["--samples", "2010", "--test-samples", "500", "--steps-per-epoch", "200", "--epochs", "3"]
CNN = ["--samples", "805", "--test-samples", "100", "--batch-size", "8", "--epochs", "2"]
# Few enough batches for a short test, and enough whole updates of 8 of them for the loss to fall.
PIPELINE = ["--samples", "256", "--test-samples", "64", "--batch-size", "4", "--epochs", "2"]

COMMANDS = {
    "mnist/mnist.py": [*DENSE, "--steps-per-execution", "50"],
    "mnist/mnist_cpu.py": DENSE,
    "keras_tutorial/demo.py": CNN,
    "keras_tutorial/completed_demos/completed_demo_ipu.py": CNN,
    "keras_tutorial/completed_demos/completed_demo_faster.py": CNN,
    "keras_tutorial/completed_demos/completed_demo_replicated.py": CNN,
    "keras_tutorial/completed_demos/completed_demo_pipelining.py": PIPELINE,
    # Its other options are tested in test_completed_example.py.
    "keras_tutorial/completed_example/main.py": ["--use-ipu", "--pipelining", *PIPELINE],
    "pipeline_transformer.py": [
        "--blocks", "1", "--width", "16", "--context", "16", "--steps", "64", "--epochs", "2",
    ],
    "gradient_accumulation.py": ["--samples", "1000", "--test-samples", "200", "--epochs", "2", "--replicas", "2"],
}  # fmt: skip
PARTS = {f"keras_tutorial/completed_example/{name}.py" for name in ("model", "utils")}
"""Files that examples import."""


def example(name: str, *arguments: str) -> str:
    """What it prints; it must end well, without a warning except the one about the stand-in data."""
    # The backend is left to `import openipu`, as it is for a user.
    environment = {name: value for name, value in os.environ.items() if name != "KERAS_BACKEND"}
    result = subprocess.run(
        [sys.executable, str(EXAMPLES / name), *arguments],
        env={**environment, "OPENIPU_DATA": "stand-in"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert ("STAND-IN DATA" in result.stderr) == (name != "pipeline_transformer.py")
    unexpected = [line for line in result.stderr.splitlines() if "Warning" in line and "StandIn" not in line]
    assert not unexpected
    return result.stdout


def losses(output: str) -> list[float]:
    """The loss of every epoch, as Keras prints it."""
    return [float(loss) for loss in re.findall(r"^\d+/\d+ - .*?loss: ([\d.e+-]+)", output, re.MULTILINE)]


def assert_learned(output: str, arguments: list[str], runs: int = 1) -> None:
    found, epochs = losses(output), int(arguments[arguments.index("--epochs") + 1])
    assert len(found) == runs * epochs
    for run in range(runs):
        first, *_, last = found[run * epochs : (run + 1) * epochs]
        assert last < first, "the loss must fall"
    accuracies = re.findall(r"^Test accuracy: (\d\.\d{4})$", output, re.MULTILINE)
    assert len(accuracies) == runs
    # The dense network comes to about 0.55 here. The convolutional one has only begun to learn after so few steps.
    if "--steps-per-epoch" in arguments:
        assert float(accuracies[0]) > 0.35


@pytest.mark.parametrize("name", COMMANDS)
def test_example_learns(name):
    output = example(name, *COMMANDS[name])
    assert_learned(output, COMMANDS[name], runs=2 if "demo_pipelining" in name else 1)
    if name == "pipeline_transformer.py":
        assert "4 stages, balance" in output
    if name == "gradient_accumulation.py":
        difference = re.search(r"^Largest difference between any two weights: (\S+)$", output, re.MULTILINE)
        assert difference is not None
        assert float(difference.group(1)) < 1e-5


def test_tf_data_variant():
    pytest.importorskip("tensorflow")
    arguments = [*COMMANDS["mnist/mnist.py"], "--tf-data"]
    assert_learned(example("mnist/mnist.py", *arguments), arguments)


def test_every_example_is_run_and_short():
    scripts = {str(path.relative_to(EXAMPLES)): path for path in EXAMPLES.rglob("*.py")}
    assert set(scripts) == {*COMMANDS, *PARTS}
    for name, path in scripts.items():
        assert len(path.read_text().splitlines()) < 150, name
        assert "/" not in name or (EXAMPLES / name.split("/")[0] / "README.md").exists()
