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
@pytest.mark.parametrize(
    "script",
    [
        "without_feeds.py",
        "pipeline.py",
        "recompilation.py",
        "reviews.py",
        "changing_shapes.py",
        "model_parallelism.py",
    ],
)
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


def shapes(output: str, kind: str) -> set[tuple[int, ...]]:
    """The shapes that a script prints after a word."""
    return {tuple(map(int, re.findall(r"\d+", found))) for found in re.findall(rf"{kind} \S+ \((.*)\)", output)}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "updates"),
    [
        ((), 10),
        (("--no-pipelining",), 40),
        (("--no-pipelining", "--use-gradient-accumulation"), 10),
        (("--no-pipelining", "--use-gradient-accumulation", "--outfeed-pre-accumulated-gradients"), 40),
    ],
    ids=["pipelined", "plain", "accumulated", "before accumulation"],
)
def test_inspecting_tensors(arguments, updates, small_mnist):
    options = ("--steps-per-epoch", "40", "--epochs", "2")
    output = run("inspecting_tensors.py", *options, *arguments, OPENIPU_DATA=small_mnist)
    assert shapes(output, "activations") == {(40, 32, 128)}
    assert shapes(output, "results") == {(40, 32, 10)}
    assert shapes(output, "gradients") == {(updates, 128)}
    assert output.count("epoch 1: ") == 3


@pytest.mark.slow
def test_recomputation_checkpoints():
    assert "loss:" in run("recompute_lstm.py", "--seq-len", "64", "--checkpoints", "7")
    with pytest.raises(AssertionError, match="can't be evenly divided"):
        run("recompute_lstm.py", "--seq-len", "512", "--checkpoints", "8")


@pytest.mark.slow
def test_a_pipeline_estimator(small_mnist):
    output = run("pipeline_estimator.py", "--updates", "160", OPENIPU_DATA=small_mnist)
    assert number(r"accuracy: ([\d.]+)%, after 1280 steps", output) > 70


@pytest.mark.slow
def test_tensorboard(tmp_path, small_mnist):
    output = run("tensorboard_demo.py", str(tmp_path), "--images", "2048", OPENIPU_DATA=small_mnist)
    assert "32/32 steps" in output


@pytest.mark.slow
@pytest.mark.parametrize("instances", ["1", "2"])
def test_distributed_training(instances, small_mnist, tmp_path):
    launch = ("launch", "--num-instances", instances, "--num-replicas", "2", sys.executable, "-m", "openipu")
    weights = tmp_path / "trained"
    arguments = ("--images", "4096", "--weights", str(weights))
    output = run("distributed_mnist.py", *arguments, launch=launch, OPENIPU_DATA=small_mnist)
    found = {float(accuracy) for accuracy in re.findall(r"of \d: accuracy ([\d.]+)", output)}
    assert len(found) == 1, "the mean over the instances"
    assert found.pop() > 0.7
    assert weights.with_suffix(".weights.h5").exists()


@pytest.mark.slow
def test_one_instance_writes_checkpoints_of_tensorflow_and_all_restore(tmp_path):
    launch = ("launch", "--num-instances", "2", "--num-replicas", "2", sys.executable, "-m", "openipu")
    output = run("checkpoints.py", str(tmp_path), launch=launch)
    for instance in (0, 1):
        assert f"instance {instance}: step 24, kept ['2', '3'], equal True" in output
    assert len(set(re.findall(r"total (\S+)", output))) == 1
    written = {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.is_file()}
    assert {path.partition("/")[0] for path in written} == {"0"}
    assert {path for path in written if path.endswith(".index")} == {"0/ckpt-2.index", "0/ckpt-3.index"}


@pytest.fixture(scope="module")
def small_mnist() -> str:
    """The folder of MNIST if there is one, otherwise images that OpenIPU draws."""
    return os.environ.get("OPENIPU_TEST_DATA", "stand-in")
