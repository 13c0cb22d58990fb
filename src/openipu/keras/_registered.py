"""How the layers and optimizers of this package are known in saved models."""

import keras

registered = keras.saving.register_keras_serializable("openipu.keras")
