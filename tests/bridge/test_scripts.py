"""Scripts in the style of tutorials for the IPU, run as they are by `openipu run`."""

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(find_spec("tensorflow") is None, reason="TensorFlow is not installed")

SCRIPTS = Path(__file__).parents[1] / "scripts"


def run(script: str, *arguments: str, launch: tuple[str, ...] = (), **environment: str) -> str:
    """The output of a script; fails if the script does."""
    command = ["-m", "openipu", *launch, "run", str(SCRIPTS / script), *arguments]
    result = subprocess.run(
        [sys.executable, *command],
        env=os.environ | {"TF_CPP_MIN_LOG_LEVEL": "3"} | environment,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert result.returncode == 0, result.stderr + result.stdout
    return result.stdout


def number(pattern: str, text: str) -> float:
    return float(re.findall(pattern, text)[-1])


def test_a_loop_of_the_scripts_own():
    output = run("custom_loop.py", "--steps", "10", "--runs", "3")
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", output)]
    assert len(losses) == 3
    assert losses[-1] < losses[0]
    assert number(r"accuracy ([\d.]+)", output) > 0.85


@pytest.mark.slow
@pytest.mark.parametrize("script", ["without_feeds.py", "pipeline.py", "recompilation.py", "reviews.py"])
def test_scripts_that_check_themselves(script):
    assert run(script)


@pytest.mark.slow
def test_summaries_and_weights(tmp_path):
    assert "event files" in run("summaries.py", str(tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize("replicas", ["1", "2"])
def test_an_estimator(replicas, small_mnist):
    output = run("estimator_digits.py", "--replicas", replicas, "--steps", "100", OPENIPU_DATA=small_mnist)
    assert number(r"accuracy ([\d.]+) after 100 steps", output) > 0.7


@pytest.mark.slow
def test_keras_trains_as_without_the_strategy(small_mnist):
    arguments = ("--epochs", "1", "--images", "12000")
    ours = number(r"accuracy ([\d.]+)", run("keras_mnist.py", *arguments, OPENIPU_DATA=small_mnist))
    plain = number(r"accuracy ([\d.]+)", run("keras_mnist.py", *arguments, "--plain", OPENIPU_DATA=small_mnist))
    assert ours > 0.7
    assert abs(ours - plain) < 0.005


@pytest.mark.slow
def test_instances():
    launch = ("launch", "--num-instances", "2", "--num-replicas", "2", sys.executable, "-m", "openipu")
    assert run("instances.py", launch=launch).count("largest error") == 2


@pytest.fixture(scope="module")
def small_mnist() -> str:
    """The folder of MNIST if there is one, otherwise images that OpenIPU draws."""
    return os.environ.get("OPENIPU_TEST_DATA", "stand-in")
