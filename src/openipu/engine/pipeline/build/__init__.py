"""Stages, options and devices -> the loop that runs them."""
