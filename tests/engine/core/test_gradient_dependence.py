"""What results depend on: through calls and branches exactly, and with or without gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from openipu.engine.core.gradient_dependence import differentiable_inputs, needed_inputs

import jax
import jax.numpy as jnp
import pytest
from jax import lax

Function = Callable[..., tuple[Any, ...]]


def branches(a: Any, b: Any, c: Any) -> tuple[Any, ...]:
    return lax.cond(jnp.ones((), bool), lambda a, b, _: (a, b), lambda a, _, c: (2 * a, c), a, b, c)


FUNCTIONS: dict[str, tuple[Function, list[list[bool]]]] = {
    "apart": (lambda a, b, c: (a + 1, b * c), [[True, False, False], [False, True, True]]),
    "call": (lambda a, b, c: jax.jit(lambda a, b: (a, b))(a + c, b), [[True, False, True], [False, True, False]]),
    "branches": (branches, [[True, False, False], [False, True, True]]),
    "condition": (lambda a, b, c: (lax.cond(c > 0, lambda a: a, lambda a: -a, a), b),
                  [[True, False, True], [False, True, False]]),
    "comparison": (lambda a, b, c: (jnp.where(b > c, a, 0.0), lax.stop_gradient(c)),
                   [[True, True, True], [False, False, True]]),
}  # fmt: skip


@pytest.mark.parametrize("name", FUNCTIONS)
def test_needed_inputs(name: str) -> None:
    function, expected = FUNCTIONS[name]
    jaxpr = jax.make_jaxpr(function)(1.0, 2.0, 3.0).jaxpr
    assert [needed_inputs(jaxpr, wanted) for wanted in ([True, False], [False, True])] == expected


def test_gradients_do_not_flow_through_comparisons() -> None:
    function = FUNCTIONS["comparison"][0]
    arrays = [jnp.float32(1.0)] * 3
    assert differentiable_inputs(lambda values: sum(function(*values)), arrays) == [True, False, False]
