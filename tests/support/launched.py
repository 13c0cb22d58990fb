"""`openipu launch` in a process of its own, as a user starts it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PATIENCE = 30
"""Seconds after which something that should have happened never will."""


def command(*words: str) -> list[str]:
    return [sys.executable, "-m", "openipu", "launch", *words]


def environment(**variables: str) -> dict[str, str]:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("OPENIPU_", "TF_POPLAR"))}
    return {**inherited, "COLUMNS": "200", **variables}


def launch(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Launch something and wait for its end."""
    return subprocess.run(
        command(*words), env=environment(**variables), capture_output=True, text=True, timeout=PATIENCE, check=False
    )


@contextmanager
def launching(*words: str, **variables: str) -> Iterator[subprocess.Popen[str]]:
    """Launch something that runs until it is stopped. Output and errors come together."""
    with subprocess.Popen(
        command(*words),
        env=environment(**variables),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def lines_until(process: subprocess.Popen[str], word: str, count: int) -> list[str]:
    """The lines of the output, until `count` of them contain a word."""
    assert process.stdout is not None
    lines: list[str] = []
    while sum(word in line for line in lines) < count:
        line = process.stdout.readline()
        assert line, f"the output has ended: {lines}"
        lines.append(line.rstrip("\n"))
    return lines


def rest(process: subprocess.Popen[str]) -> tuple[int, str]:
    """The exit code and what is left of the output."""
    output, _ = process.communicate(timeout=PATIENCE)
    return process.returncode, output


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def wait_for_the_end_of(*pids: int) -> None:
    until = time.monotonic() + PATIENCE
    while left := [pid for pid in pids if is_running(pid)]:
        if time.monotonic() > until:
            for pid in left:
                os.kill(pid, signal.SIGKILL)
            raise AssertionError(f"still running: {left}")
        time.sleep(0.02)
