"""A long LSTM whose activations are computed again in the backward pass, from checkpoints along the sequence."""

import argparse

import numpy as np
import tensorflow as tf
from ipu_tensorflow_addons.keras.layers import LSTM, RecomputationCheckpoint
from tensorflow import keras
from tensorflow.python import ipu

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--seq-len", type=int, default=2048)
parser.add_argument("--checkpoints", type=int, default=7)
args = parser.parse_args()

parts = args.checkpoints + 1
if args.seq_len % parts:
    raise SystemExit(f"A sequence of {args.seq_len} steps can't be evenly divided by {args.checkpoints} checkpoints.")

config = ipu.config.IPUConfig()
config.auto_select_ipus = 1
config.allow_recompute = True
config.configure_ipu_system()

UNITS, BATCH = 16, 4
generator = np.random.default_rng(3)
x = generator.normal(size=(64, args.seq_len, 4)).astype(np.float32)
y = x[:, -8:].sum(axis=(1, 2), keepdims=False)[:, None]
dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH, drop_remainder=True)

strategy = ipu.ipu_strategy.IPUStrategy()
with strategy.scope():
    inputs = keras.Input(shape=(args.seq_len, 4), dtype=tf.float32, batch_size=BATCH)
    lstm = LSTM(UNITS, return_sequences=True, return_state=True)
    with keras.ipu.PipelineStage(0):
        state = None
        for part in tf.split(inputs, parts, axis=1):
            outputs, *state = lstm(part, initial_state=state)
            state = [RecomputationCheckpoint()(value) for value in state]
        outputs = outputs[:, -1]
    with keras.ipu.PipelineStage(1):
        predictions = keras.layers.Dense(1)(outputs)
    model = keras.Model(inputs, predictions)
    model.set_pipelining_options(
        gradient_accumulation_steps_per_replica=4,
        device_mapping=[0, 0],
        pipeline_schedule=ipu.ops.pipelining_ops.PipelineSchedule.Sequential,
        recomputation_mode=ipu.ops.pipelining_ops.RecomputationMode.RecomputeAndBackpropagateInterleaved,
        gradient_accumulation_reduction_method="mean",
    )
    model.compile(loss="mse", optimizer=keras.optimizers.Adam(learning_rate=0.01), steps_per_execution=16)
    history = model.fit(dataset, epochs=3, verbose=2).history
assert history["loss"][-1] < history["loss"][0]
print(f"loss: {history['loss'][0]:.4f} -> {history['loss'][-1]:.4f}")
