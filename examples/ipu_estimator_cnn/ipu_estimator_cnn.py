"""Train and test a CNN on CIFAR-10 with `IPUEstimator`: checkpoints, logging from inside the loop, reports.

Run it with `python examples/ipu_estimator_cnn/ipu_estimator_cnn.py --epochs 5`. All options: `--help`.
"""

import argparse
import logging
import time

import openipu as ipu
from openipu.estimator import EstimatorSpec, IPULoggingTensorHook, LoggingMode, ModeKeys, SessionRunHook, group

import keras
import numpy as np


def positive(kind):
    """The type of an option that is a number above 0: `int` or `float`."""

    def number(text):
        if not 0 < kind(text) < float("inf"):
            raise argparse.ArgumentTypeError(f"{text!r} is not above 0")
        return kind(text)

    return number


def parse_arguments():
    parser = argparse.ArgumentParser(description="A CNN on CIFAR-10 with IPUEstimator")
    parser.add_argument("--test-only", action="store_true", help="skip training, test the newest checkpoint")
    parser.add_argument("--train-only", action="store_true", help="skip testing")
    parser.add_argument("--batch-size", type=positive(int), default=32)
    parser.add_argument("--batches-per-step", type=positive(int), default=100, help="batches of one execution")
    parser.add_argument("--learning-rate", type=positive(float), default=0.01)
    parser.add_argument("--epochs", type=positive(float), default=100)
    parser.add_argument("--log-interval", type=positive(float), default=3, help="seconds between log lines")
    parser.add_argument(
        "--summary-interval", type=positive(int), default=1, help="steps between summaries for TensorBoard"
    )
    parser.add_argument("--model-dir", help="where checkpoints and summaries go")
    parser.add_argument("--profile", metavar="FOLDER", help="write a report to this folder")
    parser.add_argument("--generated-data", action="store_true", help="random images instead of CIFAR-10")
    args = parser.parse_args()
    if args.test_only and args.train_only:
        parser.error("--test-only and --train-only leave nothing to do")
    if args.test_only and not args.model_dir:
        parser.error("--test-only needs --model-dir, the folder with a checkpoint")
    return args


def load(generated):
    if not generated:
        data = ipu.datasets.cifar10()
        return (data.x_train, data.y_train[:, 0]), (data.x_test, data.y_test[:, 0])
    rng = np.random.default_rng(0)

    def draw(count):
        return rng.integers(0, 256, (count, 32, 32, 3), np.uint8), rng.integers(0, 10, count)

    return draw(50_000), draw(10_000)


def network(images):
    x = keras.ops.cast(images, "float32") / 255
    for filters in (32, 64):
        x = keras.layers.Conv2D(filters, 3, padding="same", activation="relu")(x)
        x = keras.layers.Conv2D(filters, 3, activation="relu")(x)
        x = keras.layers.MaxPooling2D()(x)
        x = keras.layers.Dropout(0.25)(x)
    x = keras.layers.Flatten()(x)
    x = keras.layers.Dropout(0.5)(keras.layers.Dense(512, activation="relu")(x))
    return keras.layers.Dense(10)(x)


def model_fn(features, labels, mode, params):
    logits = network(features)
    loss = keras.ops.mean(keras.losses.sparse_categorical_crossentropy(labels, logits, from_logits=True))
    right = keras.ops.mean(keras.ops.cast(keras.ops.argmax(logits, -1) == keras.ops.cast(labels, "int32"), "float32"))
    if mode == ModeKeys.EVAL:
        return EstimatorSpec(mode, loss=loss, eval_metric_ops={"accuracy": right})

    def line(values):
        return f"Training loss: {values['loss'].mean():.4f}, accuracy: {100 * values['accuracy'].mean():.2f}%"

    # The mean over all steps of the last execution, not only of its last step.
    hook = IPULoggingTensorHook(every_n_secs=params["log_interval"], formatter=line, logging_mode=LoggingMode.ALL)
    train_op = keras.optimizers.SGD(params["learning_rate"]).minimize(loss)
    train_op = group(train_op, hook.log({"loss": loss, "accuracy": right}))
    return EstimatorSpec(mode, loss=loss, train_op=train_op, training_hooks=[hook])


class Timer(SessionRunHook):
    """Prints how long a run took, including compilation."""

    def begin(self):
        self._start = time.perf_counter()

    def end(self, session):
        print(f"Took {time.perf_counter() - self._start:.2f} seconds to compile and run, to step {session.global_step}")


def make_estimator(args):
    cfg = ipu.config.IPUConfig()
    cfg.auto_select_ipus = 1
    ipu_config = ipu.ipu_run_config.IPURunConfig(iterations_per_loop=args.batches_per_step, ipu_options=cfg)
    config = ipu.ipu_run_config.RunConfig(
        ipu_run_config=ipu_config,
        model_dir=args.model_dir,
        save_summary_steps=args.summary_interval,
        log_step_count_steps=None,
    )
    params = {"learning_rate": args.learning_rate, "log_interval": args.log_interval}
    return ipu.ipu_estimator.IPUEstimator(model_fn, config=config, params=params)


def main():
    args = parse_arguments()
    if args.profile:
        ipu.reports.start(args.profile)
    logger = logging.getLogger("openipu")
    logger.setLevel(logging.INFO)
    logger.addHandler(logging.StreamHandler())
    logger.propagate = False

    train, test = load(args.generated_data)
    test_steps = len(test[0]) // args.batch_size // args.batches_per_step * args.batches_per_step
    if test_steps == 0 and not args.train_only:
        raise SystemExit(
            f"{len(test[0])} test images are less than one execution: {args.batches_per_step} batches of "
            f"{args.batch_size}. Lower --batches-per-step or --batch-size, or give --train-only."
        )
    estimator = make_estimator(args)
    if not args.test_only:
        # Whole executions, with at least one step more than the epochs need.
        steps = int(args.epochs * len(train[0]) // args.batch_size)
        steps += args.batches_per_step - steps % args.batches_per_step
        print(f"Training on {steps * args.batch_size} examples")
        data = ipu.data.repeat(*train, batch_size=args.batch_size, shuffle=True, seed=1)
        estimator.train(lambda: data, steps=steps, hooks=[Timer()])
    if not args.train_only:
        print(f"Evaluating on {test_steps * args.batch_size} examples")
        data = ipu.data.repeat(*test, batch_size=args.batch_size)
        result = estimator.evaluate(lambda: data, steps=test_steps, hooks=[Timer()])
        print(f"Test loss: {result['loss']:.4f}")
        print(f"Test accuracy: {100 * result['accuracy']:.2f}%")


if __name__ == "__main__":
    main()
