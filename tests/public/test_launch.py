"""`openipu launch` with real processes. Most are shells, which start at once. They say "ready" when they wait."""

import fcntl
import os
import random
import signal
import subprocess
import sys
import termios
import time

import pytest

from launched import command, environment, launch, launching, lines_until, rest, wait_for_the_end_of

TWO = ("--num-instances", "2")
WAIT = "echo ready $$; while :; do sleep 0.05; done"


def shell(script, *options):
    return (*TWO, *options, "sh", "-c", script)


def pids(lines):
    """The numbers at the ends of the lines with "ready"."""
    return [int(line.split()[-1]) for line in lines if "ready" in line]


# --- output ----------------------------------------------------------------------------------------------------------


SPEAKER = r"""
import sys
print("argument", *sys.argv[1:])
print("error", file=sys.stderr)
sys.stdout.write("\r10 %\r20 %\n\nno end")
"""


def test_lines_have_the_number_of_their_instance(tmp_path):
    (tmp_path / "speak.py").write_text(SPEAKER)
    found = launch("-vv", "--vipu-partition", "p", *TWO, str(tmp_path / "speak.py"), "--num-instances", "3")
    assert found.returncode == 0
    for index in range(2):
        lines = [line for line in found.stdout.splitlines() if line.startswith(f"[{index}]")]
        assert lines == [f"[{index}]{end}" for end in (" argument --num-instances 3", " 10 %", " 20 %", "", " no end")]
    notice, *errors = found.stderr.splitlines()
    assert notice.startswith("No effect here: -vv (there is one level of detail); --vipu-partition (there are no IPUs")
    assert sorted(errors) == ["[0] error", "[1] error"]


