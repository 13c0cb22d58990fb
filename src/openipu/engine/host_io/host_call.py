"""Calls from a running program into Python.

[Note: two ways] JAX has two kinds of callback. `io_callback` works everywhere, but it turns the arguments into JAX
arrays. That takes 0.2 ms, or 1 ms in a busy program, and needs a spare thread on virtual CPU devices. `buffer_callback`
passes a view of the program's own memory and takes 5 us, but on a GPU that memory is on the GPU. So CPUs use
`buffer_callback` and everything else uses `io_callback`.
"""

from collections.abc import Callable

from openipu.engine.types import Array, Tree

import jax
import numpy as np
from jax import lax
from jax.experimental import io_callback
from jax.experimental.buffer_callback import buffer_callback


def host_call(host: Callable[..., Tree], answer: Tree, *args: Array) -> Tree:
    """Call `host(*args)` while a program runs, and return its answer, which has the shapes of `answer`.

    `host` gets NumPy arrays that are views of the program's memory. Copy what must outlive the call.
    """

    def in_place(_context: object, out: Tree, *buffers: Array) -> None:
        returned = host(*map(np.asarray, buffers))
        for place, value in zip(jax.tree.leaves(out), jax.tree.leaves(returned), strict=True):
            np.asarray(place)[...] = value

    return lax.platform_dependent(
        *args,
        cpu=buffer_callback(in_place, answer, has_side_effect=True),
        default=lambda *args: io_callback(host, answer, *args),
    )
