"""Your own training loop: data through an infeed queue, losses through an outfeed queue, one program per epoch.

The whole loop runs on the device. A second thread prints the losses while it runs.
Run it with `python examples/infeed_outfeed.py`, or with `--replicas 2`.
"""

import argparse
import threading

import openipu as ipu

import keras
import numpy as np


def parse_arguments():
    parser = argparse.ArgumentParser(description="Feeds with OpenIPU")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=32, help="samples that each replica processes at once")
    parser.add_argument("--replicas", type=int, default=1)
    parser.add_argument("--samples", type=int, help="how many training images to use (default: all)")
    parser.add_argument("--test-samples", type=int, help="how many test images to use (default: all)")
    parser.add_argument("--profile", metavar="FOLDER", help="write a report to this folder")
    return parser.parse_args()


def prepare(images, labels):
    return images.reshape(len(images), -1) / np.float32(255), labels.astype("int32")


def make_strategy(replicas):
    cfg = ipu.config.IPUConfig()
    cfg.auto_select_ipus = replicas
    cfg.configure_ipu_system()
    return ipu.ipu_strategy.IPUStrategy()


def shuffled_batches(x, y, size):
    """Endless batches of one size. Any dataset would do: tf.data, grain, a list."""
    generator = np.random.default_rng(1)
    while True:
        order = generator.permutation(len(x))
        for start in range(0, len(x) - size + 1, size):
            rows = order[start : start + size]
            yield x[rows], y[rows]


def print_losses(outfeed, done, every):
    """Read the outfeed until the program is done and everything is read."""
    step = 0
    while True:
        last = done.is_set()
        for loss in outfeed:
            if step % every == 0:
                print(f"  step {step}: loss {np.mean(loss):.4f}", flush=True)
            step += 1
        if last:
            return
        done.wait(0.01)


def main():
    args = parse_arguments()
    if args.profile:
        ipu.reports.start(args.profile)
    keras.utils.set_random_seed(1)
    mnist = ipu.datasets.mnist(args.samples, args.test_samples)
    x_train, y_train = prepare(mnist.x_train, mnist.y_train)
    x_test, y_test = prepare(mnist.x_test, mnist.y_test)
    steps = len(x_train) // (args.batch_size * args.replicas)

    strategy = make_strategy(args.replicas)
    with strategy.scope():
        model = keras.Sequential(
            [keras.Input((784,)), keras.layers.Dense(64, activation="relu"), keras.layers.Dense(10)]
        )
        # Gradients are summed over replicas; this wrapper takes their mean.
        optimizer = ipu.optimizers.CrossReplicaOptimizer(keras.optimizers.SGD(0.1, momentum=0.9))
        loss_fn = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        accuracy = keras.metrics.SparseCategoricalAccuracy()
        infeed = ipu.ipu_infeed_queue.IPUInfeedQueue(lambda: shuffled_batches(x_train, y_train, args.batch_size))
        outfeed = ipu.ipu_outfeed_queue.IPUOutfeedQueue(buffer_depth=64)

    def step(x, y):
        def loss():
            logits = model(x, training=True)
            accuracy.update_state(y, logits)
            return loss_fn(y, logits)

        outfeed.enqueue(ipu.training.minimize(optimizer, loss, model.trainable_variables))

    def one_epoch():
        accuracy.reset_state()
        ipu.loops.repeat(steps, step, [], infeed)

    for epoch in range(args.epochs):
        print(f"Epoch {epoch + 1}/{args.epochs}: {steps} steps on {args.replicas} replica(s)")
        done = threading.Event()
        reader = threading.Thread(target=print_losses, args=(outfeed, done, max(1, steps // 4)))
        reader.start()
        strategy.run(one_epoch)
        done.set()
        reader.join()
        print(f"{steps}/{steps} - accuracy: {float(accuracy.result()):.4f}")

    predicted = np.argmax(model.predict(x_test, batch_size=100, verbose=0), axis=-1)
    print(f"Test accuracy: {np.mean(predicted == y_test):.4f}")


if __name__ == "__main__":
    main()