def test_the_output_of_one_instance_stays_as_it_is():
    script = r"printf '\r10 %%\r20 %%\n\nno end%s' $OPENIPU_INSTANCE; printf 'error%s' $OPENIPU_INSTANCE >&2"
    with subprocess.Popen(
        command(*shell(script, "--only-output-from-instance", "1")),
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        output, errors = process.communicate()
    assert (output, errors) == (b"\r10 %\r20 %\n\nno end1", b"error1")


def test_what_outlives_an_instance_does_not_hold_the_launcher(tmp_path):
    """Its process group ends with it. A process that has left the group stays, and so does its end of the pipe."""
    leave = f"echo $$ > {tmp_path}/left; exec sleep 1000"
    script = f"setsid sh -c '{leave}' & while ! test -s {tmp_path}/left; do sleep 0.05; done; sleep 1000 & echo $!"
    try:
        found = launch("sh", "-c", script)
    finally:
        os.kill(int((tmp_path / "left").read_text()), signal.SIGKILL)
    group = int(found.stdout.split()[-1])
    assert found.returncode == 0
    wait_for_the_end_of(group)


def test_output_that_cannot_be_written_ends_all():
    script = "while :; do echo line; done"
    full = subprocess.run(
        ["bash", "-c", '"$@" > /dev/full', "bash", *command(*shell(script))],
        env=environment(), capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert (full.returncode, full.stderr) == (1, "Error: [Errno 28] No space left on device\n")


def wait_until_full(pipe):
    """Wait until nothing more can be written to a pipe."""
    size = fcntl.fcntl(pipe, fcntl.F_GETPIPE_SZ)
    while int.from_bytes(fcntl.ioctl(pipe, termios.FIONREAD, bytes(4)), sys.byteorder) < size:
        time.sleep(0.02)


@pytest.mark.slow
def test_output_that_is_not_read_does_not_keep_ctrl_c_from_ending_all():
    """As in a pager that waits. Takes seconds, because nobody can tell that the last lines will not be read."""
    with subprocess.Popen(
        command("sh", "-c", "echo $$ >&2; exec yes"),
        env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        pid = int(process.stderr.readline().split()[-1])
        wait_until_full(process.stdout)
        process.send_signal(signal.SIGINT)
        wait_for_the_end_of(pid)
        process.send_signal(signal.SIGINT)
        assert process.stderr.read() == "stopped by SIGINT\n"
        assert process.wait() == 130


# --- the environment -------------------------------------------------------------------------------------------------


def test_what_the_processes_are_told():
    script = "env | grep -E '^(OPENIPU_|TF_POPLAR_|OWN|PYTHONUNB)' | LC_ALL=C sort"
    options = ("--num-replicas", "4", "--ipus-per-replica=3", "--timeout", "7", "--executable-cache-path", "cache")
    found = launch(*shell(script, *options), OWN="mine", TF_POPLAR_FLAGS="--use_ipu_model")
    told = [line.partition(" ")[2] for line in found.stdout.splitlines() if line.startswith("[1]")]
    coordinator = next(line for line in told if line.startswith("OPENIPU_COORDINATOR=127.0.0.1:"))
    assert told == [
        coordinator,
        "OPENIPU_INSTANCE=1",
        "OPENIPU_IPUS_PER_REPLICA=3",
        "OPENIPU_LAUNCH_TIMEOUT=7",
        "OPENIPU_LOCAL_INSTANCE=1",
        "OPENIPU_NUM_INSTANCES=2",
        "OPENIPU_NUM_REPLICAS=4",
        "OPENIPU_RESTARTS=0",
        "OWN=mine",
        "PYTHONUNBUFFERED=1",
        "TF_POPLAR_FLAGS=--use_ipu_model --executable_cache_path=cache",
    ]
    assert f"[0] {coordinator}" in found.stdout.splitlines()


def test_two_launches_at_once_have_different_ports():
    script = f"echo $OPENIPU_COORDINATOR; {WAIT}"
    with launching("sh", "-c", script) as first, launching("sh", "-c", script) as second:
        ports = {lines_until(job, "ready", 1)[0] for job in (first, second)}
    assert len(ports) == 2


def test_instances_meet_at_the_held_port(tmp_path):
    """With JAX' own coordinator, whose server shares the port with the launcher's socket."""
    (tmp_path / "meet.py").write_text(
        "import jax\n"
        "from os import environ as e\n"
        "at, count, index = (e['OPENIPU_' + name] for name in ('COORDINATOR', 'NUM_INSTANCES', 'INSTANCE'))\n"
        "jax.distributed.initialize(at, int(count), int(index), coordinator_bind_address=at)\n"
        "print(jax.process_index(), 'of', jax.process_count(), 'with', jax.device_count())\n"
    )
    found = launch(*TWO, str(tmp_path / "meet.py"), JAX_PLATFORMS="cpu", XLA_FLAGS="")
    assert found.returncode == 0, found.stderr
    assert sorted(found.stdout.splitlines()) == ["[0] 0 of 2 with 2", "[1] 1 of 2 with 2"]


# --- failures --------------------------------------------------------------------------------------------------------


FAILS = """
import os, subprocess, sys, time
from pathlib import Path
if os.environ["OPENIPU_INSTANCE"] == "0":
    child = subprocess.Popen([sys.executable, "-S", "-c", "import time; print('up', flush=True); time.sleep(1000)"])
    Path(sys.argv[1], "pids").write_text(f"{os.getpid()} {child.pid}")
    Path(sys.argv[1], "pids").rename(Path(sys.argv[1], "ready"))
    time.sleep(1000)
while not Path(sys.argv[1], "ready").exists():
    time.sleep(0.01)
raise RuntimeError("a mistake")
"""


def test_a_failure_ends_the_others_and_is_shown_last(tmp_path):
    (tmp_path / "fails.py").write_text(FAILS)
    found = launch(*TWO, str(tmp_path / "fails.py"), str(tmp_path))
    assert found.returncode == 1
    wait_for_the_end_of(*map(int, (tmp_path / "ready").read_text().split()))
    end = ["[1] RuntimeError: a mistake", "Error: instance 1 failed with exit code 1"]
    assert found.stderr.splitlines()[-2:] == end
    assert found.stderr.count("[1] Traceback") == 2, "once when it came, once at the end"


def test_the_failure_of_an_instance_that_is_not_shown():
    script = 'test $OPENIPU_INSTANCE = 0 && exec sleep 1000; for i in $(seq 150); do echo "line $i" >&2; done; exit 3'
    found = launch(*shell(script, "--only-output-from-instance", "0"))
    *lines, last = found.stderr.splitlines()
    assert (found.returncode, last) == (3, "Error: instance 1 failed with exit code 3")
    assert lines == [f"[1] line {number}" for number in range(51, 151)]


def test_an_instance_that_does_not_want_to_end(tmp_path):
    wait_for_it = f"while ! test -e {tmp_path}/go; do sleep 0.05; done"
    script = f"test $OPENIPU_INSTANCE = 0 && {{ {wait_for_it}; exit 3; }}; trap '' TERM; {WAIT}"
    with launching(*shell(script)) as job:
        (pid,) = pids(lines_until(job, "ready", 1))
        (tmp_path / "go").touch()
        assert rest(job) == (3, "Error: instance 0 failed with exit code 3\n")
        wait_for_the_end_of(pid)


def test_an_instance_that_is_killed():
    with launching(*shell(WAIT)) as job:
        lines = lines_until(job, "ready", 2)
        victim = next(pid for pid, line in zip(pids(lines), lines, strict=True) if line.startswith("[1]"))
        os.kill(victim, signal.SIGKILL)
        assert rest(job) == (137, "Error: instance 1 was killed by SIGKILL\n")
        wait_for_the_end_of(*pids(lines))


def test_the_end_of_one_instance_is_not_the_end_of_the_others(tmp_path):
    script = f"test $OPENIPU_INSTANCE = 0 && exit 0; while ! test -e {tmp_path}/go; do sleep 0.05; done; echo done"
    with launching(*shell(f"echo ready $PPID; {script}")) as job:
        lines = lines_until(job, "ready", 2)
        wait_for_the_end_of(next(int(line.split()[-1]) for line in lines if line.startswith("[0]")))
        (tmp_path / "go").touch()
        assert rest(job) == (0, "[1] done\n")


def test_a_command_that_cannot_be_run(tmp_path):
    (tmp_path / "broken").write_text("#!/no/such/interpreter\n")
    (tmp_path / "broken").chmod(0o755)
    found = launch(str(tmp_path / "broken"))
    assert found.returncode == 127
    assert found.stderr.splitlines()[-2:] == [
        f"[0] {tmp_path / 'broken'} cannot be run: No such file or directory",
        "Error: instance 0 failed with exit code 127",
    ]


# --- stopping --------------------------------------------------------------------------------------------------------


def test_ctrl_c_is_passed_on():
    script = f"trap 'echo saved; exit 0' INT; {WAIT}"
    with launching(*shell(script)) as job:
        lines = lines_until(job, "ready", 2)
        job.send_signal(signal.SIGINT)
        code, output = rest(job)
        assert code == 130
        assert sorted(output.splitlines()) == ["[0] saved", "[1] saved", "stopped by SIGINT"]
        wait_for_the_end_of(*pids(lines))


def test_a_second_ctrl_c_kills_at_once():
    """Otherwise SIGTERM would come first, and be heard."""
    script = f"trap 'echo heard' INT; trap 'echo ended' TERM; {WAIT}"
    with launching(*shell(script, "--max-restarts", "3")) as job:
        lines = lines_until(job, "ready", 2)
        job.send_signal(signal.SIGINT)
        lines_until(job, "heard", 2)
        job.send_signal(signal.SIGINT)
        assert rest(job) == (130, "stopped by SIGINT\n")
        wait_for_the_end_of(*pids(lines))


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 143), pytest.param(signal.SIGHUP, 129, marks=pytest.mark.slow)]
)
def test_other_signals_that_stop(number, code):
    script = f"trap 'echo saved; exit 0' TERM; {WAIT}"
    with launching(*shell(script)) as job:
        lines = lines_until(job, "ready", 2)
        job.send_signal(number)
        found, output = rest(job)
        assert (found, output.splitlines()[-1]) == (code, f"stopped by {number.name}")
        assert {"[0] saved", "[1] saved"} <= set(output.splitlines())
        wait_for_the_end_of(*pids(lines))


