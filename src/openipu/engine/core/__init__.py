"""What a training step is: state, options, accumulation, optimizers. Pure functions over frozen values."""
