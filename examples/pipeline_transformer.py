"""A small decoder that learns to write Python, letter by letter, split automatically into pipeline stages.

The first and the last stage share an embedding: its gradients are added up, whatever devices they are on.
Run it with `python examples/pipeline_transformer.py`; with `--ipus 8` there are two replicas of the four stages.
"""

import argparse
import pathlib

import openipu as ipu

import keras
import numpy as np
from keras import layers

SCHEDULES = [schedule.name for schedule in ipu.ops.pipelining_ops.PipelineSchedule]


def parse_arguments():
    parser = argparse.ArgumentParser(description="A decoder in a pipeline with OpenIPU")
    parser.add_argument("--stages", type=int, default=4)
    parser.add_argument("--ipus", type=int, help="devices (default: one per stage); twice as many make two replicas")
    parser.add_argument("--schedule", choices=SCHEDULES, default="Grouped")
    parser.add_argument("--accumulate", type=int, help="micro-batches per update (default: twice the stages)")
    parser.add_argument("--batch-size", type=int, default=8, help="lines of text in a micro-batch")
    parser.add_argument("--steps", type=int, default=320, help="micro-batches per epoch")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--blocks", type=int, default=6, help="attention blocks")
    parser.add_argument("--width", type=int, default=64, help="numbers per letter")
    parser.add_argument("--context", type=int, default=64, help="letters that the model can look back at")
    parser.add_argument("--profile", metavar="FOLDER", help="write a report to this folder")
    return parser.parse_args()


def read_text():
    """The text of a module of Python's standard library as numbers, and the number of different letters."""
    text = pathlib.Path(argparse.__file__).read_text(encoding="utf-8")
    letters, numbers = np.unique(list(text), return_inverse=True)
    return numbers.astype("int32"), len(letters)


def windows(numbers, count, length, rng):
    """Pieces of the text, and for each letter the one that follows."""
    starts = rng.integers(0, len(numbers) - length, count)
    pieces = numbers[starts[:, None] + np.arange(length + 1)]
    return pieces[:, :-1], pieces[:, 1:]


class Positions(layers.Layer):
    """Adds what the model has learned about each position."""

    def build(self, shape):
        self.table = self.add_weight(shape=shape[1:], initializer=keras.initializers.RandomNormal(stddev=0.02))

    def call(self, inputs):
        return inputs + self.table


def make_model(letters, args):
    inputs = keras.Input((args.context,), dtype="int32")
    embedding = layers.ReversibleEmbedding(letters, args.width, embeddings_initializer="glorot_uniform")
    x = Positions()(embedding(inputs))
    for _ in range(args.blocks):
        y = layers.LayerNormalization()(x)
        y = layers.MultiHeadAttention(num_heads=4, key_dim=args.width // 4)(y, y, use_causal_mask=True)
        x = x + layers.Dropout(0.1)(y)
        y = layers.Dense(4 * args.width, activation="gelu")(layers.LayerNormalization()(x))
        x = x + layers.Dropout(0.1)(layers.Dense(args.width)(y))
    outputs = embedding(layers.LayerNormalization()(x), reverse=True)
    return keras.Model(inputs, outputs, name="decoder")


def main():
    args = parse_arguments()
    if args.profile:
        ipu.reports.start(args.profile)
    ipus, accumulate = args.ipus or args.stages, args.accumulate or 2 * args.stages
    replicas = ipus // args.stages
    numbers, letters = read_text()
    rng = np.random.default_rng(1)
    end = len(numbers) * 9 // 10
    train = windows(numbers[:end], args.steps * args.batch_size, args.context, rng)
    test = windows(numbers[end:], 8 * args.batch_size, args.context, rng)

    cfg = ipu.config.IPUConfig()
    cfg.auto_select_ipus = ipus
    cfg.configure_ipu_system()

    with ipu.ipu_strategy.IPUStrategy().scope():
        model = make_model(letters, args)
    model.set_pipeline_stage_assignment("auto", stages=args.stages, inputs=train[0][: args.batch_size])
    model.set_pipelining_options(
        gradient_accumulation_steps_per_replica=accumulate,
        pipeline_schedule=args.schedule,
        gradient_accumulation_reduction_method="mean",
    )
    updates = -(-args.steps // (accumulate * replicas))
    model.compile(
        keras.optimizers.Adam(3e-3),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
        steps_per_execution=updates * accumulate,  # an epoch is one program
    )
    samples = accumulate * replicas * args.batch_size
    print(f"\n{args.schedule}: {replicas} replica(s), {updates} updates per epoch, each from {samples} lines of text")
    model.fit(*train, batch_size=args.batch_size, epochs=args.epochs, verbose=2)

    result = model.evaluate(*test, batch_size=args.batch_size, verbose=0, return_dict=True)
    print(f"Text not seen before: loss {result['loss']:.3f} (guessing: {np.log(letters):.3f})")
    print(f"Test accuracy: {result['accuracy']:.4f}")


if __name__ == "__main__":
    main()
