"""Every example, run as a user runs it, only smaller."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"
DENSE = ["--samples", "2010", "--test-samples", "500", "--steps-per-epoch", "200", "--epochs", "3"]
CNN = ["--samples", "805", "--test-samples", "100", "--batch-size", "8", "--epochs", "2"]

COMMANDS = {
    "mnist/mnist.py": [*DENSE, "--steps-per-execution", "50"],
    "mnist/mnist_cpu.py": DENSE,
    "keras_tutorial/demo.py": CNN,
    "keras_tutorial/completed_demos/completed_demo_ipu.py": CNN,
    "keras_tutorial/completed_demos/completed_demo_faster.py": CNN,
    "keras_tutorial/completed_demos/completed_demo_replicated.py": CNN,
    "infeed_outfeed.py": ["--samples", "1000", "--test-samples", "200", "--epochs", "2", "--replicas", "2"],
    "gradient_accumulation.py": ["--samples", "1000", "--test-samples", "200", "--epochs", "2", "--replicas", "2"],
    "resume.py": ["--samples", "2000", "--test-samples", "200", "--epochs", "3", "--steps-per-execution", "10"],
}


def example(name: str, *arguments: str, ends: int = 0) -> str:
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
    assert result.returncode == ends, result.stderr
    assert "STAND-IN DATA" in result.stderr
    unexpected = [line for line in result.stderr.splitlines() if "Warning" in line and "StandIn" not in line]
    assert not unexpected
    return result.stdout


def losses(output: str) -> list[float]:
    """The loss of every epoch, as Keras prints it."""
    return [float(loss) for loss in re.findall(r"^\d+/\d+ - .*?loss: ([\d.e+-]+)", output, re.MULTILINE)]


def fed_losses(output: str) -> list[float]:
    """The first loss of every epoch that came out of an outfeed."""
    return [float(loss) for loss in re.findall(r"^  step 0: loss ([\d.]+)$", output, re.MULTILINE)]


def assert_learned(output: str, arguments: list[str]) -> None:
    found = losses(output) or fed_losses(output)
    assert len(found) == int(arguments[arguments.index("--epochs") + 1])
    assert found[-1] < found[0], "the loss must fall"
    accuracy = re.search(r"^Test accuracy: (\d\.\d{4})$", output, re.MULTILINE)
    assert accuracy is not None
    # The dense network comes to about 0.55 here. The convolutional one has only begun to learn after so few steps.
    if "--steps-per-epoch" in arguments:
        assert float(accuracy.group(1)) > 0.35


@pytest.mark.parametrize("name", COMMANDS)
def test_example_learns(name, tmp_path):
    folder = ["--folder", str(tmp_path / "whole")] if name == "resume.py" else []
    output = example(name, *COMMANDS[name], *folder)
    assert_learned(output, COMMANDS[name])
    if name == "resume.py":
        arguments = [*COMMANDS[name], "--folder", str(tmp_path / "crashed")]
        example(name, *arguments, "--crash-after", "15", ends=-signal.SIGKILL)
        assert example(name, *arguments).splitlines()[-2:] == output.splitlines()[-2:]
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
    assert set(scripts) == set(COMMANDS)
    for name, path in scripts.items():
        assert len(path.read_text().splitlines()) < 150, name
        assert "/" not in name or (EXAMPLES / name.split("/")[0] / "README.md").exists()
