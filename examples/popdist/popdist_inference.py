"""Evaluate in several instances what popdist_training.py has trained.

openipu launch --num-instances 4 examples/popdist/popdist_inference.py
"""

import argparse

import openipu as ipu
from openipu import popdist

import keras
from popdist_training import configure, make_model

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--batch-size", type=int, default=32, help="images of one step on one replica (default: 32)")
parser.add_argument("--images", type=int, help="evaluate the first images only")
parser.add_argument("--weights", default="popdist.weights.h5", help="the weights that the training has saved")
parser.add_argument("--profile", metavar="FOLDER", help="write a report to this folder")


def main():
    options = parser.parse_args()
    if options.profile:
        ipu.reports.start(options.profile)
    configure()
    instance, instances = popdist.getInstanceIndex(), popdist.getNumInstances()
    data = ipu.datasets.cifar10()
    x, y = data.x_test[: options.images][instance::instances], data.y_test[: options.images][instance::instances]
    with ipu.distributed.popdist_strategy.PopDistStrategy().scope():
        model = make_model()
    if instance == 0:
        model.load_weights(options.weights)  # the other instances take over what instance 0 has
    model.compile(
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"],
        steps_per_execution=max(1, len(x) // options.batch_size // popdist.getNumLocalReplicas()),
    )  # fmt: skip
    found = model.evaluate(x, y, options.batch_size, verbose=0, return_dict=True)
    if instance == 0:
        print(f"accuracy: {found['accuracy']:.4f}")


if __name__ == "__main__":
    main()
