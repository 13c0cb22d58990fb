"""The tutorial CNN, as a standard Keras model and as one cut into two pipeline stages."""

import openipu as ipu

import keras

NUM_CLASSES = 10
INPUT_SHAPE = (28, 28, 1)
NUM_STAGES = 2


def model_fn():
    inputs = keras.Input(shape=INPUT_SHAPE)
    x = keras.layers.Conv2D(32, kernel_size=(3, 3), activation="relu")(inputs)
    x = keras.layers.MaxPooling2D(pool_size=(2, 2))(x)
    x = keras.layers.Conv2D(64, kernel_size=(3, 3), activation="relu")(x)
    x = keras.layers.MaxPooling2D(pool_size=(2, 2))(x)
    x = keras.layers.Flatten()(x)
    x = keras.layers.Dropout(0.5)(x)
    outputs = keras.layers.Dense(NUM_CLASSES, activation="softmax")(x)
    return inputs, outputs


def pipeline_model_fn():
    inputs = keras.Input(shape=INPUT_SHAPE)
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
