"""The list of mistakes that `make mutate` tries is up to date. Trying them takes too long for here."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


def test_every_mistake_can_still_be_made(repository: Path) -> None:
    """Each changes one place in the code, and its tests exist."""
    if not (repository / "mutants").is_dir():
        pytest.skip("this is a copy in which a mistake is tried")
    listed = subprocess.run(
        [sys.executable, "-m", "mutants", "--list"], cwd=repository, capture_output=True, text=True, check=False
    )
    assert listed.returncode == 0, listed.stderr
    assert len(listed.stdout.splitlines()) >= 60
