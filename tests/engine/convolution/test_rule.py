"""Which form a convolution gets where two of them would do."""

from __future__ import annotations

from typing import Any

from openipu.engine.convolution import rule
from openipu.engine.convolution.geometry import Geometry

import jax
import jax.numpy as jnp
import pytest
from jax import lax


def plan(area: tuple[int, int], channels: tuple[int, int], padding: Any) -> rule.Choice | None:
    """The form of a convolution with a kernel of 3x3 on a CPU."""
    numbers = ("NHWC", "HWIO", "NHWC")
    x, w = jnp.zeros((2, *area, channels[0])), jnp.zeros((3, 3, *channels))
    traced = jax.make_jaxpr(lambda x, w: lax.conv_general_dilated(x, w, (1, 1), padding, dimension_numbers=numbers))
    (equation,) = traced(x, w).jaxpr.eqns
    return rule.plan_convolution(Geometry.of(equation.params, x.shape, w.shape, 4), "cpu")


@pytest.mark.parametrize(("channels", "tile"), [(64, 6), (65, 4)])
def test_large_tiles_only_with_few_channels(channels: int, tile: int) -> None:
    """Their rounding errors grow with the number of channels."""
    choice = plan((12, 12), (channels, 64), "SAME")
    assert choice is not None
    assert (choice.kind, choice.tile) == ("winograd", tile)


@pytest.mark.parametrize(("size", "kind"), [(13, "winograd_scatter"), (32, "winograd_backward")])
def test_an_input_gradient_has_as_few_tiles_as_it_can(size: int, kind: str) -> None:
    """An 11x11 gradient has 9 tiles, and the 13x13 input that it belongs to has 16."""
    choice = plan((size - 2, size - 2), (32, 64), [(2, 2), (2, 2)])
    assert choice is not None
    assert choice.kind == kind


@pytest.mark.parametrize(("low", "direct"), [(0, True), (1, True), (-1, False)])
def test_xlas_own_convolution_is_not_used_for_inputs_that_are_cut(low: int, direct: bool) -> None:
    """XLA:CPU's own results are wrong for some negative paddings."""
    choice = plan((14, 14), (4, 4), [(low, 1), (1, 1)])
    assert choice is not None
    assert (choice.kind == "direct") == direct
