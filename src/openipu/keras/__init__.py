"""What a Keras model can do in addition when it was made inside `IPUStrategy.scope()`."""
