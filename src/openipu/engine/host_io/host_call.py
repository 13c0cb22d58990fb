"""Calls from a running program into Python.

[Note: two ways] JAX has two calls of this kind. `io_callback` works everywhere; it makes JAX arrays of the arguments,
which takes 0.2 ms, in the midst of a busy program 1 ms, and on virtual CPU devices a spare thread. `buffer_callback`
gives a view of the program's own memory and takes 5 us, but on a GPU that is memory of the GPU. So CPUs take the
second way and everything else the first.
"""

from collections.abc import Callable
from typing import Any

from openipu.engine.types import Tree

import jax
import numpy as np
from jax import lax
from jax.experimental import io_callback
from jax.experimental.buffer_callback import buffer_callback


def host_call(host: Callable[..., Tree], answer: Tree, *args: Any) -> Tree:
    """`host(*args)` in the midst of a program, with NumPy arrays; gives its answer, which looks like `answer`.

    The arrays are the program's: whoever wants to keep them makes copies.
    """

    def in_place(_: Any, out: Tree, *buffers: Any) -> None:
        given = host(*map(np.asarray, buffers))
        for place, value in zip(jax.tree.leaves(out), jax.tree.leaves(given), strict=True):
            np.asarray(place)[...] = value

    return lax.platform_dependent(
        *args,
        cpu=buffer_callback(in_place, answer, has_side_effect=True),
        default=lambda *args: io_callback(host, answer, *args),
    )
