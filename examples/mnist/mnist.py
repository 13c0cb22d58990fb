"""Train a small dense network on MNIST with OpenIPU: 100 steps per compiled program.

Run it with `python examples/mnist/mnist.py`, or with `--tf-data` to feed from a tf.data pipeline (needs TensorFlow).
"""

import argparse

import openipu as ipu

import keras
import numpy as np


def parse_arguments():
    parser = argparse.ArgumentParser(description="MNIST on one device with OpenIPU")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--steps-per-epoch", type=int, default=2000)
    parser.add_argument("--steps-per-execution", type=int, default=100)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--samples", type=int, help="how many training images to use (default: all)")
    parser.add_argument("--test-samples", type=int, help="how many test images to use (default: all)")
    parser.add_argument("--tf-data", action="store_true", help="feed from a tf.data pipeline")
    parser.add_argument("--profile", metavar="FOLDER", help="write a report to this folder")
    return parser.parse_args()


def looped_batches(x, y, batch_size):
    """Endless batches: shuffled again in every pass, always full, no image left out."""
    return ipu.data.repeat(x, y, batch_size=batch_size, shuffle=True)


def looped_tf_data(x, y, batch_size):
    """The same as a tf.data pipeline. Here, images that do not fill a last batch are dropped in every pass."""
    import tensorflow as tf

    dataset = tf.data.Dataset.from_tensor_slices((x, y))
    return dataset.shuffle(10000).batch(batch_size, drop_remainder=True).repeat()


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
    if args.profile:
        ipu.reports.start(args.profile)

    # Pixels from 0 to 1 train better than pixels from 0 to 255.
    mnist = ipu.datasets.mnist(args.samples, args.test_samples)
    x_train, x_test = (images / np.float32(255) for images in (mnist.x_train, mnist.x_test))
    make_batches = looped_tf_data if args.tf_data else looped_batches
    batches = make_batches(x_train, mnist.y_train, args.batch_size)

    # One device: the first GPU or TPU core if there is one, otherwise the CPU.
    cfg = ipu.config.IPUConfig()
    cfg.auto_select_ipus = 1
    cfg.configure_ipu_system()

    # A model made inside the scope runs the IPU way: one compiled program does `steps_per_execution` steps.
    strategy = ipu.ipu_strategy.IPUStrategy()
    with strategy.scope():
        model = create_model()
        model.compile(
            optimizer=keras.optimizers.SGD(),
            loss=keras.losses.SparseCategoricalCrossentropy(),
            metrics=["accuracy"],
            steps_per_execution=args.steps_per_execution,
        )
        # shuffle=False: an endless source decides its own order.
        model.fit(batches, steps_per_epoch=args.steps_per_epoch, epochs=args.epochs, shuffle=False, verbose=2)
        result = model.evaluate(x_test, mnist.y_test, batch_size=args.batch_size, verbose=0, return_dict=True)

    print(f"Test accuracy: {result['accuracy']:.4f}")


if __name__ == "__main__":
    main()
