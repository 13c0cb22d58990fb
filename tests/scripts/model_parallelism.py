"""One model over four devices: trained and used for inference, with stages given in three ways."""

import argparse

import numpy as np
import tensorflow as tf
from tensorflow import keras
from tensorflow.python import ipu

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--epochs", type=int, default=4)
args = parser.parse_args()

config = ipu.config.IPUConfig()
config.auto_select_ipus = 4
config.configure_ipu_system()

COUNT, BATCH = 8, 16
rng = np.random.default_rng(5)
x = rng.normal(size=(1024, 8)).astype(np.float32)
y = (x[:, 0] * x[:, 1] > 0).astype(np.int32)
train = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(1024, seed=1).batch(BATCH, drop_remainder=True)
test = tf.data.Dataset.from_tensor_slices(x).batch(BATCH, drop_remainder=True)


def with_contexts():
    inputs = keras.Input(shape=(8), dtype=tf.float32)
    with keras.ipu.PipelineStage(0):
        left = keras.layers.Dense(32, activation="tanh")(inputs)
    with keras.ipu.PipelineStage(1):
        right = keras.layers.Dense(32, activation="tanh")(left)
    with keras.ipu.PipelineStage(2):
        both = keras.layers.Concatenate()([left, right])
        both = keras.layers.Dense(32, activation="relu")(both)
    with keras.ipu.PipelineStage(3):
        outputs = keras.layers.Dense(2, activation="softmax")(both)
    return keras.Model(inputs, outputs)


def sequential():
    model = keras.Sequential(
        [
            keras.layers.Input(shape=(8,)),
            keras.layers.Dense(32, activation="tanh"),
            keras.layers.Dense(32, activation="tanh"),
            keras.layers.Dense(32, activation="relu"),
            keras.layers.Dense(2, activation="softmax"),
        ]
    )
    model.set_pipeline_stage_assignment([0, 1, 2, 3])
    return model


def nested():
    block = keras.Sequential(
        [keras.layers.Dense(32, activation="tanh"), keras.layers.Dense(32, activation="relu")], name="block"
    )
    inputs = keras.Input(shape=(8,))
    hidden = block(keras.layers.Dense(32, activation="tanh", name="first")(inputs))
    model = keras.Model(inputs, keras.layers.Dense(2, activation="softmax", name="last")(hidden))
    assignments = model.get_pipeline_stage_assignment()
    stage = 0
    for assignment in assignments:
        inner = assignment.pipeline_stage_assignments if assignment.is_nested_model else [assignment]
        for one in inner:
            one.pipeline_stage = stage
            stage += 1
    assert stage == 4
    model.set_pipeline_stage_assignment(assignments)
    return model


def compiled(model, schedule, loss="sparse_categorical_crossentropy"):
    model.set_pipelining_options(
        gradient_accumulation_steps_per_replica=COUNT,
        pipeline_schedule=schedule,
        gradient_accumulation_reduction_method=ipu.gradient_accumulation.GradientAccumulationReductionMethod.MEAN,
    )
    model.compile(keras.optimizers.Adam(learning_rate=0.02), loss, metrics=["accuracy"], steps_per_execution=64)
    return model


schedules = ipu.ops.pipelining_ops.PipelineSchedule
strategy = ipu.ipu_strategy.IPUStrategy()
with strategy.scope():
    for make, schedule in (
        (with_contexts, schedules.Grouped),
        (sequential, schedules.Interleaved),
        (nested, schedules.Sequential),
    ):
        tf.random.set_seed(3)
        model = compiled(make(), schedule)
        model.print_pipeline_stage_assignment_summary()
        history = model.fit(train, epochs=args.epochs, verbose=0).history
        predicted = model.predict(test, verbose=0)
        accuracy = float(np.mean(predicted.argmax(-1) == y))
        assert predicted.shape == (1024, 2)
        print(f"{make.__name__}: loss {history['loss'][0]:.3f} -> {history['loss'][-1]:.3f}, accuracy {accuracy:.3f}")

    # Inference only: the same weights without stages give the same predictions.
    alone = nested()
    alone.reset_pipeline_stage_assignment()
    alone.set_weights(model.get_weights())
    alone.compile(steps_per_execution=4)
    np.testing.assert_allclose(alone.predict(test, verbose=0), predicted, rtol=1e-4, atol=1e-5)
