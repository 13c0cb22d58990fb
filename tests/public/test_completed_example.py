"""The completed example of the tutorial: every combination of its options means something, or says what is wrong."""

import importlib
import itertools
import re
import sys

from openipu.datasets import StandInDataWarning

import keras
import pytest

from zoo import KERAS_WARNINGS

pytestmark = KERAS_WARNINGS

SMALL = ["--samples", "192", "--test-samples", "64", "--batch-size", "8", "--epochs", "2"]
VALUES = {
    "--use-ipu": [],
    "--pipelining": [],
    "--gradient-accumulation-count": ["4"],
    "--ipus": ["4"],
    "--schedule": ["Interleaved"],
    "--steps-per-execution": ["8"],
    "--profile": ["out"],
}
COMBINATIONS = [chosen for size in range(len(VALUES) + 1) for chosen in itertools.combinations(VALUES, size)]
FOR_DEVICES = {"--pipelining", "--gradient-accumulation-count", "--ipus", "--schedule", "--profile"}


@pytest.fixture(scope="module")
def example(request):
    """The modules of the example, found as when a user runs it, and forgotten afterwards: their names are common."""
    names = ("main", "model", "utils")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(request.config.rootpath / "examples/keras_tutorial/completed_example")
        for name in names:
            patch.delitem(sys.modules, name, raising=False)
        yield {name: importlib.import_module(name) for name in names}
        for name in names:
            del sys.modules[name]


def refused(example, argv, capsys):
    """The message with which the program ends, below the usage."""
    with pytest.raises(SystemExit) as end:
        example["utils"].parse_arguments(argv)
    assert end.value.code == 2
    return capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize("options", COMBINATIONS, ids=" ".join)
def test_each_combination_is_meant_or_refused(example, options, capsys):
    argv = [word for option in options for word in (option, *VALUES[option])]
    devices, pipelined = "--use-ipu" in options, "--pipelining" in options
    if not devices and FOR_DEVICES & set(options):
        message = refused(example, argv, capsys)
        assert "Add --use-ipu." in message
        assert any(option in message for option in FOR_DEVICES & set(options))
    elif "--schedule" in options and not pipelined:
        assert "--schedule Interleaved is for a pipeline. Add --pipelining" in refused(example, argv, capsys)
    else:
        args = example["utils"].parse_arguments(argv)
        assert args.ipus == (4 if "--ipus" in options else 2 if pipelined else 1)
        assert args.replicas == args.ipus // (2 if pipelined else 1)
        assert args.accumulate == (4 if "--gradient-accumulation-count" in options else 8 if pipelined else 1)
        assert args.schedule == ("Interleaved" if "--schedule" in options else "Grouped")
        # 6410 images are 101 batches, the last one smaller; an execution has whole updates for all of them.
        epoch = -(-101 // (args.replicas * args.accumulate)) * args.accumulate if devices else 1
        steps = example["utils"].steps_per_execution(args, samples=6_410)
        assert steps == (8 if "--steps-per-execution" in options else epoch)


def test_the_alias_and_the_defaults(example):
    parse = example["utils"].parse_arguments
    argv = ["--use-ipu", "--gradient-accumulation-steps-per-replica", "3"]
    assert parse(argv) == parse(["--use-ipu", "--gradient-accumulation-count", "3"])
    assert (parse([]).batch_size, parse([]).epochs, parse([]).use_ipu) == (64, 3, False)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("--use-ipu --pipelining --ipus 3", "--ipus 3 is not a multiple of the 2 pipeline stages.* Give 2, or 4"),
        (
            "--use-ipu --pipelining --gradient-accumulation-count 6",
            "needs a multiple of 4 micro-batches, not 6. Use 4 or 8",
        ),
        ("--use-ipu --pipelining --schedule Interleaved --gradient-accumulation-count 3", "Use 2 or 4"),
        ("--use-ipu --pipelining --steps-per-execution 20", "20 is not a multiple of the 8 batches.* Give 24"),
        ("--use-ipu --gradient-accumulation-count 4 --steps-per-execution 1", "not a multiple of the 4.* Give 4"),
        ("--use-ipu --pipelining --schedule Random", "invalid choice: 'Random'"),
        ("--batch-size 0", "--batch-size: '0' is not a whole number of 1 or more"),
        ("--epochs two", "--epochs: 'two' is not a whole number"),
        ("--ipu", "unrecognized arguments: --ipu"),
    ],
)
def test_numbers_that_do_not_fit(example, argv, message, capsys):
    assert re.search(message, refused(example, argv.split(), capsys))


