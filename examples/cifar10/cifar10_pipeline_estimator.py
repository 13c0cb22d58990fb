"""CIFAR-10 with `IPUPipelineEstimator`: the model is cut into two stages, each on its own device.

Micro-batches follow each other through the stages; the weights change once after `--gradient-accumulation-count` of
them. Run it with `python examples/cifar10/cifar10_pipeline_estimator.py --epochs 5`.
"""

import argparse

import openipu as ipu
from openipu.estimator import ModeKeys

import keras
import numpy as np
from cifar10 import count, execution_steps, layers, load, mean_loss, show_log, test_input, train_input


def parse_arguments():
    parser = argparse.ArgumentParser(description="CIFAR-10 with IPUPipelineEstimator")
    parser.add_argument("--batch-size", type=count, default=16, help="images of one micro-batch")
    parser.add_argument("--epochs", type=count, default=150, help="passes over 50,000 images")
    parser.add_argument("--ipus", type=count, default=2, help="number of devices: 2 stages times replicas")
    parser.add_argument("--gradient-accumulation-count", type=count, default=8, help="micro-batches of one update")
    parser.add_argument("--model_shard_position", type=count, default=7, help="layers in the first stage, 1 to 17")
    parser.add_argument("--profile", metavar="FOLDER", help="write a report to this folder")
    args = parser.parse_args()
    if args.ipus < 2 or args.ipus % 2:
        parser.error(f"--ipus is {args.ipus}, but each replica needs 2 devices. Give 2, 4, ...")
    if not 1 <= args.model_shard_position <= 17:
        parser.error(f"--model_shard_position is {args.model_shard_position}, but 18 layers are cut after 1 to 17.")
    return args


def model_fn(mode, params):
    network = layers()
    cut = params["model_shard_position"]

    def stage1(images, labels):
        x = keras.ops.cast(images, "float32") / 255
        for layer in network[:cut]:
            x = layer(x)
        return x, labels

    def stage2(x, labels):
        for layer in network[cut:]:
            x = layer(x)
        loss = mean_loss(labels, x)
        return loss if mode == ModeKeys.TRAIN else (loss, x, labels)

    def optimizer_function(loss):
        # Unlike the other scripts, not SGD: with one update per 128 images it would need more epochs.
        optimizer = ipu.optimizers.CrossReplicaOptimizer(keras.optimizers.Adam(0.001))
        return ipu.ops.pipelining_ops.OptimizerFunctionOutput(optimizer, loss)

    def eval_metrics_fn(loss, logits, labels):
        """On the host, with the outputs of all micro-batches."""
        return {"loss": np.mean(loss), "accuracy": np.mean(np.argmax(logits, -1) == labels)}

    return ipu.ipu_pipeline_estimator.IPUPipelineEstimatorSpec(
        mode,
        computational_stages=[stage1, stage2],
        gradient_accumulation_count=params["gradient_accumulation_count"],
        optimizer_function=optimizer_function,
        eval_metrics_fn=eval_metrics_fn,
    )


def main():
    args = parse_arguments()
    if args.profile:
        ipu.reports.start(args.profile)
    show_log()
    train, test = load()
    accumulated = args.gradient_accumulation_count
    updates = max(execution_steps(test[0], args.batch_size) // accumulated, 1)
    test_steps = updates * accumulated  # an execution holds whole updates
    training_steps = 5 * test_steps

    cfg = ipu.config.IPUConfig()
    cfg.auto_select_ipus = args.ipus
    ipu_config = ipu.ipu_run_config.IPURunConfig(
        iterations_per_loop=test_steps, ipu_options=cfg, num_shards=2, num_replicas=args.ipus // 2
    )
    config = ipu.ipu_run_config.RunConfig(ipu_run_config=ipu_config, log_step_count_steps=training_steps)
    params = {"model_shard_position": args.model_shard_position, "gradient_accumulation_count": accumulated}

    estimator = ipu.ipu_pipeline_estimator.IPUPipelineEstimator(model_fn, config=config, params=params)
    estimator.train(train_input(*train, args.batch_size), steps=training_steps * args.epochs)
    result = estimator.evaluate(test_input(*test, args.batch_size))

    print(f"Validation accuracy: {100 * result['accuracy']}%")
    print(f"Validation loss: {result['loss']}")


if __name__ == "__main__":
    main()
