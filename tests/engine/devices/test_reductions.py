"""Reductions over replicas, of which some may have no data."""

from __future__ import annotations

from typing import Any

import openipu as ipu
from openipu.engine.devices.replicas import Replicas

import jax
import jax.numpy as jnp
import numpy as np
import pytest


@pytest.fixture(scope="module")
def four() -> Replicas:
    config = ipu.config.IPUConfig()
    config.auto_select_ipus = 4
    config.configure_ipu_system()
    from openipu.engine.devices.systems import system

    return Replicas(system().devices)


def means(replicas: Replicas, values: list[float], active: list[bool], group: int | None) -> list[float]:
    """What `mean_of_active` gives each replica."""

    def run(value: Any, active: Any) -> Any:
        return replicas.mean_of_active(value[0], active[0], group)[None]

    program = jax.jit(replicas.program(run, (0, 0), 0))
    return np.asarray(program(jnp.asarray(values), jnp.asarray(active))).tolist()


def test_the_mean_of_those_that_have_data(four: Replicas) -> None:
    values = [1.0, 3.0, 8.0, np.nan]
    assert means(four, values, [True, True, True, False], None) == [4.0] * 4
    assert means(four, values, [True, True, True, False], 2) == [2.0, 2.0, 8.0, 8.0]


def test_a_group_without_data_has_a_number_too(four: Replicas) -> None:
    """Nobody uses it, but its gradient would turn everything into NaN."""
    assert means(four, [1.0, 3.0, 5.0, 7.0], [True, False, False, False], 2) == [1.0, 1.0, 0.0, 0.0]
