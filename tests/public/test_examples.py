"""Every example, run as a user runs it, only smaller."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

from openipu import _stand_in_data
from openipu.engine.report import files

import numpy as np
import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
DENSE = ["--samples", "2010", "--test-samples", "500", "--steps-per-epoch", "200", "--epochs", "3"]
CNN = ["--samples", "805", "--test-samples", "100", "--batch-size", "8", "--epochs", "2"]
# Few enough batches for a short test, and enough whole updates of 8 of them for the loss to fall.
PIPELINE = ["--samples", "256", "--test-samples", "64", "--batch-size", "4", "--epochs", "2"]

CIFAR = ["--batch-size", "16", "--epochs", "1"]
ESTIMATOR = ["--batch-size", "13", "--batches-per-step", "4", "--epochs", "2.5", "--log-interval", "0.01"]

SMALL_CIFAR = {
    "cifar10/cifar10_ipu_estimator.py": CIFAR,
    "cifar10/cifar10_ipu_strategy.py": CIFAR,
    "cifar10/cifar10_estimator_replica.py": [*CIFAR, "--ipus", "2"],
    "cifar10/cifar10_pipeline_estimator.py": [*CIFAR, "--gradient-accumulation-count", "4"],
    "ipu_estimator_cnn/ipu_estimator_cnn.py": ESTIMATOR,
}
"""Scripts without an option for fewer images: they are given a small `cifar10.npz`."""
MODULES = {"cifar10/cifar10.py"}

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
    "infeed_outfeed.py": ["--samples", "1000", "--test-samples", "200", "--epochs", "2", "--replicas", "2"],
    "gradient_accumulation.py": ["--samples", "1000", "--test-samples", "200", "--epochs", "2", "--replicas", "2"],
    "resume.py": ["--samples", "2000", "--test-samples", "200", "--epochs", "3", "--steps-per-execution", "10"],
}  # fmt: skip
PARTS = {f"keras_tutorial/completed_example/{name}.py" for name in ("model", "utils")}
"""Files that examples import."""
PLAIN = {"mnist/mnist_cpu.py", "keras_tutorial/demo.py"}
"""Examples in plain Keras, on which there are no reports."""
INSTANCES = ("popdist/popdist_training.py", "popdist/popdist_inference.py")
"""Examples for `openipu launch`."""


def launched_example(name: str, *arguments: str, data: str) -> str:
    """What an example prints that runs in two instances."""
    command = [sys.executable, "-m", "openipu", "launch", "--num-instances", "2", str(EXAMPLES / name), *arguments]
    environment = os.environ | {"OPENIPU_DATA": data}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def example(name: str, *arguments: str, data: str = "stand-in", ends: int = 0) -> str:
    """What it prints; it must end well, without a warning except the one about the stand-in data."""
    result = run_example(name, *arguments, data=data)
    assert result.returncode == ends, result.stderr
    assert ("STAND-IN DATA" in result.stderr) == (data == "stand-in" and name != "pipeline_transformer.py")
    unexpected = [line for line in result.stderr.splitlines() if "Warning" in line and "StandIn" not in line]
    assert not unexpected
    return result.stdout


def run_example(name: str, *arguments: str, data: str = "stand-in") -> subprocess.CompletedProcess[str]:
    # The backend is left to `import openipu`, as it is for a user.
    environment = {name: value for name, value in os.environ.items() if name != "KERAS_BACKEND"}
    return subprocess.run(
        [sys.executable, str(EXAMPLES / name), *arguments],
        env={**environment, "OPENIPU_DATA": data},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def losses(output: str) -> list[float]:
    """The loss of every epoch, as Keras prints it."""
    return [float(loss) for loss in re.findall(r"^\d+/\d+ - .*?loss: ([\d.e+-]+)", output, re.MULTILINE)]


def fed_losses(output: str) -> list[float]:
    """The first loss of every epoch that came out of an outfeed."""
    return [float(loss) for loss in re.findall(r"^  step 0: loss ([\d.]+)$", output, re.MULTILINE)]


def assert_learned(output: str, arguments: list[str], runs: int = 1) -> None:
    found, epochs = losses(output) or fed_losses(output), int(arguments[arguments.index("--epochs") + 1])
    assert len(found) == runs * epochs
    for run in range(runs):
        first, *_, last = found[run * epochs : (run + 1) * epochs]
        assert last < first, "the loss must fall"
    accuracies = re.findall(r"^Test accuracy: (\d\.\d{4})$", output, re.MULTILINE)
    assert len(accuracies) == runs
    # The dense network comes to about 0.55 here. The convolutional one has only begun to learn after so few steps.
    if "--steps-per-epoch" in arguments:
        assert float(accuracies[0]) > 0.35


def assert_reported(folder: Path) -> None:
    """A report on the whole program was written: at least a call that trains or evaluates."""
    report = files.read(folder)
    assert report.ended
    assert report.failure is None
    assert any(run.steps and run.launches for run in report.runs)


@pytest.mark.parametrize("name", COMMANDS)
def test_example_learns(name, tmp_path):
    folder = ["--folder", str(tmp_path / "run")] if name == "resume.py" else []
    profile = [] if name in PLAIN else ["--profile", str(tmp_path / "out")]
    output = example(name, *COMMANDS[name], *folder, *profile)
    assert_learned(output, COMMANDS[name], runs=2 if "demo_pipelining" in name else 1)
    if profile:
        assert_reported(tmp_path / "out")
    if name == "pipeline_transformer.py":
        assert "4 stages, balance" in output
    if name == "gradient_accumulation.py":
        difference = re.search(r"^Largest difference between any two weights: (\S+)$", output, re.MULTILINE)
        assert difference is not None
        assert float(difference.group(1)) < 1e-5


@pytest.mark.slow  # test_checkpoint.py has a killed run that ends with the same bytes
def test_a_crashed_example_is_resumed(tmp_path):
    name, whole, crashed = "resume.py", str(tmp_path / "whole"), str(tmp_path / "crashed")
    output = example(name, *COMMANDS[name], "--folder", whole)
    example(name, *COMMANDS[name], "--folder", crashed, "--crash-after", "15", ends=-signal.SIGKILL)
    assert example(name, *COMMANDS[name], "--folder", crashed).splitlines()[-2:] == output.splitlines()[-2:]


@pytest.fixture(scope="module")
def small_cifar(tmp_path_factory):
    """A folder with a few images under the name of the real data."""
    folder = tmp_path_factory.mktemp("data")
    parts = {"train": _stand_in_data.shapes("train", 320), "test": _stand_in_data.shapes("test", 70)}
    arrays = {f"{name}_{part}": array for part, pair in parts.items() for name, array in zip("xy", pair, strict=True)}
    np.savez(folder / "cifar10.npz", **arrays)
    return str(folder)


WRONG = [
    ("cifar10/cifar10_ipu_estimator.py", ["--batch-size", "0"], "--batch-size: '0' is not a whole number of 1 or"),
    ("cifar10/cifar10_pipeline_estimator.py", ["--epochs", "-1"], "--epochs: '-1' is not a whole number of 1 or"),
    ("cifar10/cifar10_ipu_strategy.py", ["--batch-size", "71"], "--batch-size 71 is more than the 70 test images"),
    ("ipu_estimator_cnn/ipu_estimator_cnn.py", ["--log-interval", "0"], "--log-interval: '0' is not above 0"),
    (
        "ipu_estimator_cnn/ipu_estimator_cnn.py",
        ["--batch-size", "9", "--batches-per-step", "8"],
        "70 test images are",
    ),
]
ALL_WRONG = """
import contextlib, io, json, pathlib, runpy, sys