def run(example, argv, capsys):
    """Train; gives the model and what was printed, after the checks that hold for every run."""
    keras.utils.clear_session()  # the same names, so that programs are found in the cache
    seen = keras.callbacks.History()
    with pytest.warns(StandInDataWarning):
        result = example["main"].main([*argv.split(), *SMALL], callbacks=[seen])
    output = capsys.readouterr().out
    assert "Program ran successfully" in output
    assert f"Test accuracy: {result['test_accuracy']:.4f}" in output
    first, last = seen.history["loss"]
    assert last < first
    assert seen.history["accuracy"][-1] == result["accuracy"]
    return seen.model, output


def test_without_options_it_is_plain_keras(example, capsys):
    model, output = run(example, "", capsys)
    assert "Plain Keras on the CPU" in output
    assert not hasattr(model, "set_pipelining_options")
    assert model.steps_per_execution == 1


def test_replicas_accumulate(example, capsys):
    model, output = run(example, "--use-ipu --ipus 2 --gradient-accumulation-count 2", capsys)
    assert "2 device(s): 2 replica(s)\nEach update is made from 4 batch(es) of 8 images" in output
    # 24 batches per epoch, 4 in an update.
    assert int(model.optimizer.iterations) == 2 * 6


@pytest.mark.slow  # test_examples.py has a pipeline, and replicas of it
def test_replicas_of_a_pipeline(example, capsys):
    model, output = run(example, "--use-ipu --pipelining --ipus 4 --gradient-accumulation-count 4", capsys)
    assert "4 device(s): 2 pipeline stages (Grouped) x 2 replica(s)" in output
    assert int(model.optimizer.iterations) == 2 * 3


@pytest.mark.slow
@pytest.mark.parametrize(
    ("argv", "updates"),
    [
        ("--steps-per-execution 4", 24),
        ("--use-ipu", 24),
        ("--use-ipu --steps-per-execution 5", 24),
        ("--use-ipu --ipus 3", 8),
        ("--use-ipu --ipus 2 --steps-per-execution 3", 12),
        ("--use-ipu --gradient-accumulation-count 5", 5),
        ("--use-ipu --gradient-accumulation-count 4 --steps-per-execution 8", 6),
        ("--use-ipu --ipus 2 --gradient-accumulation-count 4 --steps-per-execution 4", 3),
        ("--use-ipu --pipelining", 3),
        ("--use-ipu --pipelining --steps-per-execution 8", 3),
        ("--use-ipu --pipelining --ipus 4 --steps-per-execution 8", 2),
        ("--use-ipu --pipelining --ipus 4 --schedule GPipe --gradient-accumulation-count 3", 4),
        ("--use-ipu --pipelining --schedule Interleaved --gradient-accumulation-count 6", 4),
        ("--use-ipu --pipelining --schedule Sequential --gradient-accumulation-count 1 --steps-per-execution 3", 24),
        ("--use-ipu --pipelining --schedule OneFOneB --gradient-accumulation-count 5 --steps-per-execution 10", 5),
    ],
)
def test_other_combinations_train(example, argv, updates, capsys):
    model, _ = run(example, argv, capsys)
    # An epoch's last update may have fewer micro-batches.
    assert int(model.optimizer.iterations) == 2 * updates
