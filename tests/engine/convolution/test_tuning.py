"""Programs with many replaced convolutions are compiled without Triton on GPUs."""

from __future__ import annotations

from typing import Any

from openipu.engine.convolution import counted, rewrite
from openipu.engine.convolution.tuning import MANY, Replaced
from openipu.engine.facts.costs import Rewritten

import jax
import jax.numpy as jnp
import pytest


def layers(count: int) -> Any:
    """The loss of so many convolutions, one after the other."""

    def loss(kernels: list[Any], x: Any) -> Any:
        for kernel in kernels:
            x = jax.lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
        return x.sum()

    return loss, ([jnp.ones((3, 3, 4, 4))] * count, jnp.ones((2, 8, 8, 4)))


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
def test_a_convolution_and_its_gradients_count(platform: str) -> None:
    loss, arguments = layers(2)
    with counted() as forward:
        jax.make_jaxpr(rewrite(loss, platform))(*arguments)
    with counted() as both:
        jax.make_jaxpr(rewrite(jax.grad(loss, (0, 1)), platform))(*arguments)
    assert (forward.count, both.count) == (2, 6)


def test_nothing_is_counted_outside() -> None:
    loss, arguments = layers(1)
    with counted() as outer:
        with counted() as inner:
            jax.make_jaxpr(rewrite(loss, "gpu"))(*arguments)
        assert (outer.count, inner.count) == (0, 1)
    jax.make_jaxpr(rewrite(loss, "gpu"))(*arguments)
    assert outer.count == 0


def test_only_many_convolutions_on_a_gpu_are_compiled_without_triton() -> None:
    one = Rewritten("c", "forward", "", "gather")
    assert Replaced([one] * MANY).compiler_options("gpu") == {"xla_gpu_enable_triton_gemm": "False"}
    assert Replaced([one] * (MANY - 1)).compiler_options("gpu") == {}
    assert Replaced([one] * MANY).compiler_options("cpu") == {}


def test_what_was_replaced_is_known_by_layer_part_and_form() -> None:
    def loss(kernel: Any, x: Any) -> Any:
        with jax.named_scope("first"):
            y = jax.lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
        return (y * y).sum()

    with counted() as found:
        jax.make_jaxpr(rewrite(jax.grad(loss), "cpu"))(jnp.ones((3, 3, 32, 32)), jnp.ones((2, 8, 8, 32)))
    forward, backward = found.convolutions
    shapes = "float32[2,8,8,32] x float32[3,3,32,32]"
    assert forward == Rewritten("first", "forward", shapes, "winograd, tiles of 6")
    assert (backward.layer, backward.part) == ("first", "backward")