@pytest.mark.slow
def test_nohup_is_respected(tmp_path):
    script = f"echo ready; while ! test -e {tmp_path}/go; do sleep 0.05; done; echo done"
    with subprocess.Popen(
        ["nohup", *command("sh", "-c", script)],
        env=environment(), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    ) as process:  # fmt: skip
        lines_until(process, "ready", 1)
        process.send_signal(signal.SIGHUP)
        (tmp_path / "go").touch()
        assert rest(process) == (0, "[0] done\n")


def test_a_killed_launcher_leaves_nothing_behind():
    with launching(*shell(f"echo ready $PPID; sleep 1000 & echo ready $!; {WAIT}")) as job:
        family = pids(lines_until(job, "ready", 6))
        job.kill()
        wait_for_the_end_of(*family)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends processes with their parents")
def test_a_killed_keeper_leaves_nothing_behind():
    with launching(*shell(f"echo keeper $PPID; {WAIT}")) as job:
        lines = lines_until(job, "ready", 2)
        os.kill(next(int(line.split()[-1]) for line in lines if line.startswith("[1] keeper")), signal.SIGKILL)
        code, output = rest(job)
        assert (code, output.splitlines()[-1]) == (137, "Error: instance 1 was killed by SIGKILL")
        wait_for_the_end_of(*pids(lines))


