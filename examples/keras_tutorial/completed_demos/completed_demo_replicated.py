"""The tutorial CNN on two devices, one copy of the model on each; the changes from completed_demo_faster.py are marked.

Run it with `python examples/keras_tutorial/completed_demos/completed_demo_replicated.py`.
"""

import argparse

import openipu as ipu

import keras
import numpy as np

NUM_CLASSES = 10
INPUT_SHAPE = (28, 28, 1)


def parse_arguments():
    parser = argparse.ArgumentParser(description="The tutorial CNN on several devices with OpenIPU")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=64)
    # Changed: one device for each copy of the model. `--batch-size` is what each of them processes in a step.
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--steps-per-execution", type=int, help="default: one epoch")
    parser.add_argument("--samples", type=int, help="how many training images to use (default: all)")
    parser.add_argument("--test-samples", type=int, help="how many test images to use (default: all)")
    parser.add_argument("--profile", metavar="FOLDER", help="write a report to this folder")
    return parser.parse_args()


def prepare_data(args):
    """Images from 0 to 1 with an axis for the (single) channel; labels as one-hot rows; whole steps only."""
    mnist = ipu.datasets.mnist(args.samples, args.test_samples)

    def prepare(images, labels):
        # Changed: a step takes a batch on every replica.
        images, labels = ipu.data.trim(images, labels, batch_size=args.batch_size * args.replicas)
        return np.expand_dims(images / np.float32(255), -1), keras.utils.to_categorical(labels, NUM_CLASSES)

    return prepare(mnist.x_train, mnist.y_train), prepare(mnist.x_test, mnist.y_test)


def model_fn():
    inputs = keras.Input(shape=INPUT_SHAPE)
    x = keras.layers.Conv2D(32, kernel_size=(3, 3), activation="relu")(inputs)
    x = keras.layers.MaxPooling2D(pool_size=(2, 2))(x)
    x = keras.layers.Conv2D(64, kernel_size=(3, 3), activation="relu")(x)
    x = keras.layers.MaxPooling2D(pool_size=(2, 2))(x)
    x = keras.layers.Flatten()(x)
    x = keras.layers.Dropout(0.5)(x)
    outputs = keras.layers.Dense(NUM_CLASSES, activation="softmax")(x)
    return inputs, outputs


def main():
    args = parse_arguments()
    if args.profile:
        ipu.reports.start(args.profile)
    (x_train, y_train), (x_test, y_test) = prepare_data(args)

    cfg = ipu.config.IPUConfig()
    cfg.auto_select_ipus = args.replicas  # Changed
    cfg.configure_ipu_system()

    strategy = ipu.ipu_strategy.IPUStrategy()
    with strategy.scope():
        model = keras.Model(*model_fn())
        # Changed: steps are counted on each replica. Gradients are summed over replicas before each update of the
        # weights, so the learning rate acts as if it were multiplied by the number of replicas.
        model.compile(
            "sgd",
            "categorical_crossentropy",
            metrics=["accuracy"],
            steps_per_execution=args.steps_per_execution or len(x_train) // (args.batch_size * args.replicas),
        )
        model.summary()

        print("\nTraining")
        model.fit(x_train, y_train, epochs=args.epochs, batch_size=args.batch_size, verbose=2)

        # The test data has fewer batches. Compiling again keeps the weights.
        model.compile(
            "sgd",
            "categorical_crossentropy",
            metrics=["accuracy"],
            steps_per_execution=len(x_test) // (args.batch_size * args.replicas),
        )

        print("\nEvaluation")
        result = model.evaluate(x_test, y_test, batch_size=args.batch_size, verbose=0, return_dict=True)
        print(f"Test accuracy: {result['accuracy']:.4f}")


if __name__ == "__main__":
    main()
