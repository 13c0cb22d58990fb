"""What the completed example needs besides the model: the data and the command line."""

import argparse

import openipu as ipu

import keras
import numpy as np
from model import NUM_CLASSES, NUM_STAGES

SCHEDULES = [schedule.name for schedule in ipu.ops.pipelining_ops.PipelineSchedule]


def load_data(args):
    """Images from 0 to 1 with an axis for the (single) channel; labels as one-hot rows."""
    mnist = ipu.datasets.mnist(args.samples, args.test_samples)

    def prepare(images, labels):
        return np.expand_dims(images / np.float32(255), -1), keras.utils.to_categorical(labels, NUM_CLASSES)

    return prepare(mnist.x_train, mnist.y_train), prepare(mnist.x_test, mnist.y_test)


def parse_arguments(argv=None):
    """The options, with defaults filled in. Options that contradict each other end the program."""
    parser = argparse.ArgumentParser(
        description="The tutorial CNN: plain Keras on the CPU, or OpenIPU on devices, or a pipeline over devices",
        allow_abbrev=False,
    )
    parser.add_argument("--use-ipu", action="store_true", help="train on devices instead of with plain Keras")
    parser.add_argument("--pipelining", action="store_true", help=f"cut the model into {NUM_STAGES} pipeline stages")
    parser.add_argument(
        "--gradient-accumulation-count",
        "--gradient-accumulation-steps-per-replica",
        dest="accumulate",
        type=count,
        metavar="N",
        help="batches per update, on each replica (default: 8 with --pipelining, else 1)",
    )
    parser.add_argument("--batch-size", type=count, default=64, metavar="N", help="of one replica (default: 64)")
    parser.add_argument(
        "--ipus", type=count, metavar="N", help=f"devices (default: {NUM_STAGES} with --pipelining, else 1)"
    )
    parser.add_argument("--epochs", type=count, default=3, metavar="N", help="default: 3")
    parser.add_argument("--schedule", choices=SCHEDULES, help="of the pipeline (default: Grouped)")
    parser.add_argument(
        "--steps-per-execution",
        type=count,
        metavar="N",
        help="steps of one launch of the program (default: an epoch with --use-ipu, else 1)",
    )
    parser.add_argument("--samples", type=count, metavar="N", help="how many training images to use (default: all)")
    parser.add_argument("--test-samples", type=count, metavar="N", help="how many test images to use (default: all)")
    parser.add_argument("--profile", metavar="FOLDER", help="write a report to this folder")
    args = parser.parse_args(argv)
    try:
        check(args)
        return complete(args)
    except ValueError as error:
        parser.error(str(error))


def count(text):
    """A whole number of 1 or more."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of 1 or more")
    return int(text)


def check(args):
    """Say which options do not go together, and what to do about it."""
    for option, given in (
        ("--pipelining", args.pipelining),
        ("--ipus", args.ipus),
        ("--gradient-accumulation-count", args.accumulate),
        ("--schedule", args.schedule),
        ("--profile", args.profile),
    ):
        if given and not args.use_ipu:
            raise ValueError(f"{option} is for devices, but without --use-ipu this is plain Keras. Add --use-ipu.")
    if args.schedule and not args.pipelining:
        raise ValueError(f"--schedule {args.schedule} is for a pipeline. Add --pipelining, or leave it out.")
    if args.pipelining and args.ipus and args.ipus % NUM_STAGES:
        raise ValueError(
            f"--ipus {args.ipus} is not a multiple of the {NUM_STAGES} pipeline stages, each of which takes a device. "
            f"Give {NUM_STAGES}, or {2 * NUM_STAGES} for two replicas."
        )


def complete(args):
    """Fill in what was not given, and check that the numbers suit the schedule."""
    args.ipus = args.ipus or (NUM_STAGES if args.pipelining else 1)
    args.replicas = args.ipus // (NUM_STAGES if args.pipelining else 1)
    args.accumulate = args.accumulate or (8 if args.pipelining else 1)
    args.schedule = args.schedule or "Grouped"
    if args.pipelining:
        ipu.schedules.by_name(args.schedule).table(NUM_STAGES, args.accumulate)
    if args.steps_per_execution and args.steps_per_execution % args.accumulate:
        raise ValueError(
            f"--steps-per-execution {args.steps_per_execution} is not a multiple of the {args.accumulate} batches of "
            f"an update. Give {-(-args.steps_per_execution // args.accumulate) * args.accumulate}."
        )
    return args


def steps_per_execution(args, samples):
    """The steps asked for, or an epoch: enough whole updates on every replica for all samples."""
    if args.steps_per_execution or not args.use_ipu:
        return args.steps_per_execution or 1
    updates = -(-samples // (args.batch_size * args.replicas * args.accumulate))
    return updates * args.accumulate
