"""Random combinations of models, data sources, arguments, options and callbacks, against plain Keras."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

import fuzz
import random_runs
import replication
import zoo
from random_runs import Run

pytestmark = zoo.KERAS_WARNINGS


@pytest.fixture(scope="module", autouse=True)
def _systems() -> None:
    replication.configure_all()


def check(run: Run, folder: Path) -> str:
    """Compare with plain Keras. What Keras refuses must be refused here too."""
    try:
        expected = random_runs.result(run, folder / "keras", plain=True)
    except Exception as of_keras:
        with pytest.raises((type(of_keras), ValueError)):
            random_runs.result(run, folder / "ours", plain=False)
        return f"refused by both with a {type(of_keras).__name__}"
    actual = random_runs.result(run, folder / "ours", plain=False)
    random_runs.assert_same(actual, expected, zoo.CASES[run.model].tolerance)
    if run.stages > 1:
        return "in stages"
    return "on replicas or accumulated" if run.many else "on one device"


@pytest.mark.slow
def test_random_runs_equal_plain_keras(tmp_path: Path, record_property: Any) -> None:
    folders = (tmp_path / str(n) for n in itertools.count())

    def one(run: Run) -> str:
        (folder := next(folders)).mkdir()
        return check(run, folder)

    fuzz.run(random_runs.draw, one, default=40, record=record_property)
