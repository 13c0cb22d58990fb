"""Names for the kinds of values that many modules take and return."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

Tree = Any
"""A structure (tuples, lists, dicts) of arrays, or one array."""
Array = jax.Array
"""A value inside a program or on a device."""
Scalar = jax.Array | np.generic | int | float | bool
"""One number, inside or outside a program."""
DTypeOption = jax.typing.DTypeLike | Callable[[Any], Any] | None
"""A dtype to accumulate in: a name, a type, a function of a variable, or None for the variable's own dtype."""
Data = Any
"""What users train on: arrays, datasets, generators, loaders and anything else that Keras has an adapter for."""
