"""The same network as in mnist.py on plain Keras, for comparison.

Run it with `python examples/mnist/mnist_cpu.py`.

OpenIPU only provides the data here (and chooses JAX as Keras' backend); Keras runs its own training loop.
"""

import argparse

from openipu import data, datasets

import keras
import numpy as np


def parse_arguments():
    parser = argparse.ArgumentParser(description="MNIST with plain Keras")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--steps-per-epoch", type=int, default=2000)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--samples", type=int, help="how many training images to use (default: all)")
    parser.add_argument("--test-samples", type=int, help="how many test images to use (default: all)")
    return parser.parse_args()


def create_model():
    return keras.Sequential(
        [
            keras.layers.Flatten(),
            keras.layers.Dense(128, activation="relu"),
            keras.layers.Dense(10, activation="softmax"),
        ]
    )


def main():
    args = parse_arguments()

    mnist = datasets.mnist(args.samples, args.test_samples)
    x_train, x_test = (images / np.float32(255) for images in (mnist.x_train, mnist.x_test))
    batches = data.repeat(x_train, mnist.y_train, batch_size=args.batch_size, shuffle=True)

    model = create_model()
    model.compile(
        optimizer=keras.optimizers.SGD(),
        loss=keras.losses.SparseCategoricalCrossentropy(),
        metrics=["accuracy"],
    )
    model.fit(batches, steps_per_epoch=args.steps_per_epoch, epochs=args.epochs, shuffle=False, verbose=2)
    result = model.evaluate(x_test, mnist.y_test, batch_size=args.batch_size, verbose=0, return_dict=True)

    print(f"Test accuracy: {result['accuracy']:.4f}")


if __name__ == "__main__":
    main()
