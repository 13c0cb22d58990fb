"""Train a small network on CIFAR-10 in several instances, each with its own part of the images.

openipu launch --num-instances 2 --num-replicas 4 examples/popdist/popdist_training.py
"""

import argparse

import openipu as ipu
from openipu import popdist

import keras

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--epochs", type=int, default=5)
parser.add_argument("--batch-size", type=int, default=32, help="images of one step on one replica (default: 32)")
parser.add_argument("--learning-rate", type=float, default=0.01)
parser.add_argument("--images", type=int, help="train on the first images only")
parser.add_argument("--weights", default="popdist.weights.h5", help="where instance 0 saves the weights")
parser.add_argument("--profile", metavar="FOLDER", help="write a report to this folder")


def make_model():
    return keras.Sequential([
        keras.Input((32, 32, 3)),
        keras.layers.Rescaling(1 / 255),
        keras.layers.Conv2D(32, 3, activation="relu"),
        keras.layers.MaxPooling2D(),
        keras.layers.Conv2D(32, 3, activation="relu"),
        keras.layers.MaxPooling2D(),
        keras.layers.Conv2D(64, 3, activation="relu"),
        keras.layers.Flatten(),
        keras.layers.Dense(64, activation="relu"),
        keras.layers.Dense(10),
    ])  # fmt: skip


def configure():
    """The devices of this instance's replicas."""
    config = ipu.config.IPUConfig()
    popdist.tensorflow.set_ipu_config(config)
    config.configure_ipu_system()


def main():
    options = parser.parse_args()
    if options.profile:
        ipu.reports.start(options.profile)
    configure()
    instance, instances = popdist.getInstanceIndex(), popdist.getNumInstances()
    data = ipu.datasets.cifar10()
    # Each instance has every n-th image, so all have equally many, or one more.
    x, y = data.x_train[: options.images][instance::instances], data.y_train[: options.images][instance::instances]
    with ipu.distributed.popdist_strategy.PopDistStrategy().scope():
        model = make_model()
    steps = max(1, len(x) // options.batch_size // popdist.getNumLocalReplicas())
    model.compile(
        keras.optimizers.SGD(options.learning_rate, momentum=0.9),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
        steps_per_execution=steps,
    )
    model.fit(x, y, options.batch_size, options.epochs, verbose=2)
    if instance == 0:
        model.save_weights(options.weights)


if __name__ == "__main__":
    main()
