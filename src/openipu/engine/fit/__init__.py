"""Runs `fit`, `evaluate` and `predict` of a Keras model."""
