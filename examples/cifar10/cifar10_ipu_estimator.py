"""CIFAR-10 with `IPUEstimator`: the model is a function, and the estimator does the rest.

Run it with `python examples/cifar10/cifar10_ipu_estimator.py --epochs 5`.
"""

import argparse

import openipu as ipu
from openipu.estimator import EstimatorSpec, ModeKeys

import keras
from cifar10 import count, execution_steps, load, mean_loss, network, show_log, test_input, train_input


def parse_arguments():
    parser = argparse.ArgumentParser(description="CIFAR-10 with IPUEstimator")
    parser.add_argument("--batch-size", type=count, default=16, help="batch size for training")
    parser.add_argument("--epochs", type=count, default=150, help="passes over the training images")
    parser.add_argument("--profile", metavar="FOLDER", help="write a report to this folder")
    return parser.parse_args()


def model_fn(features, labels, mode):
    logits = network(features)
    loss = mean_loss(labels, logits)
    if mode == ModeKeys.TRAIN:
        return EstimatorSpec(mode, loss=loss, train_op=keras.optimizers.SGD(0.01).minimize(loss))
    accuracy = keras.metrics.SparseCategoricalAccuracy()
    return EstimatorSpec(mode, loss=loss, eval_metric_ops={"accuracy": (accuracy, labels, logits)})


def main():
    args = parse_arguments()
    if args.profile:
        ipu.reports.start(args.profile)
    show_log()
    train, test = load()
    test_steps = execution_steps(test[0], args.batch_size)
    training_steps = 5 * test_steps  # five times as many images

    cfg = ipu.config.IPUConfig()
    cfg.auto_select_ipus = 1
    ipu_config = ipu.ipu_run_config.IPURunConfig(iterations_per_loop=test_steps, ipu_options=cfg)
    config = ipu.ipu_run_config.RunConfig(ipu_run_config=ipu_config, log_step_count_steps=training_steps)

    estimator = ipu.ipu_estimator.IPUEstimator(model_fn, config=config)
    estimator.train(train_input(*train, args.batch_size), steps=training_steps * args.epochs)
    result = estimator.evaluate(test_input(*test, args.batch_size))

    print(f"Validation accuracy: {100 * result['accuracy']}%")
    print(f"Validation loss: {result['loss']}")


if __name__ == "__main__":
    main()