# --- restarts --------------------------------------------------------------------------------------------------------


def test_restarts_until_it_works():
    script = (
        "echo at $OPENIPU_COORDINATOR; test $OPENIPU_RESTARTS = 2 && exit 0; test $OPENIPU_INSTANCE = 1 && kill -9 $$; "
        "exec sleep 1000"
    )
    found = launch(*shell(script, "--max-restarts", "3"))
    assert found.returncode == 0
    why = "instance 1 was killed by SIGKILL"
    assert found.stderr.splitlines() == [f"restart 1 of 3: {why}", f"restart 2 of 3: {why}"]
    assert len({line.split()[-1] for line in found.stdout.splitlines()}) == 3, "each start has a port of its own"


def test_restarts_are_counted():
    found = launch("--max-restarts", "2", "sh", "-c", "echo start; echo why >&2; exit $((3 + OPENIPU_RESTARTS))")
    assert (found.returncode, found.stdout.count("start")) == (5, 3)
    assert found.stderr.splitlines() == [
        "[0] why",
        "restart 1 of 2: instance 0 failed with exit code 3",
        "[0] why",
        "restart 2 of 2: instance 0 failed with exit code 4",
        "[0] why",
        "[0] why",
        "Error: instance 0 failed with exit code 5",
    ]


@pytest.mark.slow
def test_many_short_launches(record_property):
    """`OPENIPU_LAUNCHES=1000` sets how many. Each ends in its own way and leaves no process behind."""
    count = int(os.environ.get("OPENIPU_LAUNCHES", "100"))
    draw = random.Random(0)
    for _ in range(count):
        instances, code = draw.randint(1, 5), draw.choice([0, 0, 1, 77, 128 + signal.SIGKILL, 128 + signal.SIGSEGV])
        victim, restarts = draw.randrange(instances), draw.randint(0, 2)
        end = f"exit {code}" if code < 128 else f"kill -{code - 128} $$"
        others = "exec sleep 1000" if code else "exit 0"
        lines = "".join(f"echo {number}; " for number in range(draw.randint(0, 50)))
        script = f"echo pid $$ $PPID; {lines} test $OPENIPU_INSTANCE = {victim} && {end}; {others}"
        found = launch("--num-instances", str(instances), "--max-restarts", str(restarts), "sh", "-c", script)
        assert found.returncode == code, found.stderr
        started = [line.split() for line in found.stdout.splitlines() if " pid " in line]
        assert len(started) <= instances * (restarts + 1 if code else 1)
        assert found.stderr.count("restart ") == (restarts if code else 0)
        if not code:
            assert found.stdout.count("\n") == instances * (1 + lines.count("echo")), "no line is lost"
        wait_for_the_end_of(*(int(pid) for words in started for pid in words[-2:]))
    record_property("random cases", f"{count} launches passed")
