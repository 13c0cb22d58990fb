"""Runs many random cases that are the same on every machine, and counts them.

`OPENIPU_FUZZ=200` sets how many cases each test runs, `OPENIPU_FUZZ_SEED=3` chooses others. A failing case is printed
as an expression: put it into a named test.
"""

from __future__ import annotations

import gc
import os
import random
from collections import Counter
from collections.abc import Callable
from typing import Any, TypeVar

import hypothesis
from hypothesis import HealthCheck, Phase, given
from hypothesis import strategies as st

Case = TypeVar("Case")

PROPERTY = "random cases"
"""The name under which a test reports its count. `conftest.py` prints it at the end of the run."""


def run(
    draw: Callable[[random.Random], Case],
    check: Callable[[Case], str],
    default: int,
    record: Callable[[str, Any], None],
) -> None:
    """Check random cases. `check` returns the kind of a case, and `record` gets how many there were of each kind."""
    # All of a case comes from one number: drawn one by one, most choices would be the simplest.
    cases = st.integers(0, 2**40).map(lambda number: draw(random.Random(number)))
    ran: Counter[str] = Counter()
    count = int(os.environ.get("OPENIPU_FUZZ", default))

    # Without shrinking: each step of it would compile two more models.
    @hypothesis.seed(int(os.environ.get("OPENIPU_FUZZ_SEED", "0")))
    @hypothesis.settings(
        max_examples=count, phases=[Phase.generate], deadline=None, database=None, suppress_health_check=HealthCheck
    )
    @given(cases)
    def each(case: Case) -> None:
        ran[check(case)] += 1
        gc.collect()  # models refer to themselves, and keep their programs

    try:
        each()
    finally:
        kinds = ", ".join(f"{number} {kind}" for kind, number in sorted(ran.items()))
        record(PROPERTY, f"{ran.total()} random cases passed: {kinds}")
