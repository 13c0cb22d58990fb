"""The commands that train a network: `openipu mnist` and `openipu cifar10`. They differ in data and model only."""

from typing import Annotated, Any

import typer

from . import options
from .terminal import fail, make_console


def train_mnist(
    epochs: options.Epochs = 3,
    batch_size: options.BatchSize = 64,
    steps_per_execution: options.StepsPerExecution = None,
    ipus: options.Ipus = None,
    stages: options.Stages = 1,
    schedule: options.Schedule = None,
    gradient_accumulation_count: options.Accumulation = None,
    compare: options.Compare = True,
    samples: Annotated[
        int | None,
        typer.Option(min=1, max=60_000, metavar="N", help="Use only the first N images.", show_default="all"),
    ] = None,
    profile: options.Profile = None,
) -> None:
    """Train the tutorial CNN on MNIST and compare its speed with plain Keras.

    Examples:

    openipu mnist

    openipu mnist --ipus 2 --epochs 5

    openipu mnist --stages 2 --schedule Interleaved --profile out
    """
    _train(
        "mnist", epochs, batch_size, steps_per_execution, ipus, stages, schedule, gradient_accumulation_count, compare,
        samples, profile,
    )  # fmt: skip


def train_cifar10(
    epochs: options.Epochs = 3,
    batch_size: options.BatchSize = 32,
    steps_per_execution: options.StepsPerExecution = None,
    ipus: options.Ipus = None,
    stages: options.Stages = 1,
    schedule: options.Schedule = None,
    gradient_accumulation_count: options.Accumulation = None,
    compare: options.Compare = True,
    samples: Annotated[
        int | None,
        typer.Option(min=1, max=50_000, metavar="N", help="Use only the first N images.", show_default="all"),
    ] = None,
    profile: options.Profile = None,
) -> None:
    """Train the network of the CIFAR-10 examples and compare its speed with plain Keras.

    An epoch of all 50,000 images takes about a minute on two CPU cores.

    Examples:

    openipu cifar10 --samples 5000

    openipu cifar10 --ipus 2 --gradient-accumulation-count 4

    openipu cifar10 --stages 2 --schedule Interleaved --profile out
    """
    _train(
        "cifar10", epochs, batch_size, steps_per_execution, ipus, stages, schedule, gradient_accumulation_count,
        compare, samples, profile,
    )  # fmt: skip


def _train(name: str, *given: Any) -> None:
    """Run a demo with the options of its command, in the order of `Options`."""
    try:
        chosen = options.Options(*given)
        console = make_console()
        with console.status("Loading Keras and JAX ..."):
            from . import cifar10, demo, mnist
        demo.run({"mnist": mnist.DEMO, "cifar10": cifar10.DEMO}[name], chosen, console)
    except (ValueError, OSError) as error:  # a mistake of the user
        fail(error, 2)
