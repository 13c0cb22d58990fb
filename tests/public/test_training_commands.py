"""`openipu mnist` and `openipu cifar10`: which options go together, and what the second one trains."""

import importlib.util
import itertools
import re

from openipu import _stand_in_data
from openipu.cli import app
from openipu.cli.options import Options

import numpy as np
import pytest
from typer.testing import CliRunner

from zoo import KERAS_WARNINGS

pytestmark = KERAS_WARNINGS

SMALL = ["--epochs", "2", "--batch-size", "8", "--samples"]


def options(**given):
    nothing = dict.fromkeys(("steps_per_execution", "ipus", "schedule", "gradient_accumulation_count", "profile"))
    return Options(**{"epochs": 1, "batch_size": 8, "stages": 1, "compare": False, "samples": None, **nothing, **given})


def command(*arguments, **environment):
    return CliRunner().invoke(app, list(arguments), env={"COLUMNS": "200", **environment})


@pytest.mark.parametrize("name", ["mnist", "cifar10"])
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--stages", "2", "--ipus", "3"], "--ipus 3 is not a multiple of --stages 2"),
        (["--schedule", "GPipe"], "--schedule GPipe is for a pipeline. Add --stages 2"),
        (["--stages", "2", "--gradient-accumulation-count", "100000000"], "4096"),
        (["--stages", "2", "--schedule", "Groupt"], "Did you mean 'Grouped'?"),
        (["--stages", "2", "--gradient-accumulation-count", "6"], "needs a multiple of 4 micro-batches, not 6"),
        (
            ["--steps-per-execution", "5", "--gradient-accumulation-count", "2"],
            "of the 2 micro-batches of an update (--gradient-accumulation-count). Give 6",
        ),
    ],
)
def test_options_that_do_not_go_together(name, arguments, message):
    result = command(name, *arguments)
    assert result.exit_code == 2
    assert message in result.stderr


def test_an_execution_is_an_epoch_of_whole_updates():
    for ipus, stages, count, batches in itertools.product((2, 4), (1, 2), (None, 1, 4), (1, 19, 160)):
        chosen = options(ipus=ipus, stages=stages, gradient_accumulation_count=count)
        steps = chosen.execution_steps(batches)
        assert chosen.replicas * chosen.stages == ipus
        assert steps % chosen.accumulated == 0
        assert steps * chosen.replicas >= batches
        assert (steps - chosen.accumulated) * chosen.replicas < batches, "one update fewer would not be enough"
    assert options(steps_per_execution=7).execution_steps(100) == 7


def test_cifar10_has_the_network_of_the_examples(repository):
    from openipu.cli import cifar10

    path = repository / "examples" / "cifar10" / "cifar10.py"
    specification = importlib.util.spec_from_file_location("shared_by_cifar10_examples", path)
    example = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(example)

    def described(layers):
        return [(type(layer), {**layer.get_config(), "name": None}) for layer in layers]

    assert described(cifar10.layers()) == described(example.layers())


def epochs(output):
    """The loss of every epoch."""
    return [float(loss) for loss in re.findall(r"^epoch \d/2  loss ([\d.]+)  accuracy", output, re.MULTILINE)]


@pytest.mark.slow
def test_cifar10_trains_on_real_images_and_compares(tmp_path):
    parts = {"train": _stand_in_data.shapes("train", 160), "test": _stand_in_data.shapes("test", 80)}
    arrays = {f"{name}_{part}": array for part, pair in parts.items() for name, array in zip("xy", pair, strict=True)}
    np.savez(tmp_path / "cifar10.npz", **arrays)
    result = command("cifar10", *SMALL, "160", "--profile", str(tmp_path / "out"), OPENIPU_DATA=str(tmp_path))
    assert result.exit_code == 0, result.output
    assert "160 images of CIFAR-10, 1 device, micro-batch 8, 20 steps per epoch, 20 steps per" in result.stdout
    assert "STAND-IN" not in result.stderr
    assert len(epochs(result.stdout)) == 2
    assert re.search(r"test +loss [\d.]+  accuracy [\d.]+", result.stdout)
    assert re.search(r"OpenIPU [\d,]+ µs/step, plain Keras on JAX [\d,]+ µs/step: ", result.stdout)
    assert (tmp_path / "out" / "report.html").exists()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mnist", "cifar10"])
def test_a_pipeline_learns(name):
    result = command(name, *SMALL, "320", "--stages", "2", "--ipus", "4", "--no-compare")
    assert result.exit_code == 0, result.output
    assert "STAND-IN DATA" in result.stderr
    assert "4 devices, 2 replicas of 2 stages (Grouped), 8 micro-batches per update" in result.stdout
    assert "40 steps per epoch, 24 steps per execution" in result.stdout
    first, second = epochs(result.stdout)
    assert second < first, "the loss must fall"


@pytest.mark.slow
def test_accumulation_interleaved_with_launches():
    sizes = ["--gradient-accumulation-count", "2", "--steps-per-execution", "4"]
    result = command("mnist", *SMALL, "320", *sizes, "--no-compare")
    assert result.exit_code == 0, result.output
    assert "1 device, 2 micro-batches per update, micro-batch 8, 40 steps per epoch, 4 steps per" in result.stdout
    first, second = epochs(result.stdout)
    assert second < first, "the loss must fall"