for name, arguments in json.loads(sys.argv[1]):
    sys.argv = [name, *arguments]
    with contextlib.redirect_stderr(io.StringIO()) as stderr:
        sys.path.insert(0, str(pathlib.Path(name).parent))
        try:
            runpy.run_path(name, run_name="__main__")
            code = 0
        except SystemExit as end:
            code = end.code
        del sys.path[0]
    print(json.dumps([code, stderr.getvalue()]))
"""


@pytest.fixture(scope="module")
def refused(small_cifar):
    """How each wrong command ends and what it says, all in one process: each loads Keras and JAX."""
    given = json.dumps([(str(EXAMPLES / name), arguments) for name, arguments, _ in WRONG])
    command = [sys.executable, "-c", ALL_WRONG, given]
    environment = {**os.environ, "OPENIPU_DATA": small_cifar}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert result.returncode == 0, result.stderr
    return [json.loads(line) for line in result.stdout.splitlines()]


@pytest.mark.parametrize("number", range(len(WRONG)), ids=[f"{name} {' '.join(argv)}" for name, argv, _ in WRONG])
def test_wrong_options(number, refused):
    code, said = refused[number]
    # What is no number is a message, which Python prints before it ends with 1.
    assert code == 2 or isinstance(code, str)
    assert WRONG[number][2] in f"{said}{code}"


# Compiling these networks takes 20 seconds or more each.
slow = pytest.mark.slow


@pytest.mark.parametrize(
    "name",
    [
        "cifar10/cifar10_ipu_strategy.py",
        pytest.param("cifar10/cifar10_ipu_estimator.py", marks=slow),
        pytest.param("cifar10/cifar10_estimator_replica.py", marks=slow),
        pytest.param("cifar10/cifar10_pipeline_estimator.py", marks=slow),
    ],
)
def test_cifar10(name, small_cifar, tmp_path):
    output = example(name, *SMALL_CIFAR[name], "--profile", str(tmp_path), data=small_cifar)
    assert_reported(tmp_path)
    accuracy = re.search(r"^Validation accuracy: ([\d.]+)%$", output, re.MULTILINE)
    loss = re.search(r"^Validation loss: ([\d.]+)$", output, re.MULTILINE)
    assert accuracy is not None
    assert loss is not None
    assert 0 <= float(accuracy[1]) <= 100
    assert float(loss[1]) < 2.4, "ten classes begin at 2.3; it must not have grown"


@slow
def test_estimator_cnn(small_cifar, tmp_path):
    """Odd sizes, reports, event files; then testing the checkpoint alone gives the same, and training goes on."""
    name, folder = "ipu_estimator_cnn/ipu_estimator_cnn.py", str(tmp_path / "model")
    output = example(name, *ESTIMATOR, "--model-dir", folder, "--profile", str(tmp_path / "out"), data=small_cifar)
    assert_reported(tmp_path / "out")
    # 2.5 epochs of 320 images in batches of 13 are 61 steps, and then whole executions of 4 with one step more.
    assert "Training on 832 examples" in output
    assert "Evaluating on 52 examples" in output
    assert re.search(r"^Took [\d.]+ seconds to compile and run, to step 64$", output, re.MULTILINE)
    results = re.findall(r"^Test (?:loss: [\d.]+|accuracy: [\d.]+%)$", output, re.MULTILINE)
    assert len(results) == 2
    names = {path.name for path in (tmp_path / "model").iterdir()}
    assert "checkpoints" in names
    assert any(name.startswith("events.out.tfevents") for name in names)
    again = example(name, *ESTIMATOR, "--model-dir", folder, "--test-only", data=small_cifar)
    assert all(result in again for result in results)
    assert "Training" not in again
    more = run_example(name, *ESTIMATOR, "--model-dir", folder, "--train-only", data=small_cifar)
    assert "to step 128" in more.stdout
    assert "Evaluating" not in more.stdout
    assert "Training loss: " in more.stderr


def test_estimator_cnn_with_generated_data(tmp_path):
    arguments = ["--generated-data", "--batch-size", "64", "--batches-per-step", "2", "--epochs", "0.005"]
    name = "ipu_estimator_cnn/ipu_estimator_cnn.py"
    result = run_example(name, *arguments, "--train-only", "--model-dir", str(tmp_path))
    assert result.returncode == 0, result.stderr
    assert "STAND-IN" not in result.stderr
    assert "Training on 256 examples" in result.stdout
    refused = run_example(name, "--test-only")
    assert refused.returncode == 2
    assert "--test-only needs --model-dir" in refused.stderr


@slow
def test_tf_data_variant():
    pytest.importorskip("tensorflow")
    arguments = [*COMMANDS["mnist/mnist.py"], "--tf-data"]
    assert_learned(example("mnist/mnist.py", *arguments), arguments)


@pytest.mark.slow  # test_several_instances.py compares such runs with a single process
def test_several_instances(tmp_path, small_cifar):
    weights = ["--weights", str(tmp_path / "popdist.weights.h5")]
    profile = ["--profile", str(tmp_path / "out")]
    trained = launched_example(INSTANCES[0], "--epochs", "2", *weights, *profile, data=small_cifar)
    assert len(re.findall(r"^\[0\] Epoch", trained, re.MULTILINE)) == 2
    found = launched_example(INSTANCES[1], *weights, *profile, data=small_cifar)
    assert re.search(r"^\[0\] accuracy: 0\.\d+$", found, re.MULTILINE)
    assert_reported(tmp_path / "out")
    assert_reported(tmp_path / "out" / "instance-1")


def test_every_example_is_run_and_short():
    scripts = {str(path.relative_to(EXAMPLES)): path for path in EXAMPLES.rglob("*.py")}
    assert set(scripts) == {*COMMANDS, *SMALL_CIFAR, *MODULES, *PARTS, *INSTANCES}
    for name, path in scripts.items():
        assert len(path.read_text().splitlines()) < 150, name
        assert "/" not in name or (EXAMPLES / name.split("/")[0] / "README.md").exists()
