"""Models whose weights start at one, so that outcomes are known numbers."""

# Keras decides the arguments of hooks, steps and metrics.

import keras
from keras import layers


def ones(units=3, use_bias=False):
    return layers.Dense(units, use_bias=use_bias, kernel_initializer="ones")


class Example(keras.Model):
    """One layer whose weights start at one, so that outcomes are known numbers."""

    def __init__(self, units=3, **kwargs):
        super().__init__(**kwargs)
        self.dense = ones(units)

    def call(self, x):
        return self.dense(x)


def compiled(make, spe, **settings):
    model = make()
    model.compile(**{"optimizer": "sgd", "loss": "mse", "metrics": ["mse"], "steps_per_execution": spe, **settings})
    return model
