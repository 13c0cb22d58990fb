"""Functions that map gradients."""

import keras


@keras.saving.register_keras_serializable("test_optimizers")
def decayed(gradient, weight):
    return gradient + 0.5 * weight


def doubled(gradient, weight):
    del weight
    return 2 * gradient
