"""The tutorial CNN cut into two stages; the changes from completed_demo_replicated.py are marked.

Trains twice: on 2 devices, one for each stage, and on 4 devices, which are 2 replicas of the 2 stages.
Run it with `python examples/keras_tutorial/completed_demos/completed_demo_pipelining.py`.
"""

import argparse

import openipu as ipu

import keras
import numpy as np

NUM_CLASSES = 10
INPUT_SHAPE = (28, 28, 1)
NUM_STAGES = 2  # Changed


def parse_arguments():
    parser = argparse.ArgumentParser(description="The tutorial CNN in a pipeline with OpenIPU")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=64)
    # Changed: a replica takes as many devices as the model has stages; more devices make more replicas.
    parser.add_argument("--ipus", type=int, nargs="+", default=[2, 4], help="devices; train once for each number")
    # Changed: this many batches go through the pipeline, one behind the other, before each update of the weights.
    parser.add_argument("--gradient-accumulation-steps-per-replica", type=int, default=8)
    parser.add_argument("--steps-per-execution", type=int, help="default: one epoch")
    parser.add_argument("--samples", type=int, help="how many training images to use (default: all)")
    parser.add_argument("--test-samples", type=int, help="how many test images to use (default: all)")
    parser.add_argument("--profile", metavar="FOLDER", help="write a report to this folder")
    return parser.parse_args()


def prepare_data(mnist, args, num_replicas):
    """Images from 0 to 1 with an axis for the (single) channel; labels as one-hot rows; whole updates only."""

    def prepare(images, labels):
        # Changed: an update takes several batches on every replica.
        whole = args.batch_size * num_replicas * args.gradient_accumulation_steps_per_replica
        images, labels = ipu.data.trim(images, labels, batch_size=whole)
        return np.expand_dims(images / np.float32(255), -1), keras.utils.to_categorical(labels, NUM_CLASSES)

    return prepare(mnist.x_train, mnist.y_train), prepare(mnist.x_test, mnist.y_test)


def model_fn():
    inputs = keras.Input(shape=INPUT_SHAPE)
    # Changed: each layer is in one of the stages.
    with ipu.keras.PipelineStage(0):
        x = keras.layers.Conv2D(32, kernel_size=(3, 3), activation="relu")(inputs)
        x = keras.layers.MaxPooling2D(pool_size=(2, 2))(x)
        x = keras.layers.Conv2D(64, kernel_size=(3, 3), activation="relu")(x)
    with ipu.keras.PipelineStage(1):
        x = keras.layers.MaxPooling2D(pool_size=(2, 2))(x)
        x = keras.layers.Flatten()(x)
        x = keras.layers.Dropout(0.5)(x)
        outputs = keras.layers.Dense(NUM_CLASSES, activation="softmax")(x)
    return inputs, outputs


def train(mnist, args, num_ipus):
    num_replicas = num_ipus // NUM_STAGES  # Changed
    (x_train, y_train), (x_test, y_test) = prepare_data(mnist, args, num_replicas)

    cfg = ipu.config.IPUConfig()
    cfg.auto_select_ipus = num_ipus
    cfg.configure_ipu_system()

    strategy = ipu.ipu_strategy.IPUStrategy()
    with strategy.scope():
        model = keras.Model(*model_fn())
        # Changed: how the stages run. Gradients are also summed over batches before each update of the weights.
        model.set_pipelining_options(
            gradient_accumulation_steps_per_replica=args.gradient_accumulation_steps_per_replica,
            pipeline_schedule=ipu.ops.pipelining_ops.PipelineSchedule.Grouped,
        )
        model.compile(
            "sgd",
            "categorical_crossentropy",
            metrics=["accuracy"],
            steps_per_execution=args.steps_per_execution or len(x_train) // (args.batch_size * num_replicas),
        )
        model.print_pipeline_stage_assignment_summary()  # Changed

        print("\nTraining")
        model.fit(x_train, y_train, epochs=args.epochs, batch_size=args.batch_size, verbose=2)

        # The test data has fewer batches. Compiling again keeps the weights.
        model.compile(
            "sgd",
            "categorical_crossentropy",
            metrics=["accuracy"],
            steps_per_execution=len(x_test) // (args.batch_size * num_replicas),
        )

        print("\nEvaluation")
        result = model.evaluate(x_test, y_test, batch_size=args.batch_size, verbose=0, return_dict=True)
        print(f"Test accuracy: {result['accuracy']:.4f}")


def main():
    args = parse_arguments()
    if args.profile:
        ipu.reports.start(args.profile)
    mnist = ipu.datasets.mnist(args.samples, args.test_samples)
    for num_ipus in args.ipus:  # Changed
        print(f"\n{num_ipus} devices: {NUM_STAGES} stages x {num_ipus // NUM_STAGES} replica(s)")
        train(mnist, args, num_ipus)


if __name__ == "__main__":
    main()
