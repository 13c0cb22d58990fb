"""Training that survives: stop it in any way, run the same command again, and it resumes where it was.

    python examples/resume.py --folder run --crash-after 20     # kills itself in the middle of an epoch
    python examples/resume.py --folder run                      # resumes, and ends as if nothing had happened

The last line is a digest of all weights: it is the same with and without the crash.
"""

import argparse
import hashlib
import os
import signal

import openipu as ipu

import keras
import numpy as np


def parse_arguments():
    parser = argparse.ArgumentParser(description="Checkpoints with OpenIPU")
    parser.add_argument("--folder", default="resume-run", help="folder of the checkpoints; a new one starts a new run")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--steps-per-execution", type=int, default=50)
    parser.add_argument("--crash-after", type=int, help="kill this process after this many executions")
    parser.add_argument("--samples", type=int, help="how many training images to use (default: all)")
    parser.add_argument("--test-samples", type=int, help="how many test images to use (default: all)")
    parser.add_argument("--profile", metavar="FOLDER", help="write a report to this folder")
    return parser.parse_args()


class Crash(keras.callbacks.Callback):
    """Kills the process, without a chance to clean up."""

    def __init__(self, executions):
        super().__init__()
        self.executions = executions

    def on_train_batch_end(self, batch, logs=None):  # noqa: ARG002
        self.executions -= 1
        if self.executions == 0:
            os.kill(os.getpid(), signal.SIGKILL)


def make_model(steps_per_execution):
    with ipu.ipu_strategy.IPUStrategy().scope():
        model = keras.Sequential(
            [
                keras.Input((784,)),
                keras.layers.Dense(128, activation="relu"),
                keras.layers.Dropout(0.2),
                keras.layers.Dense(10, activation="softmax"),
            ]
        )
    model.compile(
        "adam", "sparse_categorical_crossentropy", metrics=["accuracy"], steps_per_execution=steps_per_execution
    )
    return model


def main():
    args = parse_arguments()
    if args.profile:
        ipu.reports.start(args.profile)
    keras.utils.set_random_seed(1)
    mnist = ipu.datasets.mnist(args.samples, args.test_samples)
    x_train, x_test = (x.reshape(len(x), -1) / np.float32(255) for x in (mnist.x_train, mnist.x_test))

    model = make_model(args.steps_per_execution)
    # This line is all it takes. max_share=1 saves after every execution, however short they are.
    callbacks = [ipu.callbacks.Checkpoint(args.folder, max_share=1)]
    if args.crash_after:
        callbacks.append(Crash(args.crash_after))
    model.fit(x_train, mnist.y_train, batch_size=args.batch_size, epochs=args.epochs, verbose=2, callbacks=callbacks)

    _, accuracy = model.evaluate(x_test, mnist.y_test, batch_size=args.batch_size, verbose=0)
    print(f"Test accuracy: {accuracy:.4f}")
    digest = hashlib.sha256(b"".join(np.asarray(w.value).tobytes() for w in model.weights))
    print(f"Weights: {digest.hexdigest()[:16]}")


if __name__ == "__main__":
    main()
