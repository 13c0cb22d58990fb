"""A large batch on a small device: several micro-batches make one update, on one or more replicas.

Trains twice, with accumulated micro-batches and with the whole batch at once, and shows that the weights are equal.
Run it with `python examples/gradient_accumulation.py`, or with `--replicas 2`.
"""

import argparse

import openipu as ipu

import keras
import numpy as np


def parse_arguments():
    parser = argparse.ArgumentParser(description="Gradient accumulation with OpenIPU")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--micro-batch", type=int, default=8, help="samples that each replica processes at once")
    parser.add_argument("--accumulate", type=int, default=8, help="micro-batches per update, on each replica")
    parser.add_argument("--replicas", type=int, default=1)
    parser.add_argument("--method", choices=["sum", "mean", "running_mean"], default="mean")
    parser.add_argument("--samples", type=int, help="how many training images to use (default: all)")
    parser.add_argument("--test-samples", type=int, help="how many test images to use (default: all)")
    parser.add_argument("--profile", metavar="FOLDER", help="write a report to this folder")
    return parser.parse_args()


def prepare_data(args):
    mnist = ipu.datasets.mnist(args.samples, args.test_samples)

    def prepare(images, labels):
        return images.reshape(len(images), -1) / np.float32(255), labels

    return prepare(mnist.x_train, mnist.y_train), prepare(mnist.x_test, mnist.y_test)


def make_strategy(devices):
    cfg = ipu.config.IPUConfig()
    cfg.auto_select_ipus = devices
    cfg.configure_ipu_system()
    return ipu.ipu_strategy.IPUStrategy()


def make_model():
    # Both runs start with the same weights and see the samples in the same order.
    keras.utils.set_random_seed(1)
    return keras.Sequential(
        [keras.Input((784,)), keras.layers.Dense(64, activation="relu"), keras.layers.Dense(10, activation="softmax")]
    )


def compile_and_fit(model, data, learning_rate, steps_per_execution, **settings):
    model.compile(
        keras.optimizers.SGD(learning_rate, momentum=0.9),
        "sparse_categorical_crossentropy",
        metrics=["accuracy"],
        steps_per_execution=steps_per_execution,
    )
    model.fit(*data, **settings)


def main():
    args = parse_arguments()
    if args.profile:
        ipu.reports.start(args.profile)
    train, test = prepare_data(args)
    learning_rate = 0.1
    batch = args.micro_batch * args.accumulate * args.replicas

    with make_strategy(args.replicas).scope():
        model = make_model()
    model.set_gradient_accumulation_options(
        gradient_accumulation_steps_per_replica=args.accumulate, gradient_accumulation_reduction_method=args.method
    )
    # Gradients are summed over replicas, and over micro-batches too with the method "sum".
    summed = args.replicas * (args.accumulate if args.method == "sum" else 1)
    print(f"{args.replicas} replica(s) x {args.accumulate} micro-batches of {args.micro_batch} samples per update")
    compile_and_fit(
        model, train, learning_rate / summed, 4 * args.accumulate,
        batch_size=args.micro_batch, epochs=args.epochs, verbose=2,
    )  # fmt: skip
    accuracy = model.evaluate(*test, batch_size=args.micro_batch, verbose=0, return_dict=True)["accuracy"]
    print(f"Test accuracy: {accuracy:.4f}")

    print(f"\nAgain, with all {batch} samples at once on one device")
    with make_strategy(1).scope():
        whole = make_model()
    compile_and_fit(whole, train, learning_rate, 4, batch_size=batch, epochs=args.epochs, verbose=0)
    differences = [np.abs(a - b).max() for a, b in zip(model.get_weights(), whole.get_weights(), strict=True)]
    print(f"Largest difference between any two weights: {max(differences):.1e}")


if __name__ == "__main__":
    main()
