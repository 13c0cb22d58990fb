"""One layer's forward, input gradient and weight gradient inside a compiled loop: as JAX writes it, and rewritten.

    taskset -c 0 python benchmarks/micro_convolution.py [--platform cpu] [--batch 16] [--match 3x3]

Prints milliseconds per step, the minimum of several repeats. On a CPU this is processor time, which other programs
disturb less.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from openipu.engine.convolution import rewrite

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

STEPS = 5
REPEATS = 5


class Layer(NamedTuple):
    """A convolution by its sizes; `pool` stands for max pooling with that window instead."""

    name: str
    size: int
    channels: int
    out: int = 0
    kernel: int = 3
    stride: int = 1
    groups: int = 1
    pool: int = 0


LAYERS = [
    Layer("tutorial CNN, first layer", 28, 1, 32),
    Layer("tutorial CNN, second layer", 13, 32, 64),
    Layer("3x3, 3 to 32", 32, 3, 32),
    Layer("3x3, 16 to 16", 28, 16, 16),
    Layer("3x3, 32 to 32", 28, 32, 32),
    Layer("3x3, 64 to 64", 14, 64, 64),
    Layer("3x3, 128 to 128", 14, 128, 128),
    Layer("3x3 stride 2, 32 to 64", 28, 32, 64, stride=2),
    Layer("5x5, 16 to 32", 14, 16, 32, kernel=5),
    Layer("7x7 stride 2, 3 to 64", 56, 3, 64, kernel=7, stride=2),
    Layer("1x1, 64 to 128", 14, 64, 128, kernel=1),
    Layer("3x3 depthwise, 64", 28, 64, 64, groups=64),
    Layer("3x3 groups of 16, 64", 14, 64, 64, groups=4),
    Layer("max pooling 2x2, 32", 26, 32, pool=2, stride=2),
    Layer("max pooling 3x3 stride 2, 64", 28, 64, pool=3, stride=2),
]


def layer_step(layer: Layer, batch: int) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """A function that runs one layer forward and backward, and its arguments."""
    random = np.random.default_rng(0)

    def draw(*shape: int) -> jax.Array:
        return jnp.asarray(random.normal(size=shape), jnp.float32)

    def convolution(x: jax.Array, w: jax.Array) -> jax.Array:
        steps, numbers = (layer.stride, layer.stride), ("NHWC", "HWIO", "NHWC")
        return lax.conv_general_dilated(
            x, w, steps, "SAME", dimension_numbers=numbers, feature_group_count=layer.groups
        )

    def pooling(x: jax.Array) -> jax.Array:
        size, steps = (1, layer.pool, layer.pool, 1), (1, layer.stride, layer.stride, 1)
        return lax.reduce_window(x, -jnp.inf, lax.max, size, steps, "SAME")

    x = draw(batch, layer.size, layer.size, layer.channels)
    w = draw(layer.kernel, layer.kernel, layer.channels // layer.groups, layer.out)
    fn: Callable[..., jax.Array] = pooling if layer.pool else convolution
    args = (x,) if layer.pool else (x, w)

    def step(gradient: jax.Array, *args: jax.Array) -> Any:
        out, back = jax.vjp(fn, *args)
        return out, back(gradient)

    return step, (draw(*jax.eval_shape(fn, *args).shape), *args)


def looped(step: Callable[..., Any], args: tuple[Any, ...]) -> Callable[..., Any]:
    """`n` steps in one program; every step depends on the one before, so none can be optimised away."""

    def run(n: int, *args: jax.Array) -> Any:
        def body(_: Any, carry: Any) -> Any:
            args, _ = carry
            out = step(*args)
            mark = sum(leaf.reshape(-1)[0] for leaf in jax.tree.leaves(out)) * 1e-6
            return tuple(a.at[(0,) * a.ndim].set(mark) for a in args), out

        nothing = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), jax.eval_shape(step, *args))
        return lax.fori_loop(0, n, body, (args, nothing))

    return jax.jit(run).lower(STEPS, *args).compile()


def milliseconds(program: Callable[..., Any], args: tuple[Any, ...], clock: Callable[[], float]) -> float:
    """The minimum time of one step."""
    start = clock()
    jax.block_until_ready(program(1, *args))
    # The original can take a second per step; then a few steps are proof enough.
    steps, repeats = (1, 2) if clock() - start > 0.3 else (STEPS, REPEATS)
    times = []
    for _ in range(repeats):
        start = clock()
        jax.block_until_ready(program(steps, *args))
        times.append((clock() - start) / steps * 1e3)
    return min(times)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--platform", default=jax.default_backend())
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--match", default="", help="only layers whose name contains this")
    options = parser.parse_args()
    clock = time.process_time if jax.default_backend() == "cpu" else time.perf_counter
    print(f"{'layer':34}{'original':>10}{'rewritten':>10}   ms per step, batch {options.batch}")
    for layer in LAYERS:
        if options.match in layer.name:
            step, args = layer_step(layer, options.batch)
            before = milliseconds(looped(step, args), args, clock)
            after = milliseconds(looped(rewrite(step, options.platform), args), args, clock)
            print(f"{layer.name:34}{before:10.2f}{after:10.2f}   {before / after:.1f}x", flush=True)


if __name__ == "__main__":
    main()
