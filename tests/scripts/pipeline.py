"""A pipeline of two stages, in training and in inference."""

import numpy as np
import tensorflow as tf
from tensorflow.python import ipu

config = ipu.config.IPUConfig()
config.auto_select_ipus = 2
config.configure_ipu_system()

rng = np.random.default_rng(0)
x = rng.normal(size=(512, 12)).astype(np.float32)
y = (np.abs(x[:, 0]) > 0.7).astype(np.int32)

strategy = ipu.ipu_strategy.IPUStrategy()
with strategy.scope():
    inputs = tf.keras.layers.Input(shape=(12), dtype=tf.float32)
    with tf.keras.ipu.PipelineStage(0):
        hidden = tf.keras.layers.Dense(32, activation="relu")(inputs)
        hidden = tf.keras.layers.Dense(32, activation=tf.nn.relu)(hidden)
    with tf.keras.ipu.PipelineStage(1):
        outputs = tf.keras.layers.Dense(2)(hidden)
    model = tf.keras.Model(inputs, outputs)
    model.set_pipelining_options(
        gradient_accumulation_steps_per_replica=8,
        pipeline_schedule=ipu.ops.pipelining_ops.PipelineSchedule.Grouped,
    )
    model.print_pipeline_stage_assignment_summary()
    model.compile(
        loss=tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        optimizer=tf.keras.optimizers.Adam(lr=0.01),
        metrics=["accuracy"],
        steps_per_execution=16,
    )
    history = model.fit(x, y, batch_size=8, epochs=12, verbose=0).history
    predictions = model.predict(x, batch_size=8)

accuracy = float(np.mean(predictions.argmax(-1) == y))
print(f"loss {history['loss'][0]:.3f} -> {history['loss'][-1]:.3f}, accuracy {accuracy:.3f}")
assert accuracy > 0.9
