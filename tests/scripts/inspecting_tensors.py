"""MNIST, with activations, gradients and updates looked at through outfeeds while the model trains."""

import argparse

import numpy as np
import tensorflow as tf
from tensorflow import keras
from tensorflow.python import ipu

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--no-pipelining", action="store_true")
parser.add_argument("--use-gradient-accumulation", action="store_true", help="without stages: updates of 4 steps")
parser.add_argument("--outfeed-pre-accumulated-gradients", action="store_true", help="gradients of steps, not updates")
parser.add_argument("--steps-per-epoch", type=int, default=2000)
parser.add_argument("--epochs", type=int, default=3)
args = parser.parse_args()

BATCH, COUNT = 32, 4
tf.random.set_seed(2)


class Outfeed(keras.layers.Layer):
    """Hands what passes through it to the host."""

    def __init__(self, queue, **kwargs):
        super().__init__(**kwargs)
        self.queue = queue

    def call(self, inputs):
        self.queue.enqueue({self.name: inputs})
        return inputs


class OutfeedOptimizer(keras.optimizers.SGD):
    """Hands the gradients of chosen weights to the host before it applies them."""

    def __init__(self, queue, chosen, **kwargs):
        super().__init__(**kwargs)
        self.queue, self.chosen = queue, chosen

    def apply_gradients(self, grads_and_vars, name=None):
        grads_and_vars = list(grads_and_vars)
        self.queue.enqueue({v.name: g for g, v in grads_and_vars if any(part in v.name for part in self.chosen)})
        return super().apply_gradients(grads_and_vars)

    def get_config(self):
        return {**super().get_config(), "queue": self.queue, "chosen": self.chosen}


class Show(keras.callbacks.Callback):
    """Reads the queues after each epoch."""

    def __init__(self, **queues):
        super().__init__()
        self.queues = queues

    def on_epoch_end(self, epoch, logs=None):
        for kind, queue in self.queues.items():
            for name, values in queue.dequeue().items():
                assert np.isfinite(values.numpy()).all()
                print(f"epoch {epoch}: {kind} {name} {values.shape}")


def data():
    (x, y), _ = keras.datasets.mnist.load_data()
    dataset = tf.data.Dataset.from_tensor_slices((x.reshape(-1, 784).astype(np.float32) / 255, y.astype(np.int32)))
    return dataset.shuffle(1000, seed=1).batch(BATCH, drop_remainder=True).repeat()


config = ipu.config.IPUConfig()
config.auto_select_ipus = 1 if args.no_pipelining else 2
config.configure_ipu_system()
strategy = ipu.ipu_strategy.IPUStrategy()
accumulates = not args.no_pipelining or args.use_gradient_accumulation

with strategy.scope():
    hidden, outputs = (ipu.ipu_outfeed_queue.IPUOutfeedQueue() for _ in range(2))
    gradients = ipu.ipu_outfeed_queue.IPUOutfeedQueue()
    layers = [
        keras.layers.Dense(128, activation="relu", name="Dense_128"),
        Outfeed(hidden, name="hidden"),
        keras.layers.Dense(10, activation="softmax", name="Dense_10"),
        Outfeed(outputs, name="probabilities"),
    ]
    model = keras.Sequential([keras.layers.Input(shape=(784)), *layers])
    if args.outfeed_pre_accumulated_gradients:

        def watch(gradient, weight):
            if gradient.shape == (128,):
                gradients.enqueue({"bias": gradient})
            return gradient

        optimizer = ipu.optimizers.MapGradientOptimizer(keras.optimizers.SGD(learning_rate=0.01), watch)
    else:
        optimizer = OutfeedOptimizer(gradients, ["Dense_128/bias"], learning_rate=0.01)
    model.compile(
        loss="sparse_categorical_crossentropy",
        optimizer=optimizer,
        metrics=["accuracy"],
        steps_per_execution=args.steps_per_epoch,
    )
    if not args.no_pipelining:
        model.set_pipelining_options(
            gradient_accumulation_steps_per_replica=COUNT,
            pipeline_schedule=ipu.ops.pipelining_ops.PipelineSchedule.Grouped,
            gradient_accumulation_reduction_method="mean",
        )
        model.set_pipeline_stage_assignment([0, 0, 1, 1])
    elif args.use_gradient_accumulation:
        model.set_gradient_accumulation_options(
            gradient_accumulation_steps_per_replica=COUNT, gradient_accumulation_reduction_method="mean"
        )
    queues = {"activations": hidden, "results": outputs, "gradients": gradients}
    history = model.fit(
        data(), epochs=args.epochs, steps_per_epoch=args.steps_per_epoch, verbose=0, callbacks=[Show(**queues)]
    ).history
print(f"loss {history['loss'][-1]:.4f}, accuracy {history['accuracy'][-1]:.4f}")
