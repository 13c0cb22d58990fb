"""Instances that fail, differ, never come or are killed."""

from __future__ import annotations

import itertools
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import IO

from openipu.engine.devices import group

import pytest

import instance_faults

KILLS = int(os.environ.get("OPENIPU_KILLS", "3"))


def command(*words: str) -> list[str]:
    return [sys.executable, "-m", "openipu", "launch", "--num-instances", "2", *words]


def run(*words: str) -> subprocess.CompletedProcess[str]:
    done = command(*words[:-1], instance_faults.__file__, *words[-1:])
    return subprocess.run(done, capture_output=True, text=True, timeout=300, check=False)


def test_an_error_in_one_instance_ends_all() -> None:
    done = run("raises")
    assert done.returncode == 1
    *_, before, last = [line for line in done.stderr.splitlines() if line.strip()]
    assert (before, last) == ("[1] ZeroDivisionError: on purpose", "Error: instance 1 failed with exit code 1")


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("differs", "devices is 1 in instance 0, but 2 in instance 1. Give all instances the same one."),
        pytest.param(
            "other model",
            "is float32[16, 64] in instance 0, but float32[16, 65] in instance 1.",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "other calls", "All instances must make the same calls in the same order.", marks=pytest.mark.slow
        ),
        pytest.param("other data", "have to be given the same data in the same order", marks=pytest.mark.slow),
        pytest.param("more data", "The number of batches is 51 in instance 0, but 56 in", marks=pytest.mark.slow),
        pytest.param(
            "bad batch", "failed at 'the next batches': ZeroDivisionError: a bad batch", marks=pytest.mark.slow
        ),
        pytest.param("leaves", "but instance 1 is at the end of its script", marks=pytest.mark.slow),
    ],
)
def test_instances_that_differ(what: str, message: str) -> None:
    done = run(what)
    assert done.returncode == 1
    assert message in done.stderr


@pytest.mark.slow
def test_the_exit_of_one_instance_ends_all() -> None:
    """It does not wait for the others, which wait for it."""
    done = run("exits")
    assert done.returncode == 3
    assert done.stderr.splitlines()[-1] == "Error: instance 1 failed with exit code 3"


@pytest.mark.slow
def test_an_exit_in_the_middle_of_an_epoch_ends_all() -> None:
    """The others wait for it inside a program, where no error can be raised."""
    done = run("exits in an epoch")
    assert done.returncode == 1
    assert "[0] RuntimeError: Instance 0 " in done.stderr
    assert "but instance 1 is at the end of its script. All instances must make the same calls" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("what", ["stops in an epoch", "looks"])
def test_what_one_instance_does_all_do(what: str) -> None:
    """A signal stops training in one of them only; callbacks look at a model of which each of them has a part."""
    done = run(what)
    assert done.returncode == 0, done.stderr
    first, second = sorted(line.removeprefix(f"[{i}] ") for i, line in enumerate(sorted(done.stdout.splitlines())))
    assert first.startswith("ended")
    assert first == second


def test_an_instance_that_never_comes() -> None:
    done = run("--timeout", "5", "never comes")
    assert done.returncode == 1
    assert "of 2 waited 5 s at 127.0.0.1" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("kills", [1, KILLS])
def test_killed_instances_start_again_and_end_with_the_same_bytes(tmp_path: Path, kills: int) -> None:
    """Set OPENIPU_KILLS to the number of kills."""
    epochs = str(30 * kills)  # so many that the last kill comes before the end, on a fast machine too
    whole = subprocess.run(
        command(instance_faults.__file__, "trains", str(tmp_path / "whole"), epochs),
        capture_output=True, text=True, timeout=300, check=True,
    )  # fmt: skip
    chance = random.Random(kills)
    words = ["--max-restarts", str(kills), instance_faults.__file__, "trains", str(tmp_path / "killed"), epochs]
    with subprocess.Popen(command(*words), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as launched:
        assert launched.stdout is not None
        for kill in range(kills):
            _wait_for(launched.stdout, f"restart {kill} of" if kill else "", times=1)  # so no line of killed instances
            _wait_for(launched.stdout, "epoch", times=5)
            time.sleep(chance.random() / 4)
            os.kill(chance.choice(_instances(launched.pid)), signal.SIGKILL)
        rest = launched.stdout.read()
        assert launched.wait(300) == 0, rest
    assert set(_ends(rest)) == set(_ends(whole.stdout))


@pytest.mark.slow
def test_a_stopped_instance_goes_on() -> None:
    """On one machine, the launcher knows which instances live, so a silent one is not taken for a dead one."""
    words = [instance_faults.__file__, "trains", "", "60"]
    with subprocess.Popen(command(*words), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as launched:
        assert launched.stdout is not None
        _wait_for(launched.stdout, "epoch", times=5)
        stopped = _instances(launched.pid)[1]
        os.kill(stopped, signal.SIGSTOP)
        time.sleep(group.HEARTBEAT_SECONDS + 5)
        os.kill(stopped, signal.SIGCONT)
        rest = launched.stdout.read()
        assert launched.wait(300) == 0, rest
    first, second = _ends(rest)
    assert first == second


def _wait_for(lines: IO[str], word: str, times: int) -> None:
    assert len(list(itertools.islice((line for line in lines if word in line), times))) == times


def _ends(shown: str) -> list[str]:
    found = re.findall(r"ended (\w+)", shown)
    assert len(found) == 2
    return found


def _instances(launcher: int) -> list[int]:
    """The processes that run the script: children of the keepers."""
    found = []
    for keeper in _children(launcher):
        found += _children(keeper)
    assert len(found) == 2
    return found


def _children(pid: int) -> list[int]:
    tasks = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(word) for task in tasks for word in task.read_text().split()]
