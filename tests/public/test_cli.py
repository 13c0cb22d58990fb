"""The `openipu` command as a user starts it: in a process of its own."""

import json
import os
import re
import subprocess
import sys

import openipu
from openipu.cli.demo import verdict

import pytest


def command(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    program = "import sys; from openipu.cli import app; sys.argv[0] = 'openipu'; app()"
    return subprocess.run(
        [sys.executable, "-c", program, *arguments],
        env={**os.environ, "COLUMNS": "200", **environment},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def test_help_names_the_commands():
    result = command("--help")
    assert result.returncode == 0, result.stderr
    assert "mnist" in result.stdout
    assert "info" in result.stdout


def test_help_loads_nothing_heavy():
    heavy = ("keras", "jax", "numpy", "tensorflow")
    code = f"import sys, openipu.cli; print([name for name in {heavy} if name in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert result.stdout.strip() == "[]"


def test_info_names_versions_devices_and_variables():
    """As JSON; test_command_output.py looks at the table."""
    result = command("info", "--json", OPENIPU_DATA="stand-in")
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)
    assert found["OpenIPU"] == openipu.__version__
    assert found["Keras backend"] == "jax"
    assert re.match(r"\d+ x cpu", found["devices"])
    assert int(found["CPU cores"]) >= 1
    assert found["OPENIPU_DATA"] == "stand-in"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--epochs", "0"), "--epochs"),
        (("--batch-size", "-1"), "--batch-size"),
        (("--samples", "60001"), "--samples"),
        (("--ipus", "0"), "--ipus"),
    ],
)
def test_impossible_options_are_refused(arguments, message):
    result = command("mnist", *arguments)
    assert result.returncode == 2
    assert message in result.stderr


def test_a_mistake_is_shown_without_a_traceback():
    result = command("mnist", OPENIPU_DATA="no/such/folder")
    assert result.returncode == 2
    assert "Error: OPENIPU_DATA=no/such/folder is not a folder" in result.stderr
    assert "Traceback" not in result.stderr


def test_mnist_trains_reports_and_compares():
    result = command("mnist", "--samples", "602", "--epochs", "2", "--batch-size", "8")
    assert result.returncode == 0, result.stderr
    assert "stand-in digits, not MNIST" in result.stdout
    assert "STAND-IN DATA" in result.stderr
    assert len(result.stderr.splitlines()) == 1
    assert "76 steps per epoch, 76 steps per execution" in result.stdout
    epochs = re.findall(r"epoch (\d)/2  loss ([\d.]+)  accuracy ([\d.]+)  ([\d,]+) µs/step", result.stdout)
    assert [epoch[0] for epoch in epochs] == ["1", "2"]
    assert float(epochs[1][1]) < float(epochs[0][1]), "the loss must fall"
    assert re.search(r"test +loss [\d.]+  accuracy [\d.]+", result.stdout)
    assert re.search(r"OpenIPU [\d,]+ µs/step, plain Keras on JAX [\d,]+ µs/step: ", result.stdout)


@pytest.mark.slow
def test_mnist_without_comparison():
    sizes = {"--samples": "300", "--epochs": "1", "--batch-size": "16", "--steps-per-execution": "5"}
    result = command("mnist", "--no-compare", *(word for option in sizes.items() for word in option))
    assert result.returncode == 0, result.stderr
    assert "19 steps per epoch, 5 steps per execution" in result.stdout
    assert "plain Keras" not in result.stdout


@pytest.mark.slow
def test_mnist_on_two_devices():
    sizes = {"--samples": "300", "--epochs": "2", "--batch-size": "8", "--ipus": "2"}
    result = command("mnist", "--no-compare", *(word for option in sizes.items() for word in option))
    assert result.returncode == 0, result.stderr
    assert "2 devices, micro-batch 8, 38 steps per epoch, 19 steps per execution" in result.stdout
    losses = [float(loss) for loss in re.findall(r"epoch \d/2  loss ([\d.]+)", result.stdout)]
    assert len(losses) == 2
    assert losses[1] < losses[0], "the loss must fall"


@pytest.mark.parametrize(
    ("ratio", "words"), [(2.04, "2.0 times faster"), (1.02, "the same speed"), (0.5, "2.0 times slower")]
)
def test_the_verdict_is_honest(ratio, words):
    assert verdict(ratio) == words
