"""The `openipu` command where things are wrong: its environment, its terminal, the end of its pipe."""

import fcntl
import json
import os
import pty
import re
import struct
import subprocess
import sys
import termios
import time

import openipu
from openipu.cli import app

import pytest
from typer.testing import CliRunner

OPENIPU = f"{sys.executable} -m openipu"


def shell(script, **environment):
    """Run `script` in bash, where $o is the command."""
    inherited = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "NO_COLOR")}
    return subprocess.run(
        ["bash", "-c", script],
        env={**inherited, "o": OPENIPU, **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def rows(output):
    return dict(re.split(r"\s{2,}", line, maxsplit=1) for line in output.splitlines())


# --- openipu info ----------------------------------------------------------------------------------------------------


def test_info_shows_what_is_wrong(tmp_path):
    """Each of these would end a program; here it is a row, and the rest is shown as well."""
    (tmp_path / "file").touch()
    found = shell(
        "$o info",
        XLA_FLAGS="--xla_nonsense",
        TF_POPLAR_FLAGS="--nonsense",
        OPENIPU_CACHE=str(tmp_path / "file" / "cache"),
        COLUMNS="0",
    )
    assert (found.returncode, found.stderr) == (0, "")
    shown = rows(found.stdout)
    assert shown["OpenIPU"] == openipu.__version__
    assert shown["Keras and JAX"] == "problem: Unknown flag in XLA_FLAGS: --xla_nonsense"
    assert shown["environment"].startswith("problem: '--nonsense' in TF_POPLAR_FLAGS is not a flag.")
    assert shown["cache folder"].endswith(f"problem: {tmp_path / 'file'} is not a folder")
    assert shown["XLA_FLAGS"] == "--xla_nonsense"


def test_info_for_programs():
    found = shell("$o info --json | cat", OPENIPU_CACHE="off")
    assert found.returncode == 0, found.stderr
    shown = json.loads(found.stdout)
    assert (shown["OpenIPU"], shown["Keras backend"], shown["cache folder"]) == (openipu.__version__, "jax", "off")


def test_info_without_devices(tmp_path):
    tmp_path.chmod(0o777)
    found = shell("$o info", JAX_PLATFORMS="nonsense", OPENIPU_CACHE=str(tmp_path), POPLAR_ENGINE_OPTIONS="[]")
    assert found.returncode == 0, found.stderr
    shown = rows(found.stdout)
    assert shown["devices"].startswith("problem: RuntimeError: Unable to initialize backend 'nonsense'")
    assert shown["Keras backend"] == "jax"
    assert shown["environment"].startswith("problem: POPLAR_ENGINE_OPTIONS must be a JSON object")
    assert shown["cache folder"].endswith("problem: others can write to it, so it is not used")


@pytest.mark.parametrize(
    ("folder", "words"),
    [
        ("~no-such-user/cache", "problem: ValueError: OPENIPU_CACHE is '~no-such-user/cache', but there is"),
        ("x" * 300, "problem: "),
        ("off", "off"),
    ],
)
def test_info_about_cache_folders(monkeypatch, folder, words):
    from openipu.cli.info import options

    monkeypatch.delenv("TF_POPLAR_FLAGS", raising=False)
    monkeypatch.setenv("OPENIPU_CACHE", folder)
    assert options()["cache folder"].startswith(words)


# --- where the output goes -------------------------------------------------------------------------------------------


def test_output_that_nobody_reads():
    """One process after another, because each needs a second to start."""
    found = shell(
        """
        $o schedule Grouped --stages 4 --micro-batches 800 | head -1 | cut -c1-4
        $o --help | true
        $o schedule >&-
        echo closed $?
        $o schedule >/dev/full
        echo full $?
        """
    )
    assert found.stdout.split() == ["tick", "closed", "0", "full", "2"]
    assert found.stderr == "Error: [Errno 28] No space left on device\n"


def test_a_diff_that_nobody_reads(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("import tensorflow.keras as k\n")
    found = shell('$o migrate "$old" | true; echo ${PIPESTATUS[0]}', old=str(script))
    assert (found.stdout, found.stderr) == ("1\n", "")


def test_info_that_nobody_reads():
    found = shell("$o info >&-; echo closed $?; $o info >/dev/full; echo full $?")
    assert found.stdout.split() == ["closed", "0", "full", "1"]
    assert found.stderr == "Error: [Errno 28] No space left on device\n"


def on_a_terminal(columns, *arguments, **environment):
    """What the command writes to a terminal of that width."""
    ours, its = pty.openpty()
    fcntl.ioctl(its, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    inherited = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES", "NO_COLOR")}
    process = subprocess.Popen(
        [sys.executable, "-m", "openipu", *arguments], stdout=its, stderr=its, env={**inherited, **environment}
    )
    os.close(its)
    written = b""
    while True:
        try:
            written += os.read(ours, 4096)
        except OSError:  # the process has ended
            break
    os.close(ours)
    assert process.wait(60) == 0
    return written.decode().replace("\r\n", "\n")


def test_terminals_of_any_width():
    narrow = on_a_terminal(10, "schedule", TERM="xterm-256color")
    assert "\x1b[38;5;" in narrow
    plain = re.sub(r"\x1b\[[0-9;]*m", "", narrow)
    assert max(map(len, plain.splitlines())) <= 100
    assert "F0:7" in plain
    assert "device" in plain
    assert "stash" in plain
    none = on_a_terminal(0, "schedule", TERM="xterm", NO_COLOR="1")
    assert "\x1b" not in none
    assert "F0:7" in none


@pytest.mark.parametrize("columns", ["0", "-3", "many", "7", "1000000"])
@pytest.mark.parametrize("arguments", [["--help"], ["schedule"]])
def test_any_number_of_columns(monkeypatch, columns, arguments):
    monkeypatch.setenv("COLUMNS", columns)
    from openipu.cli import terminal

    terminal.mend_environment()
    result = CliRunner().invoke(app, arguments, env={"COLUMNS": os.environ.get("COLUMNS")})
    assert result.exit_code == 0
    assert {"--help": "schedule", "schedule": "F0:7"}[arguments[0]] in result.output


# --- sizes and codes -------------------------------------------------------------------------------------------------


def test_the_version():
    result = CliRunner().invoke(app, ["--version"])
    assert (result.exit_code, result.output) == (0, f"openipu {openipu.__version__}\n")


@pytest.mark.parametrize(
    "arguments",
    [
        ["--micro-batches", "100000000"],
        ["GPipe", "--micro-batches", "100000000", "--inference"],
        ["Interleaved", "--stages", "1000000"],
        ["Sequential", "--stages", "100", "--micro-batches", "100"],
        ["--stages", "2", "--devices", "0,999999999"],
        ["OneFOneB", "--stages", "2000", "--micro-batches", "1"],
    ],
)
def test_huge_tables_are_refused_at_once(arguments):
    began = time.monotonic()
    result = CliRunner().invoke(app, ["schedule", *arguments])
    assert time.monotonic() - began < 2
    assert result.exit_code == 2
    assert "too large to show. Use " in result.output


@pytest.mark.parametrize(
    "arguments",
    [
        ["Grouped", "--stages", "2", "--micro-batches", "5000"],
        ["Sequential", "--stages", "8", "--micro-batches", "1000"],
        ["OneFOneB", "--stages", "128", "--micro-batches", "64"],
        ["Interleaved", "--stages", "128", "--micro-batches", "128", "--inference"],
    ],
)
def test_the_largest_tables_take_seconds(arguments):
    result = CliRunner().invoke(app, ["schedule", *arguments])
    assert result.exit_code == 0, result.output


@pytest.mark.parametrize(
    ("code", "arguments"), [(0, ["--help"]), (2, ["nonsense"]), (2, ["info", "x"]), (2, ["schedule", "--stages", "0"])]
)
def test_exit_codes(code, arguments):
    assert CliRunner().invoke(app, arguments).exit_code == code


def test_huge_numbers_of_processes_are_refused(tmp_path):
    script = tmp_path / "train.py"
    script.touch()
    for option in ("--num-instances", "--num-replicas", "--ipus-per-replica"):
        result = CliRunner().invoke(app, ["launch", option, "1000000007", str(script)])
        assert (result.exit_code, option in result.output) == (2, True)
