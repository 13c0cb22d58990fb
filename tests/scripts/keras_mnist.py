"""MNIST with Keras: the usual first script."""

import argparse

import numpy as np
import tensorflow as tf
from tensorflow import keras
from tensorflow.python import ipu

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--batch-size", type=int, default=64)
parser.add_argument("--images", type=int, default=60000)
parser.add_argument("--plain", action="store_true", help="train without the strategy")
args = parser.parse_args()

tf.random.set_seed(5)
(x_train, y_train), (x_test, y_test) = keras.datasets.mnist.load_data()
x_train = np.expand_dims(x_train[: args.images].astype(np.float32) / 255, -1)
y_train = y_train[: args.images].astype(np.int32)
x_test, y_test = np.expand_dims(x_test.astype(np.float32) / 255, -1), y_test.astype(np.int32)

steps = len(x_train) // args.batch_size
train = tf.data.Dataset.from_tensor_slices((x_train, y_train)).shuffle(10000, seed=3)
train = train.batch(args.batch_size, drop_remainder=True).repeat().prefetch(tf.data.experimental.AUTOTUNE)
test = tf.data.Dataset.from_tensor_slices((x_test, y_test)).batch(100, drop_remainder=True)


def make_model():
    return keras.Sequential(
        [
            keras.layers.Conv2D(16, (3, 3), activation="relu", input_shape=(28, 28, 1)),
            keras.layers.MaxPooling2D((2, 2)),
            keras.layers.Flatten(),
            keras.layers.Dense(64, activation=tf.nn.relu),
            keras.layers.Dense(10, activation="softmax"),
        ]
    )


def train_and_test(model, **options):
    optimizer = keras.optimizers.SGD(lr=0.05, momentum=0.9)
    model.compile(loss="sparse_categorical_crossentropy", optimizer=optimizer, metrics=["accuracy"], **options)
    model.fit(train, epochs=args.epochs, steps_per_epoch=steps, verbose=0)
    return model.evaluate(test, steps=len(x_test) // 100, verbose=0)[1]


if args.plain:
    accuracy = train_and_test(make_model())
else:
    config = ipu.config.IPUConfig()
    config.auto_select_ipus = 1
    config.configure_ipu_system()
    strategy = ipu.ipu_strategy.IPUStrategy()
    with strategy.scope():
        model = make_model()
        model.summary()
        accuracy = train_and_test(model, steps_per_execution=100)
print(f"accuracy {accuracy:.4f}")
