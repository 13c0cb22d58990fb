"""CIFAR-10 with Keras' `fit` under `IPUStrategy`: the least that a Keras script has to change.

Run it with `python examples/cifar10/cifar10_ipu_strategy.py --epochs 5`.
"""

import argparse

import openipu as ipu

import keras
from cifar10 import count, execution_steps, layers, load


def parse_arguments():
    parser = argparse.ArgumentParser(description="CIFAR-10 with IPUStrategy")
    parser.add_argument("--batch-size", type=count, default=16, help="batch size for training")
    parser.add_argument("--epochs", type=count, default=150, help="passes over the training images")
    parser.add_argument("--profile", metavar="FOLDER", help="write a report to this folder")
    return parser.parse_args()


def main():
    args = parse_arguments()
    if args.profile:
        ipu.reports.start(args.profile)
    (x_train, y_train), (x_test, y_test) = load()

    cfg = ipu.config.IPUConfig()
    cfg.auto_select_ipus = 1
    cfg.configure_ipu_system()

    with ipu.ipu_strategy.IPUStrategy().scope():
        model = keras.Sequential([keras.Input((32, 32, 3)), keras.layers.Rescaling(1 / 255), *layers()])
        model.compile(
            optimizer=keras.optimizers.SGD(0.01),
            loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
            steps_per_execution=execution_steps(x_test, args.batch_size),
        )
        model.fit(x_train, y_train, batch_size=args.batch_size, epochs=args.epochs, verbose=2)
        result = model.evaluate(x_test, y_test, batch_size=args.batch_size, verbose=0, return_dict=True)

    print(f"Validation accuracy: {100 * result['accuracy']}%")
    print(f"Validation loss: {result['loss']}")


if __name__ == "__main__":
    main()
