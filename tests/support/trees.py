"""Trees of arrays, compared to the bit."""

import jax
import numpy as np


def equal(a, b):
    """Whether two trees hold the same bits."""
    (a, one), (b, other) = jax.tree.flatten(a), jax.tree.flatten(b)
    return one == other and all(
        np.asarray(p).dtype == np.asarray(q).dtype and np.asarray(p).tobytes() == np.asarray(q).tobytes()
        for p, q in zip(a, b, strict=True)
    )
