"""What the launcher runs, and the words for how it ended."""

import signal
import sys

from openipu.launcher.job import Job, address, command_line
from openipu.launcher.process import Ended
from openipu.launcher.run import describe

import pytest


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (("train.py", "-x"), (sys.executable, "train.py", "-x")),
        (("-m", "package.train"), (sys.executable, "-m", "package.train")),
        (("python", "train.py"), ("python", "train.py")),
    ],
)
def test_what_is_run(words, line):
    assert command_line(words) == line


@pytest.mark.parametrize(
    ("hosts", "code", "started", "words"),
    [
        ((), 3, True, "instance 1 failed with exit code 3"),
        ((), 255, True, "instance 1 failed with exit code 255"),
        ((), 128 + signal.SIGSEGV, True, "instance 1 was killed by SIGSEGV"),
        ((), 200, True, "instance 1 failed with exit code 200"),
        ((), 128, True, "instance 1 failed with exit code 128"),
        (("a", "b"), 3, True, "instance 1 on host b failed with exit code 3"),
        (("a", "b"), 255, True, "instance 1 on host b failed with exit code 255, or the connection to it was lost"),
        (("a", "b"), 255, False, "instance 1 on host b could not be started"),
        (("a", "b"), 0, False, "instance 1 on host b could not be started"),
    ],
)
def test_how_an_instance_has_failed(hosts, code, started, words):
    job = Job(("true",), 2, 2, hosts=hosts)
    assert describe(job, Ended(1, code, started, (), True)) == words


@pytest.mark.parametrize(
    ("host", "at"), [(None, "127.0.0.1:1"), ("a", "a:1"), ("me@a.b", "a.b:1"), ("fe80::1", "[fe80::1]:1")]
)
def test_where_the_coordinator_is(host, at):
    assert address(host, 1) == at
