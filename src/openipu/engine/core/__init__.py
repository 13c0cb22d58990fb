"""What a training step is: state, options, accumulation and optimizers, as pure functions over frozen values."""
