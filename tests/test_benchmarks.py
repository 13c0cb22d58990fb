"""The benchmarks take more than an hour. What all of them are built from is tried here with a few steps."""

import sys

import pytest
from benchmarks.__main__ import first_step
from benchmarks.measure import Entry, measure

PYTHON = {"own": sys.executable, "peers": sys.executable}


@pytest.mark.slow
@pytest.mark.parametrize("who", ["openipu", "scan", "jax", "tensorflow"])
def test_a_measurement(who: str) -> None:
    found = measure(Entry("mlp", who, "1", steps=2, epochs=2), PYTHON)
    assert len(found["us_per_step"]) == 2
    assert min(found["us_per_step"]) > 0


@pytest.mark.slow
def test_the_first_step_with_an_empty_and_with_a_warm_cache() -> None:
    seconds = first_step(PYTHON)
    assert 0 < seconds["warm"] < seconds["cold"]
