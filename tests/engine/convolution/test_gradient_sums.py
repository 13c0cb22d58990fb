"""Sums of gradients are computed once, however many equations read them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from openipu.engine.convolution import rewrite
from openipu.engine.convolution.gradient_sums import SMALLEST, sums_to_keep

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

ROWS, WIDTH = 128, 64


def residual_network(blocks: int) -> tuple[Callable[..., Any], list[jax.Array], jax.Array]:
    """The gradients of a residual network, its weights, and an input."""

    def loss(weights: list[jax.Array], x: jax.Array) -> jax.Array:
        for weight in weights:
            centred = x - x.mean(-1, keepdims=True)
            x = x + jnp.tanh(centred / jnp.sqrt((centred**2).mean(-1, keepdims=True) + 1e-3) @ weight)
        return (x**2).mean()

    rng = np.random.default_rng(0)
    weights = [jnp.asarray(rng.normal(size=(WIDTH, WIDTH)) / 8, jnp.float32) for _ in range(blocks)]
    return jax.grad(loss), weights, jnp.asarray(rng.normal(size=(ROWS, WIDTH)), jnp.float32)


def in_a_loop(step: Callable[..., Any]) -> Callable[..., Any]:
    def loop(weights: list[jax.Array], x: jax.Array) -> list[jax.Array]:
        def turn(_: Any, w: list[jax.Array]) -> list[jax.Array]:
            return [a - 0.1 * g for a, g in zip(w, step(w, x), strict=True)]

        return lax.fori_loop(0, 2, turn, weights)

    return loop


def additions(blocks: int, change: Callable[[Any], Any]) -> int:
    """How many additions the compiled program has."""
    step, weights, x = residual_network(blocks)
    return jax.jit(in_a_loop(change(step))).lower(weights, x).compile().as_text().count(" add(")


def kept(fn: Callable[..., Any], *args: Any, platform: str = "cpu") -> int:
    return len(sums_to_keep(jax.make_jaxpr(fn)(*args).jaxpr, platform))


def test_additions_grow_with_the_blocks_and_not_with_their_square() -> None:
    rewritten = [additions(blocks, lambda step: rewrite(step, "cpu")) for blocks in (4, 8)]
    assert rewritten[1] < 2.2 * rewritten[0]
    assert rewritten[1] < 0.7 * additions(8, lambda step: step)


def test_gradients_stay_the_same() -> None:
    step, weights, x = residual_network(4)
    for found, expected in zip(rewrite(step, "cpu")(weights, x), step(weights, x), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-8)


def test_one_sum_per_block_and_none_on_a_gpu() -> None:
    step, weights, x = residual_network(3)
    assert kept(step, weights, x) >= 2
    assert not kept(step, weights, x, platform="gpu")


def test_a_small_sum_is_not_kept() -> None:
    step, weights, x = residual_network(3)
    assert not kept(step, weights, x[: SMALLEST // WIDTH - 1])


@pytest.mark.parametrize("returned", [False, True])
def test_a_sum_with_one_reader_is_not_kept(returned: bool) -> None:
    """To return a sum is to read it."""
    size = jnp.ones(SMALLEST)

    def gradient(x: jax.Array) -> Any:
        total = jax.grad(lambda v: (jnp.sin(v) * jnp.cos(v)).sum())(x)
        return (total, total * 2) if returned else total * 2

    assert kept(gradient, size) == returned
