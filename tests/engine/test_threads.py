"""Several models in several threads give what they give one after the other."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROUNDS = int(os.environ.get("OPENIPU_ROUNDS", "8"))


def run(repository: Path, rounds: int, *kinds: str) -> None:
    done = subprocess.run(
        [sys.executable, repository / "tests" / "support" / "threads.py", str(rounds), *kinds],
        capture_output=True, text=True, timeout=120 + 60 * rounds, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
def test_a_first_round(repository: Path) -> None:
    """In a fresh process, where a pipeline would like other devices than those that replicas already use."""
    run(repository, 1, "replicas", "pipeline", "plain")


@pytest.mark.slow
def test_many_rounds(repository: Path) -> None:
    """Set OPENIPU_ROUNDS to the number of rounds."""
    run(repository, ROUNDS, "replicas", "pipeline", "estimator", "plain", "asynchronous", "loop")
