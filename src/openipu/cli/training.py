"""The commands `openipu mnist` and `openipu cifar10`: their options. `train.py` does the work."""

from typing import Annotated, Any

from . import options


def train_mnist(
    epochs: options.Epochs = 3,
    batch_size: options.BatchSize = 64,
    steps_per_execution: options.StepsPerExecution = None,
    ipus: options.Ipus = None,
    stages: options.Stages = 1,
    schedule: options.Schedule = None,
    accumulate: options.Accumulate = None,
    compare: options.Compare = True,
    samples: Annotated[int | None, options.samples(60_000)] = None,
    profile: options.Profile = None,
) -> None:
    """Train the tutorial CNN on MNIST and compare its speed with plain Keras.

    Examples:

    openipu mnist

    openipu mnist --ipus 2 --samples 6000 --profile out

    openipu mnist --stages 2 --schedule OneFOneB --accumulate 8
    """
    _train(
        "MNIST", epochs, batch_size, steps_per_execution, ipus, stages, schedule, accumulate, compare, samples, profile
    )


def train_cifar10(
    epochs: options.Epochs = 3,
    batch_size: options.BatchSize = 32,
    steps_per_execution: options.StepsPerExecution = None,
    ipus: options.Ipus = None,
    stages: options.Stages = 1,
    schedule: options.Schedule = None,
    accumulate: options.Accumulate = None,
    compare: options.Compare = True,
    samples: Annotated[int | None, options.samples(50_000)] = None,
    profile: options.Profile = None,
) -> None:
    """Train a larger CNN on CIFAR-10 and compare its speed with plain Keras.

    Examples:

    openipu cifar10 --epochs 20

    openipu cifar10 --stages 2 --samples 5000 --no-compare
    """
    _train(
        "CIFAR10", epochs, batch_size, steps_per_execution, ipus, stages, schedule, accumulate, compare, samples,
        profile,
    )  # fmt: skip


def _train(tutorial: str, *given: Any) -> None:
    from .terminal import fail, make_console

    console = make_console()
    with console.status("Loading Keras and JAX ..."):
        from . import train
    try:
        train.run(getattr(train, tutorial), train.Options(*given), console)
    except (ValueError, NotImplementedError, OSError) as error:  # a mistake of the user
        fail(error, 2)
