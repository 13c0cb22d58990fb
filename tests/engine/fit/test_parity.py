"""Weights, metrics, history and predictions are plain Keras', for every model and any `steps_per_execution`."""

import functools
import itertools

import pytest

import zoo

pytestmark = zoo.KERAS_WARNINGS

ROWS = {"whole": zoo.BATCH * zoo.FULL_STEPS, "remainder": zoo.BATCH * zoo.FULL_STEPS + 3}
STEPS = {"1": 1, "7": 7, "epoch": zoo.FULL_STEPS + 1}


@functools.cache
def plain(name: str, rows: int) -> zoo.Outcome:
    return zoo.train(zoo.CASES[name], rows, None)


def grid():
    """Every model once by default, one with all combinations, one with state at the ends; everything else is slow."""
    for name in zoo.CASES:
        for (length, rows), (label, steps) in itertools.product(ROWS.items(), STEPS.items()):
            default = (length, label) == ("remainder", "7") or name == "dense"
            default |= name == "batchnorm_dropout" and length == "whole" and label != "7"
            marks = () if default else pytest.mark.slow
            yield pytest.param(name, rows, steps, marks=marks, id=f"{name}-{length}-{label}")


@pytest.mark.parametrize(("name", "rows", "steps_per_execution"), list(grid()))
def test_same_as_plain_keras(name, rows, steps_per_execution):
    case = zoo.CASES[name]
    zoo.assert_same(zoo.train(case, rows, steps_per_execution), plain(name, rows), case.tolerance)


def test_the_comparison_notices_another_sample_order():
    other = zoo.train(zoo.CASES["dense"], ROWS["remainder"], 7, shuffle=False)
    with pytest.raises(AssertionError):
        zoo.assert_same(other, plain("dense", ROWS["remainder"]))
