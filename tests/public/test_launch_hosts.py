"""`openipu launch --host` with a stand-in for ssh and the network (fake_ssh.py), and everything else real."""

import ast
import os
import signal
import sys
from pathlib import Path

import pytest

from launched import launch, launching, lines_until, rest, wait_for_the_end_of

FAKE = Path(__file__).parents[1] / "support" / "fake_ssh.py"
WAIT = "echo ready $$; while :; do sleep 0.05; done"


@pytest.fixture
def path(tmp_path, monkeypatch):
    """A PATH on which ssh is the stand-in, in a folder whose name has to be quoted."""
    (tmp_path / "ssh").write_text(f'#!/bin/sh\nexec {sys.executable} -I -S {FAKE} "$@"\n')
    (tmp_path / "ssh").chmod(0o755)
    folder = tmp_path / "it's a folder"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return f"{tmp_path}{os.pathsep}{os.environ['PATH']}"


REPORT = """
import os, sys
names = "REMOTE_HOST", "OPENIPU_INSTANCE", "OPENIPU_COORDINATOR", "OPENIPU_CACHE", "OWN"
print([*map(os.environ.get, names), os.getcwd(), sys.executable, sys.argv])
"""


def test_hosts_get_their_instances(path):
    Path("train.py").write_text(REPORT)
    variables = {"PATH": path, "OPENIPU_CACHE": "$x 'y'", "OWN": "does not travel"}
    found = launch("--host", "me@a,b", "--num-instances", "3", "train.py", "--x", 'y "z"', **variables)
    assert found.returncode == 0, found.stderr
    reports = sorted(line for line in found.stdout.splitlines() if "Welcome" not in line)
    at = ast.literal_eval(reports[0].partition(" ")[2])[2]
    assert at.startswith("a:")
    same = [at, "$x 'y'", None, str(Path.cwd()), sys.executable, ["train.py", "--x", 'y "z"']]
    assert reports == [f"[{index}] {[host, str(index), *same]}" for index, host in enumerate(["me@a", "me@a", "b"])]


@pytest.mark.parametrize("hosts", ["a,nowhere", "nowhere,a"])
def test_a_host_that_cannot_be_reached(path, hosts):
    found = launch("--host", hosts, "sh", "-c", WAIT, PATH=path)
    index = hosts.split(",").index("nowhere")
    assert found.returncode == 255
    assert found.stderr.splitlines()[-2:] == [
        f"[{index}] ssh: Could not resolve hostname nowhere",
        f"Error: instance {index} on host nowhere could not be started",
    ]


def test_ctrl_c_is_passed_on_to_hosts(path):
    with launching("--host", "a,b", "sh", "-c", f"trap 'echo saved; exit 0' INT; {WAIT}", PATH=path) as job:
        lines = lines_until(job, "ready", 2)
        job.send_signal(signal.SIGINT)
        code, output = rest(job)
        assert code == 130
        assert sorted(output.splitlines()) == ["[0] saved", "[1] saved", "stopped by SIGINT"]
        wait_for_the_end_of(*(int(line.split()[-1]) for line in lines if "ready" in line))


def test_a_lost_connection(path):
    """The launcher hears of it from ssh, and the instance from the end of its input."""
    with launching("--host", "a,b", "sh", "-c", f"echo keeper $PPID; {WAIT}", PATH=path) as job:
        lines = lines_until(job, "ready", 2)
        last = {line[1]: int(line.split()[-1]) for line in lines if "keeper" in line}
        ssh = int(Path(f"/proc/{last['1']}/stat").read_text().rpartition(")")[2].split()[1])
        os.kill(ssh, signal.SIGKILL)
        code, output = rest(job)
        assert (code, output) == (137, "Error: instance 1 on host b was killed by SIGKILL\n")
        wait_for_the_end_of(*(int(line.split()[-1]) for line in lines if "Welcome" not in line))


def test_a_killed_launcher_ends_what_runs_on_hosts(path):
    with launching("--host", "a,b", "sh", "-c", f"sleep 1000 & echo ready $!; {WAIT}", PATH=path) as job:
        lines = lines_until(job, "ready", 4)
        job.kill()
        wait_for_the_end_of(*(int(line.split()[-1]) for line in lines if "ready" in line))
